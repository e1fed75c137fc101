"""Which mesh axes the logical axes of encoders may use."""

from jax.sharding import AbstractMesh, Mesh

from sharding_rules import AxisRules

MODEL_AXES = ("model", "tensor")
NEVER_DIVIDED = (
    "layers",
    "embed",
    "qkv",
    "head_dim",
    "patch",
    "position",
    "position_h",
    "position_w",
    "projector_in",
    "projector_out",
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
    """
    model = next((name for name in MODEL_AXES if name in mesh.axis_names), None)
    batch = tuple(name for name in mesh.axis_names if name != model)
    divided = dict.fromkeys(("heads", "mlp", "projector_mlp", "stem_length", "projector_length"), model)
    return AxisRules(batch=(batch,) if batch else None, **divided, **dict.fromkeys(NEVER_DIVIDED))
