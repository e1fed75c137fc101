"""Making a mesh, and splitting one of its axes in two."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from sharding_rules.rules import describe_shape

AnyMesh = Mesh | AbstractMesh


def make_mesh(*, data: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with axes `data` and `model` over the first `data * model` devices.

    Args:
      data: Devices along the axis for the batch.
      model: Devices along the axis for the weights.
      devices: Where to take them from; all of JAX's by default.

    Returns:
      A mesh whose axes are all Auto.

    Raises:
      ValueError: There are fewer devices than that, or a size is not positive.
    """
    return device_mesh({"data": data, "model": model}, devices=devices)


def device_mesh(shape: Mapping[str, int], *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with any axes over the first devices.

    Args:
      shape: Axis name -> size.
      devices: Where to take them from; all of JAX's by default.

    Returns:
      A mesh whose axes are all Auto.

    Raises:
      ValueError: There are fewer devices than that, or a size is not positive.
    """
    found = jax.devices() if devices is None else list(devices)
    needed, sizes = math.prod(shape.values()), describe_shape(shape)
    if min(shape.values(), default=1) < 1:
        raise ValueError(f"mesh ({sizes}): every size must be at least 1")
    if len(found) < needed:
        raise ValueError(
            f"mesh ({sizes}) needs {needed} devices and there are {len(found)}. For virtual CPU devices, set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed} before jax is imported; to plan without "
            f"devices, use jax.sharding.AbstractMesh({tuple(shape.values())}, {tuple(shape)})."
        )
    return Mesh(
        np.array(found[:needed]).reshape(*shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape)
    )


def auto_mesh(mesh: AnyMesh) -> AnyMesh:
    """The same mesh with every axis Auto: the mesh itself where they are."""
    return mesh if all(kind is AxisType.Auto for kind in mesh.axis_types) else _with_axes(mesh, mesh.shape)


def split_axis(mesh: AnyMesh, axis: str, parts: int) -> AnyMesh:
    """The same devices with one mesh axis cut in two.

    `axis` keeps its name and `parts` neighbouring devices; `{axis}_batch`, just before it, counts these groups of
    neighbours. Weights divided over `axis` so reduce between neighbours.

    Args:
      mesh: A mesh, abstract or not.
      axis: The mesh axis to cut.
      parts: What is left of it; divides its size.

    Returns:
      A mesh of the same kind whose axes are all Auto.

    Raises:
      ValueError: `parts` does not divide the size, or the new name is taken.
    """
    rest = split_name(axis)
    if mesh.shape[axis] % parts or rest in mesh.axis_names:
        raise ValueError(
            f"cannot split mesh axis {axis!r} of ({dict(mesh.shape)}) into {rest!r} and {parts} of {axis!r}"
        )
    shape: dict[str, int] = {}
    for name, size in mesh.shape.items():
        shape |= {rest: size // parts, name: parts} if name == axis else {name: size}
    return _with_axes(mesh, shape)


def split_name(axis: str) -> str:
    """What the other part of a mesh axis is called once it is cut."""
    return f"{axis}_batch"


def _with_axes(mesh: AnyMesh, shape: Mapping[str, int]) -> AnyMesh:
    names, sizes, kinds = tuple(shape), tuple(shape.values()), (AxisType.Auto,) * len(shape)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(sizes, names, axis_types=kinds)
    return Mesh(mesh.devices.reshape(sizes), names, axis_types=kinds)
