import pytest
from jax.sharding import AbstractMesh

from sharding_rules import AxisRules, Parameter, RulesError, resolve


def test_a_rule_is_none_or_a_mesh_axis_or_alternatives_in_order():
    rules = AxisRules(embed=None, heads="model", mlp=(("fsdp", "model"), "model"), kv=("model", "fsdp"))
    assert rules.alternatives("embed") == ()
    assert rules.alternatives("heads") == (("model",),)
    assert rules.alternatives("mlp") == (("fsdp", "model"), ("model",))
    assert rules.alternatives("kv") == (("model",), ("fsdp",))


def test_rules_are_a_mapping_in_the_order_given():
    rules = AxisRules(heads="model", embed=None)
    assert dict(rules) == {"heads": "model", "embed": None}
    assert list(rules.replace(embed="fsdp", mlp=None)) == ["heads", "embed", "mlp"]
    assert rules["embed"] is None


@pytest.mark.parametrize("rule", [["model"], 3, ((),), (("model", None),), ({"model"},)])
def test_a_malformed_rule_is_named(rule):
    with pytest.raises(RulesError, match="rule heads="):
        AxisRules(heads=rule)


def test_an_alternative_that_repeats_a_mesh_axis_is_an_error():
    with pytest.raises(RulesError, match=r"heads=.*twice"):
        AxisRules(heads=(("model", "model"),))


def test_rules_for_a_mesh_drop_only_the_alternatives_it_lacks():
    rules = AxisRules(heads=(("fsdp", "model"), "model"), batch="data", embed=None).for_mesh(
        AbstractMesh((4,), ("model",))
    )
    assert rules.alternatives("heads") == (("model",),)
    assert rules.alternatives("batch") == ()
    assert list(rules) == ["heads", "batch", "embed"]


def test_rules_for_a_mesh_with_none_of_their_axes_are_an_error():
    with pytest.raises(RulesError, match=r"none of the rules' mesh axes is in the mesh \(x=4\)"):
        AxisRules(heads="model", batch="data").for_mesh(AbstractMesh((4,), ("x",)))


def test_a_parameter_with_an_unknown_axis_is_named_with_the_nearest_known_one(tower):
    parameters = tower().parameters | {
        "layers/attention/key/kernel": Parameter((20, 4), ("haeds", "head_dim"), "float32")
    }
    with pytest.raises(
        RulesError, match="layers/attention/key/kernel: there is no rule for axis 'haeds'; did you mean 'heads'"
    ):
        resolve(parameters, AbstractMesh((1, 4), ("data", "model")), rules=tower().rules, workload=tower().workload)


def test_a_rule_naming_a_mesh_axis_the_mesh_lacks_names_both(tower):
    with pytest.raises(
        RulesError, match=r"rule heads='model' names mesh axis 'model', which the mesh \(data=2, modle=4\)"
    ):
        tower().plan({"data": 2, "modle": 4})


def test_two_dimensions_on_one_mesh_axis_are_both_named_whatever_their_order(tower):
    rules = tower().rules.replace(embed="model")
    with pytest.raises(
        RulesError, match=r"layers/attention/query/kernel: .*'heads' and 'embed' both on mesh axis 'model'"
    ):
        tower(rules=rules).plan({"data": 1, "model": 4})
    flipped = AxisRules(**{name: rules[name] for name in reversed(list(rules))})
    with pytest.raises(RulesError, match="'heads' and 'embed' both on mesh axis 'model'"):
        tower(rules=flipped).plan({"data": 1, "model": 4})


def test_names_and_shape_of_a_parameter_have_one_length(tower):
    parameters = tower().parameters | {"odd": Parameter((20, 4), ("heads",), "float32")}
    with pytest.raises(RulesError, match="odd: 1 axis names"):
        resolve(parameters, AbstractMesh((1, 4), ("data", "model")), rules=tower().rules, workload=tower().workload)
