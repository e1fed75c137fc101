"""Trees of parameters, as Flax and others hold them, and the flat paths of a plan."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from sharding_rules.rules import Parameter, RulesError


def named_parameters(tree: Any, names: Any) -> dict[str, Parameter]:
    """What `resolve` needs to know of a model: names and shapes by path.

    Args:
      tree: Parameters, or what `jax.eval_shape` says of them; any pytree.
      names: The same tree with the logical names of each parameter's dimensions: a PartitionSpec, as Flax's
        `get_partition_spec` makes of a model's metadata (dimensions that it leaves out have no name), or a tuple.

    Returns:
      Parameters by path, such as "decoder/mlp/kernel".

    Raises:
      RulesError: A dimension has several names.
      ValueError: The trees differ.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    specs = structure.flatten_up_to(names)  # type: ignore[attr-defined]
    found = {}
    for (path, leaf), spec in zip(leaves, specs, strict=True):
        axes = tuple(spec)
        if not all(name is None or isinstance(name, str) for name in axes):
            raise RulesError(f"{path_of(path)}: {axes} should be one name for each dimension, or None")
        if isinstance(spec, PartitionSpec):
            axes += (None,) * (len(leaf.shape) - len(axes))
        found[path_of(path)] = Parameter(tuple(leaf.shape), axes, leaf.dtype)
    return found


def path_of(path: tuple[Any, ...]) -> str:
    """JAX's key path as a plan has it: `decoder/mlp/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
