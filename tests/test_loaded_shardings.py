"""Every array that is loaded lies where the plan says, in the shape that the plan says, whatever mesh and strategy."""

import math

import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jaxenc
from checkpoints_convert.cli import app
from jaxenc import console
from jaxenc.layers.parameters import flatten
from tests.devices import eight

PADDED = {"attention": "pad", "mlp": "pad"}
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
CASES = [
    # mesh, its axes, strategy asked for; of the picture and of the audio tower: strategy taken, heads, MLP, parts
    ({"model": 3}, AUTO, "auto", ("data", 16, 96, 1), ("data", 20, 120, 1)),
    ({"data": 1, "model": 5}, EXPLICIT, "auto", ("data", 16, 96, 1), ("tensor", 20, 120, 5)),
    ({"data": 1, "model": 6}, AUTO, "auto", ("hybrid", 16, 96, 2), ("hybrid", 20, 120, 2)),
    ({"model": 7}, AUTO, "auto", ("data", 16, 96, 1), ("data", 20, 120, 1)),
    ({"model": 8}, EXPLICIT, "auto", ("tensor", 16, 96, 8), ("hybrid", 20, 120, 4)),
    ({"data": 2, "model": 4}, AUTO, "tensor", ("tensor", 16, 96, 4), ("tensor", 20, 120, 4)),
    ({"data": 2, "model": 3}, EXPLICIT, "replicate", ("replicate", 16, 96, 1), ("replicate", 20, 120, 1)),
    ({"fsdp": 2, "tensor": 2, "expert": 2}, AUTO, "auto", ("tensor", 16, 96, 2), ("tensor", 20, 120, 2)),
    ({"model": 3}, AUTO, {"attention": "pad"}, ("attention=pad", 18, 96, 3), ("attention=pad", 21, 120, 3)),
    (
        {"data": 1, "model": 5},
        AUTO,
        PADDED,
        ("attention=pad, mlp=pad", 20, 100, 5),
        ("attention=pad, mlp=pad", 20, 120, 5),
    ),
    (
        {"model": 6},
        AUTO,
        {"attention": "replicate"},
        ("attention=replicate", 16, 96, 1),
        ("attention=replicate", 20, 120, 1),
    ),
    ({"model": 7}, EXPLICIT, PADDED, ("attention=pad, mlp=pad", 21, 98, 7), ("attention=pad, mlp=pad", 21, 126, 7)),
]


@pytest.fixture(scope="module", params=["published", "converted"])
def folders(request, kimi_folder, qwen_folder, tmp_path_factory):
    """Both towers, as PyTorch files and as converted checkpoints."""
    if request.param == "published":
        return kimi_folder, qwen_folder
    made = []
    for folder in (kimi_folder, qwen_folder):
        made.append(tmp_path_factory.mktemp("converted") / folder.name)
        assert console.run(app, ["convert", str(folder), str(made[-1]), "--quiet"]) == 0
    return made


@pytest.fixture(scope="module")
def whole(kimi_folder, qwen_folder):
    """The parameters on one device, on the host."""
    return [
        {path: np.asarray(value) for path, value in flatten(jaxenc.load(folder, dtype="float32").params).items()}
        for folder in (kimi_folder, qwen_folder)
    ]


@pytest.mark.parametrize(("shape", "kind", "strategy", "kimi", "qwen"), CASES)
def test_every_array_lies_where_it_was_planned_to(folders, whole, shape, kind, strategy, kimi, qwen):
    devices = np.array(eight()[-math.prod(shape.values()) :]).reshape(*shape.values())
    mesh = Mesh(devices, tuple(shape), axis_types=(kind,) * len(shape))
    for folder, expected, (taken, heads, mlp, parts) in zip(folders, whole, (kimi, qwen), strict=True):
        encoder = jaxenc.load(folder, mesh=mesh, dtype="float32", strategy=strategy)
        plan, params = encoder.plan, flatten(encoder.params)
        assert plan.strategy == taken
        assert plan.parts("heads") == parts
        up = "layers/mlp/up/kernel"
        assert dict(zip(plan.parameters[up].axes, plan.shape(up), strict=True))["mlp"] == mlp
        assert heads in plan.shape("layers/attention/out/kernel")
        assert set(params) == set(plan.parameters) == set(expected)
        for path, value in params.items():
            assert value.sharding == plan.sharding(path)
            assert value.shape == plan.shape(path)
            assert value.sharding.device_set == set(devices.flat)
            # the true values, and zeros for what is padded
            np.testing.assert_array_equal(np.asarray(value), plan.pad(path, expected[path]))
