import pytest
from jax.sharding import AbstractMesh

import jaxenc
from sharding_rules import AxisRules, RulesError


def rules(*names):
    return jaxenc.default_rules(AbstractMesh((1,) * len(names), names))


@pytest.mark.parametrize(
    ("names", "weights", "batch"),
    [
        (("data", "model"), "model", ("data",)),
        (("fsdp", "tensor", "expert"), "tensor", ("fsdp", "expert")),
        (("tensor", "model"), "model", ("tensor",)),
        (("data", "model_batch", "model"), "model", ("data", "model_batch")),
        (("replica",), None, ("replica",)),
        (("node", "replicas"), None, ("node", "replicas")),
    ],
)
def test_weights_use_the_axis_called_model_or_tensor_and_the_batch_all_others(names, weights, batch):
    found = rules(*names)
    assert found["heads"] == found["mlp"] == found["stem_length"] == weights
    assert found["batch"] == (batch,)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("modle", "model"), ("modl", "model"), ("Model", "model"), ("model_parallel", "model"), ("tenser", "tensor"),
     ("tensors", "tensor"), ("TENSOR", "tensor")],
)  # fmt: skip
def test_a_near_miss_is_an_error_that_names_the_axis_and_the_ways_out(name, meant):
    with pytest.raises(
        RulesError, match=rf"mesh axis '{name}' .*did you mean '{meant}'\? Rename it, or say with rules="
    ):
        rules("data", name)


def test_a_near_miss_is_as_good_as_any_name_where_the_rules_are_given():
    given = AxisRules(**{name: "modle" if rule == "model" else rule for name, rule in rules("model").items()})
    plan = jaxenc.plan("kimi_k25", mesh_shape={"modle": 8}, rules=given, batch=1)
    assert plan.parts("heads") == 8
