"""Which mesh axes the logical axes of encoders may use."""

import difflib

from jax.sharding import AbstractMesh, Mesh

from sharding_rules import AxisRules, RulesError

MODEL_AXES = ("model", "tensor")
NEAR = 0.75  # "modle" is 0.8 like "model", "node" 0.67
NEVER_DIVIDED = (
    "layers",
    "embed",
    "qkv",
    "gate_up",
    "head_dim",
    "patch",
    "position",
    "position_h",
    "position_w",
    "projector_in",
    "projector_out",
    "merge",
    "filters",
    "channels_in",
    "kernel_h",
    "kernel_w",
    "conv_features",
    "mel",
    "frames",
    "length",
)


def default_rules(mesh: Mesh | AbstractMesh) -> AxisRules:
    """Rules for a mesh of any names: weights use the axis called "model" or "tensor", the batch all others.

    Args:
        mesh: only its axis names matter.

    Returns:
        Rules that know every logical axis of every encoder here.

    Raises:
        RulesError: no mesh axis is called "model" or "tensor", but one nearly is.
    """
    model = next((name for name in MODEL_AXES if name in mesh.axis_names), None)
    if model is None:
        _check_for_near_misses(mesh)
    batch = tuple(name for name in mesh.axis_names if name != model)
    divided = dict.fromkeys(("heads", "mlp", "projector_mlp", "stem_length", "projector_length"), model)
    return AxisRules(batch=(batch,) if batch else None, **divided, **dict.fromkeys(NEVER_DIVIDED))


def _check_for_near_misses(mesh: Mesh | AbstractMesh) -> None:
    # it would be an axis of the batch, and the weights whole on every device
    for name in mesh.axis_names:
        lower = name.lower()
        words = [meant for meant in MODEL_AXES if lower.startswith(meant)]
        near = words or difflib.get_close_matches(lower, MODEL_AXES, n=1, cutoff=NEAR)
        if near:
            raise RulesError(
                f"mesh axis {name!r} is neither 'model' nor 'tensor', the axes that weights are divided over; did you "
                f"mean {near[0]!r}? Rename it, or say with rules= which mesh axes each logical axis may use."
            )
