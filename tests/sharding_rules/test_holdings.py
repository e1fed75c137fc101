import json

import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from sharding_rules import AxisRules, make_mesh
from tests.devices import eight


def mesh_of(**shape):
    """Eight devices, not in the order of their numbers."""
    return Mesh(np.array(eight()[:8])[::-1].reshape(*shape.values()), tuple(shape))


PLANS = {
    "tensor": ({}, {"data": 2, "model": 4}, {"strategy": "tensor"}),
    "split": ({}, {"data": 1, "model": 8}, {"strategy": "hybrid"}),
    "padded": ({}, {"data": 1, "model": 8}, {"strategy": "attention=pad"}),
    "data": ({}, {"data": 2, "model": 4}, {"strategy": "data"}),
    "replicate": ({}, {"data": 2, "model": 4}, {"strategy": "replicate"}),
    "three axes": (
        {"rules": {"batch": (("pod", "data"),)}},
        {"pod": 2, "model": 2, "data": 2},
        {"strategy": "tensor"},
    ),
    "three axes, split": (
        {"heads": 18, "rules": {"batch": (("pod", "data"),)}},
        {"model": 4, "pod": 1, "data": 2},
        {"strategy": "hybrid"},
    ),
    "two mesh axes for one": (
        {"rules": {"mlp": (("model", "fsdp"),), "batch": None, "embed": "data"}},
        {"fsdp": 2, "data": 2, "model": 2},
        {"strategy": "tensor"},
    ),
    "spread": ({"units": (64,)}, {"data": 8, "model": 1}, {"layout": "length"}),
}


@pytest.fixture(params=PLANS.values(), ids=PLANS)
def plan(tower, request):
    """On concrete meshes whose devices are in another order than their numbers."""
    changes, shape, settings = request.param
    rules = tower().rules.replace(**changes.get("rules", {}))
    return tower(**{**changes, "rules": rules}).plan(mesh_of(**shape), **settings)


def test_what_a_device_holds_of_the_weights_is_what_jax_gives_it(plan):
    devices = {device.id: device for device in plan.mesh.devices.flat}
    compared = 0
    for path, parameter in plan.parameters.items():
        indices = plan.sharding(path).devices_indices_map(plan.shape(path))
        for holding in plan.holdings():
            held = indices[devices[holding.device]]
            for dimension, (axis, size) in enumerate(zip(parameter.axes, plan.shape(path), strict=True)):
                for share in holding.shares:
                    if share.axis == axis and share.start is not None:
                        assert held[dimension].indices(size) == (share.start, share.stop, 1)
                        compared += 1
    assert compared >= 8 * 5  # kernels and biases of attention, both of the MLP, the projector, on each device


def test_what_a_device_holds_of_the_batch_and_of_tokens_is_what_jax_gives_it(plan):
    rows, tokens = plan.rows_parts, plan.length_parts["stem_length"]
    for axes, size in ((("batch",), rows), (("batch", "stem_length"), tokens)):
        sharding = NamedSharding(plan.mesh, plan.spec(*axes))
        indices = sharding.devices_indices_map((rows, tokens)[: len(axes)])
        for device, holding in zip(plan.mesh.devices.flat, plan.holdings(), strict=True):
            (stem,) = (share for share in holding.shares if share.group == "stem")
            part = holding.batch.part if axes == ("batch",) else stem.part
            assert indices[device][-1].indices(size) == (part, part + 1, 1)


def test_places_and_numbers_of_devices_are_the_meshs(plan):
    for holding in plan.holdings():
        device = plan.mesh.devices[tuple(holding.coordinates[axis] for axis in plan.mesh.axis_names)]
        assert holding.device == device.id == plan.mesh.devices.flat[holding.index].id


def test_together_the_parts_of_the_batch_hold_every_item_once(tower):
    plan = tower(units=(9, 5, 5, 4, 3, 1, 1)).plan({"data": 4, "model": 2}, strategy="tensor", layout="rows")
    parts = {holding.batch.part: holding.batch for holding in plan.holdings()}
    assert sorted(item for part in parts.values() for item in part.whole) == list(range(7))
    assert [holding.batch.part for holding in plan.holdings()] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert plan.holdings()[0].batch.whole == plan.holdings()[1].batch.whole == plan.batching.rows[0]


def test_a_line_says_what_a_device_holds(tower):
    hybrid = tower(units=(1,) * 32).plan({"data": 1, "model": 8})
    assert str(hybrid.holdings()[7]) == (
        "device 7 (data=0, model_batch=1, model=3): heads: 15-19 of 20; mlp: 3840-5119 of 5120; "
        "stem tokens: part 4 of 4; projector: 48-63 of 64; rows: 16 of 32 items"
    )
    padded = tower().plan({"data": 1, "model": 8}, strategy="attention=pad").holdings()
    heads = [str(holding.shares[0]) for holding in padded]
    assert heads[5:] == ["heads: 15-17 of 20", "heads: 18-19 + 1 zero of 20", "heads: 3 zeros of 20"]
    assert [holding.shares[0].zeros for holding in padded] == [0, 0, 0, 0, 0, 0, 1, 3]
    spread = tower(units=(64,)).plan({"data": 1, "model": 8}, strategy="data").holdings()
    assert str(spread[0]).endswith("heads: all; mlp: all; stem tokens: all; projector: all; tokens: 1/8 of 1 item")
    idle = tower(units=(64,) * 3).plan({"data": 1, "model": 8}, strategy="data", layout="rows").holdings()
    assert [holding.batch.rows for holding in idle[2:4]] == ["1 of 3 items", "none of 3 items"]


def test_both_whole_and_spread_items_are_said(tower):
    plan = tower(units=(64, 8, 8)).plan({"data": 2, "model": 4}, strategy="tensor")
    assert plan.batch_layout == "rows and length"
    assert str(plan.holdings()[0]).endswith("rows: 1 of 3 items; tokens: 1/2 of 1 item")


def test_axes_of_no_group_are_held_too(tower):
    rules = AxisRules(**{**dict(tower().rules), "patch": "model"})
    shares = tower(rules=rules).plan(make_mesh(model=4), strategy="tensor").holdings()[1].shares
    assert [(share.group, share.axis, share.start, share.stop) for share in shares if share.group == "parameters"] == [
        ("parameters", "patch", 3, 6)
    ]


def test_json_lists_the_parts_once_and_stays_small(tower):
    plan = tower(units=(1,) * 8).plan({"data": 2, "model": 2}, strategy="tensor")
    heads, mlp, stem, _, batch = json.loads(json.dumps(plan.to_json()))["holdings"]
    assert heads == {
        "group": "attention", "axis": "heads", "size": 20, "parts": 2, "ranges": [[0, 10], [10, 20]],
        "part_of_device": [0, 1, 0, 1],
    }  # fmt: skip
    assert mlp["ranges"] == [[0, 2560], [2560, 5120]]
    assert (stem["size"], stem["ranges"], stem["part_of_device"]) == (None, None, [0, 1, 0, 1])
    assert batch["part_of_device"] == [0, 0, 1, 1]
    assert batch["rows"] == [list(row) for row in plan.batching.rows]
    assert batch["spread"] == []
    many = tower(units=(1,) * 64).plan({"data": 64, "model": 8}, strategy="attention=pad").to_json()["holdings"]
    assert len(json.dumps(many)) < 20_000
