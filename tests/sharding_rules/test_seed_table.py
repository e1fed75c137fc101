"""What auto does with the head counts of today's encoders on the meshes people have."""

import logging

import pytest

DEVICES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)

# T: tensor over all devices. D: data. A number: hybrid, the weights over that many devices and the batch over the rest.
TABLE = {
    3: "T D T D D 3 D D D D",
    12: "T T T T D T D 4 4 4",
    14: "T T D 2 D 2 T 2 2 2",
    16: "T T D T D 2 D T T 16",
    20: "T T D T T 2 D 4 4 4",
    24: "T T T T D T D T 8 8",
    25: "T D D D T D D D D D",
}
CASES = [
    (heads, devices, cell) for heads, row in TABLE.items() for devices, cell in zip(DEVICES, row.split(), strict=True)
]


@pytest.mark.parametrize(("heads", "devices", "cell"), CASES)
def test_auto_divides_all_work_evenly_and_says_how(tower, caplog, heads, devices, cell):
    strategy, a = {"T": ("tensor", devices), "D": ("data", 1)}.get(cell) or ("hybrid", int(cell))
    small = tower(heads=heads, mlp=heads * 256)
    with caplog.at_level(logging.WARNING, logger="sharding_rules"):
        plan = small.plan({"data": 1, "model": devices})
        again = small.plan({"data": 1, "model": devices})

    assert str(plan) == str(again)
    assert plan.strategy == strategy
    assert plan.parts("heads") == plan.parts("mlp") == a
    assert plan.rows_parts == devices // a
    assert plan.flops_ratio == pytest.approx(1.0)
    assert plan.collectives_per_layer == (2 if a > 1 else 0)
    assert heads % plan.parts("heads") == 0

    over_model = None if strategy == "data" else "model"
    assert tuple(plan.parameter_specs["layers/attention/query/kernel"]) == (None, over_model, None, None)
    assert tuple(plan.parameter_specs["layers/mlp/down/kernel"]) == (None, None, over_model)
    assert tuple(plan.parameter_specs["stem/kernel"]) == (None, None)
    batch_axes = {"tensor": "data", "hybrid": ("data", "model_batch"), "data": ("data", "model")}[strategy]
    assert tuple(plan.spec("batch", "length", "embed")) == (batch_axes, None, None)
    assert plan.length_parts["stem_length"] == a

    assert len(caplog.records) == (strategy != "tensor")
    if strategy != "tensor":
        message = caplog.records[0].getMessage()
        assert f"{heads} heads do not divide over {devices} devices of 'model'" in message
        assert f"Ask for strategy {strategy!r}" in message


@pytest.mark.parametrize(
    ("heads", "mlp", "devices", "a"),
    [
        (16, 100, 8, 4),  # the heads fit 8 devices and the MLP does not: 104 would be 4 % more
        (16, 4304, 32, 16),  # Kimi-K2.5
        (12, 61, 3, 1),  # the heads fit 3 devices and the MLP does not: 63 would be 3 % more
        (6, 1536, 8, 2),  # Whisper tiny
    ],
)
def test_attention_and_mlp_have_to_divide_together(tower, heads, mlp, devices, a):
    plan = tower(heads=heads, mlp=mlp).plan({"data": 1, "model": devices})
    assert (plan.parts("heads"), plan.parts("mlp"), plan.rows_parts) == (a, a, devices // a)


@pytest.mark.parametrize(
    ("heads", "mlp", "devices", "a", "padded"),
    [
        (16, 3420, 8, 8, 3424),  # Qwen2.5-VL 7B
        (12, 4096, 3, 3, 4098),  # GLM-4.1V
        (16, 3420, 32, 16, 3424),
    ],
)
def test_an_mlp_that_almost_divides_is_padded(tower, caplog, heads, mlp, devices, a, padded):
    plan = tower(heads=heads, mlp=mlp).plan({"data": 1, "model": devices})
    assert (plan.parts("heads"), plan.parts("mlp"), plan.rows_parts) == (a, a, devices // a)
    assert plan.shape("layers/mlp/up/kernel") == (2, padded, 8)
    assert plan.shape("layers/attention/query/kernel") == (2, heads, 4, 8)
    # the MLP is 8 of 14
    assert plan.flops_ratio == pytest.approx(1 + 8 / 14 * (padded / mlp - 1))
    decision = next(decision for decision in plan.decisions if decision.axis == "mlp")
    assert (decision.action, decision.size, decision.padded_size) == ("padded and sharded", mlp, padded)
    assert f"{padded - mlp} mlp columns of zeros appended ({padded / mlp - 1:.2%} more work)" in decision.reason
    assert len(caplog.records) == (a != devices)


def test_heads_are_padded_where_it_is_asked_for(tower):
    plan = tower(heads=20).plan({"data": 1, "model": 8}, strategy={"attention": "pad"})
    assert plan.shape("layers/attention/out/kernel") == (2, 8, 24, 4)
    assert plan.parts("heads") == 8
    assert plan.flops_ratio == pytest.approx(1 + 4 / 14 * 0.2)
    # the bytes are those of 24 heads: stem 96, query 1536 + 192, out 1536, mlp 2 x 81920, projector 512, of 2 bytes
    assert plan.param_bytes_per_device == 2 * (96 + (1728 + 1536 + 163840 + 512) // 8)


def test_each_encoder_and_each_mesh_warns_once(tower, caplog):
    for _ in range(3):
        for name in ("first tower", "second tower"):
            for devices in (8, 16):
                tower(name=name).plan({"data": 1, "model": devices})
    assert len(caplog.records) == 4


@pytest.mark.parametrize("strategy", ["hybrid", "data", "replicate", {"attention": "replicate"}])
def test_a_strategy_that_was_asked_for_does_not_warn(tower, caplog, strategy):
    tower().plan({"data": 1, "model": 8}, strategy=strategy)
    assert not caplog.records
