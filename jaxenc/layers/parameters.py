"""Named parameters: what a module declares, and how a whole tree of them is read by path."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike

from jaxenc.layers.implementations import AttentionName
from sharding_rules import Plan

Initial = Literal["normal", "zeros", "ones"]


@dataclass(frozen=True)
class Shard:
    """What layers say of devices: by the logical names of axes, and the plan knows the rest.

    Attributes:
        plan: where every axis goes.
        attention: the implementation of attention to try first; see `jaxenc.layers.implementations`.
        layers_apart: whether layers are computed one after the other instead of in a loop.
    """

    plan: Plan
    attention: AttentionName | None = None
    layers_apart: bool = False

    def __call__(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """The same values, divided as the plan says; one name an axis, None for one that is never divided."""
        return self.plan.constrain(x, *axes)

    def per_device(
        self,
        function: Callable[..., jax.Array],
        *args: jax.Array,
        axes: Sequence[Sequence[str | None]],
        out: Sequence[str | None],
    ) -> jax.Array:
        """A function of what each device has of the arguments; see `Plan.per_device`."""
        return self.plan.per_device(function, *args, axes=axes, out=out)


@dataclass(frozen=True)
class Declared:
    """A parameter as its module declares it.

    Attributes:
        shape: size of each axis.
        axes: logical name of each axis.
        dtype: what it is stored in.
        initial: what it holds where no checkpoint fills it.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: np.dtype[Any]
    initial: Initial

    def draw(self, path: str, *, seed: int) -> np.ndarray:
        """Initial values, which depend on path and seed alone and so are the same on every mesh and version."""
        if self.initial != "normal":
            return np.full(self.shape, self.initial == "ones", self.dtype)
        rng = np.random.default_rng([seed, zlib.crc32(path.encode())])
        return (0.02 * rng.standard_normal(self.shape, np.float32)).astype(self.dtype)


def named_parameter(axes: Mapping[str, int], initial: Initial, *, dtype: DTypeLike) -> nnx.Param[jax.Array]:
    """A parameter whose axes carry logical names.

    Args:
        axes: name -> size, in the order of the array's dimensions.
        initial: what it holds where no checkpoint fills it.
        dtype: what it is stored in.

    Returns:
        The parameter, of zeros: values come from checkpoints or from `Declared.draw`. `out_sharding` holds the names,
        and nothing is placed on any device mesh by it.
    """
    value = jnp.zeros(tuple(axes.values()), dtype)
    return nnx.Param(value, out_sharding=tuple(axes), eager_sharding=False, initial=initial)


def declared(module: nnx.Module) -> dict[str, Declared]:
    """Every parameter of a (possibly abstract) module, by path: "a/b/kernel"."""
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        value, about = variable.get_value(), variable.get_metadata()
        found["/".join(map(str, path))] = Declared(
            tuple(value.shape), about["out_sharding"], value.dtype, about["initial"]
        )
    return found


def flatten(params: Mapping[str, Any]) -> dict[str, Any]:
    """A nested tree of parameters as one dict keyed by "a/b/kernel"."""
    return dict(flatten_dict(params, sep="/"))
