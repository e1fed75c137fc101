"""Named parameters: what a module declares, and how a whole tree of them is read by path."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike

Initializer = Callable[..., jax.Array]
NORMAL: Initializer = nnx.initializers.normal(0.02)
ZEROS: Initializer = nnx.initializers.zeros_init()
ONES: Initializer = nnx.initializers.ones_init()


class Shard(Protocol):
    """Constrains an activation by the logical names of its axes; `Plan.constrain` is one."""

    def __call__(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """The same values; one name an axis, None for one that is never divided."""


def unsharded(x: jax.Array, *axes: str | None) -> jax.Array:
    """The `Shard` of a single device: leaves `x` where it is."""
    if len(axes) != x.ndim:
        raise ValueError(f"an activation of shape {x.shape} was named {axes}: one name an axis is needed")
    return x


def named_parameter(
    axes: Mapping[str, int], initializer: Initializer, *, dtype: DTypeLike, rngs: nnx.Rngs
) -> nnx.Param[jax.Array]:
    """A parameter whose axes carry logical names.

    Args:
        axes: name -> size, in the order of the array's dimensions.
        initializer: called with (key, shape, dtype).
        dtype: what it is stored in.
        rngs: source of the key.

    Returns:
        The parameter; `out_sharding` holds the names, and nothing is placed on any device mesh by it.
    """
    value = initializer(rngs.params(), tuple(axes.values()), jnp.dtype(dtype))
    return nnx.Param(value, out_sharding=tuple(axes), eager_sharding=False)


def parameter_axes(module: nnx.Module) -> dict[str, tuple[tuple[int, ...], tuple[str, ...], Any]]:
    """Every parameter of a (possibly abstract) module: "a/b/kernel" -> (shape, logical axis names, dtype)."""
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        value = variable.get_value()
        found["/".join(map(str, path))] = (tuple(value.shape), variable.get_metadata("out_sharding"), value.dtype)
    return found


def flatten(params: Mapping[str, Any]) -> dict[str, Any]:
    """A nested tree of parameters as one dict keyed by "a/b/kernel"."""
    return dict(flatten_dict(params, sep="/"))
