import re

import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

from sharding_rules import (
    AxisRules,
    GroupWork,
    IndivisibleAxisError,
    Parameter,
    RulesError,
    Workload,
    make_mesh,
    resolve,
)
from tests.devices import eight


def test_tensor_that_does_not_divide_says_what_why_and_the_ways_out(tower):
    with pytest.raises(IndivisibleAxisError) as error:
        tower(mlp=3420).plan({"data": 1, "model": 8}, strategy="tensor")  # the MLP is no obstacle: 3424 divides
    text = str(error.value)
    assert "layers/attention/query/kernel: axis 'heads' (dimension 1 of [2, 20, 4, 8]) has size 20" in text
    assert "20 heads do not divide over 8 devices of 'model' (20 = 8 x 2 + 4)" in text
    assert "Sizes of 'model' that would work: 1, 2, 4, 5, 10, 20." in text
    for way in (
        "'hybrid': 'model' is split 4 x 2",
        "'data'",
        "'auto'",
        "'attention=replicate': attention whole on each device, the rest as in 'tensor'",
        "'attention=pad': attention padded with zeros until it divides, the rest as in 'tensor'",
    ):
        assert way in text


def test_every_way_out_in_that_error_works(tower):
    with pytest.raises(IndivisibleAxisError) as error:
        tower().plan({"data": 1, "model": 8}, strategy="tensor")
    ways = re.findall(r"^  '(.+?)':", str(error.value), re.MULTILINE)
    assert len(ways) == len(set(ways)) == 6
    for way in ways:
        tower().plan({"data": 1, "model": 8}, strategy=way)
    sizes = re.search(r"would work: (.*)\.", str(error.value)).group(1)
    for size in map(int, sizes.split(", ")):
        assert tower().plan({"data": 1, "model": size}, strategy="tensor").parts("heads") == size


def test_hybrid_on_a_prime_axis_says_so_and_what_would_work(tower):
    with pytest.raises(IndivisibleAxisError, match="'hybrid' is not possible") as error:
        tower(heads=25).plan({"data": 1, "model": 7}, strategy="hybrid")
    text = str(error.value)
    assert "splits mesh axis 'model' in two, a part for the weights and a part for the batch; 7 is prime." in text
    assert "The nearest sizes of 'model' that would work: 10." in text
    assert tower(heads=25).plan({"data": 1, "model": 10}, strategy="hybrid").parts("heads") == 5
    with pytest.raises(IndivisibleAxisError, match="'model' that would work: 6 and 8"):
        tower(heads=16).plan({"data": 1, "model": 7}, strategy="hybrid")
    with pytest.raises(IndivisibleAxisError, match="it is a single device"):
        tower().plan({"data": 8, "model": 1}, strategy="hybrid")


def test_hybrid_of_which_no_split_divides_says_why_of_each(tower):
    with pytest.raises(IndivisibleAxisError, match="'hybrid' is not possible") as error:
        tower(heads=25).plan({"data": 1, "model": 8}, strategy="hybrid")
    text = str(error.value)
    assert "25 heads do not divide over 4 devices of 'model' (25 = 4 x 6 + 1)" in text
    assert "25 heads do not divide over 2 devices of 'model' (25 = 2 x 12 + 1)" in text
    assert "The nearest sizes of 'model' that would work: 10." in text


def test_a_strategy_is_read_as_a_plan_names_it(tower):
    mesh = {"data": 1, "model": 8}
    asked = tower().plan(mesh, strategy={"attention": "pad", "mlp": "tensor"})
    assert tower().plan(mesh, strategy=asked.strategy) == asked
    assert tower().plan(mesh, strategy="attention=pad,mlp=tensor") == asked
    for wrong in ("attention=pad=8", "attention=pad, mlp", "attention=pad,attention=tensor"):
        with pytest.raises(ValueError, match="should give each group one choice"):
            tower().plan(mesh, strategy=wrong)


def test_data_divides_the_batch_over_everything_and_no_weights(tower):
    plan = tower().plan({"data": 2, "model": 4}, strategy="data")
    assert plan.rows_parts == 8
    assert all(set(spec) <= {None} for spec in plan.parameter_specs.values())
    assert plan.flops_ratio == pytest.approx(1)


def test_replicate_leaves_the_model_axis_idle(tower):
    plan = tower().plan({"data": 2, "model": 4}, strategy="replicate")
    assert plan.rows_parts == 2
    assert plan.flops_ratio == pytest.approx(4)
    assert "repeat the same work" in plan.reason


def test_a_mixture_divides_the_groups_it_says(tower):
    plan = tower().plan({"data": 1, "model": 8}, strategy={"attention": "replicate", "mlp": "tensor"})
    assert (plan.parts("heads"), plan.parts("mlp"), plan.rows_parts) == (1, 8, 1)
    # attention 4 of 14 on every device, the other 10 divided by 8: (4 + 10 / 8) / (14 / 8)
    assert plan.flops_ratio == pytest.approx(3.0)
    assert plan.strategy == "attention=replicate, mlp=tensor"
    assert plan.collectives_per_layer == 1


def test_a_mixture_is_checked(tower):
    with pytest.raises(RulesError, match="'atention'; did you mean 'attention'"):
        tower().plan({"data": 1, "model": 8}, strategy={"atention": "replicate"})
    with pytest.raises(ValueError, match="'tensor' or 'pad' or 'replicate', not 'data'"):
        tower().plan({"data": 1, "model": 8}, strategy={"mlp": "data"})
    with pytest.raises(IndivisibleAxisError, match="heads"):
        tower().plan({"data": 1, "model": 8}, strategy={"mlp": "replicate"})
    with pytest.raises(ValueError, match="'projector' cannot be padded"):
        tower().plan({"data": 1, "model": 8}, strategy={"projector": "pad"})


def test_unknown_strategies_and_settings_are_errors(tower):
    mesh = {"data": 1, "model": 8}
    with pytest.raises(ValueError, match="'tensr' should be one of 'auto', 'tensor'"):
        tower().plan(mesh, strategy="tensr")
    with pytest.raises(ValueError, match="should be one of"):
        tower().plan(mesh, strategy={})
    with pytest.raises(ValueError, match="mm_encoder_tp_mode='weight'"):
        tower().plan(mesh, mm_encoder_tp_mode="weight")
    with pytest.raises(ValueError, match="give one of them"):
        tower().plan(mesh, strategy="tensor", mm_encoder_tp_mode="data")


@pytest.mark.parametrize(
    ("mode", "devices", "strategy"), [("weights", 4, "tensor"), ("weights", 8, "hybrid"), ("data", 4, "data")]
)
def test_the_engines_setting_is_understood(tower, mode, devices, strategy):
    assert tower().plan({"data": 1, "model": devices}, mm_encoder_tp_mode=mode).strategy == strategy


def test_weights_mode_is_tensor_even_where_data_does_less_work(tower):
    small = tower(rules=tower().rules.replace(mlp=None))
    assert small.plan({"data": 1, "model": 4}).strategy == "data"
    assert small.plan({"data": 1, "model": 4}, mm_encoder_tp_mode="weights").strategy == "tensor"


def test_bytes_of_parameters_are_exact_and_limit_the_choice(tower):
    small = tower(heads=25, mlp=4, projector=4)
    # stem 96, query 2*25*4*8 + 2*25*4, out 1600, mlp 64 + 64, projector 32 elements of 2 bytes
    assert small.plan({"data": 1, "model": 4}, strategy="data").param_bytes_per_device == 2 * (
        96 + 1800 + 1600 + 128 + 32
    )
    even = tower(heads=20, mlp=4, projector=4)
    full = 2 * (96 + 1440 + 1280 + 128 + 32)
    quarter = 2 * (96 + 360 + 320 + 32 + 8)
    assert even.plan({"data": 1, "model": 4}, strategy="data").param_bytes_per_device == full
    assert even.plan({"data": 1, "model": 4}, strategy="tensor").param_bytes_per_device == quarter
    single = tower(heads=20, mlp=4, projector=4, rules=tower().rules.replace(mlp=None))
    assert single.plan({"data": 1, "model": 4}).strategy == "data"
    half = 2 * (96 + 720 + 640 + 128 + 16)
    assert single.plan({"data": 1, "model": 4}, memory_limit=full).strategy == "data"
    assert single.plan({"data": 1, "model": 4}, memory_limit=full - 1).strategy == "hybrid"
    assert single.plan({"data": 1, "model": 4}, memory_limit=half - 1).strategy == "tensor"


def test_a_memory_limit_that_nothing_fits_is_an_error_with_the_numbers(tower):
    with pytest.raises(ValueError, match="fits the memory limit") as error:
        tower(heads=20, mlp=4, projector=4).plan({"data": 1, "model": 4}, memory_limit=1000)
    assert "the memory limit of 1,000 bytes" in str(error.value)
    assert "'tensor' (weights over 4 devices ('model'), the batch undivided): 1,632 bytes" in str(error.value)


def test_units_go_to_the_parts_longest_first(tower):
    plan = tower(heads=3, units=(1000, 100, 200, 50)).plan({"data": 1, "model": 2}, layout="rows")
    assert plan.batching.rows == ((0,), (2, 1, 3))
    assert plan.strategy == "data"
    assert plan.flops_ratio == pytest.approx(1000 / 675)
    assert plan.padding_ratio == pytest.approx(1000 / 675)
    assert plan.flops_ideal == 14 * 675
    assert plan.flops_per_device == 14 * 1000


def test_the_integer_bound_is_reached_and_said(tower):
    plan = tower(heads=3, units=(1,) * 5).plan({"data": 1, "model": 4})
    assert plan.flops_ratio == plan.cost.flops_bound == pytest.approx(2 * 4 / 5)
    assert "1.60 times its share; whole units of work allow no less" in plan.reason
    assert "a device's share is 1.25 indivisible units" in plan.reason
    by_rows = tower(heads=3, units=(7,) * 5).plan({"data": 1, "model": 4}, layout="rows")
    assert by_rows.flops_ratio == pytest.approx(2 * 4 / 5)
    assert "1.60 times its share; 1.03 is what whole units of work allow" in by_rows.reason


def test_auto_takes_less_work_over_more_division(tower):
    # One item: the batch cannot be divided, so the largest part of the weights that divides does the least work.
    assert tower(heads=12, units=(100,)).plan({"data": 1, "model": 8}).parts("heads") == 4
    # An MLP that is never divided makes tensor do (4 + 1 + 1) / 4 + 8 of 14, data 14 / 4.
    assert tower(rules=tower().rules.replace(mlp=None)).plan({"data": 1, "model": 4}).strategy == "data"


def test_no_work_at_all_is_a_plan_too(tower):
    assert tower(units=()).plan({"data": 1, "model": 8}).flops_ratio == 1.0


def test_a_projector_that_does_not_divide_divides_its_tokens_and_stops_nothing(tower):
    plan = tower(heads=16, projector=62).plan({"data": 1, "model": 4})
    assert plan.strategy == "tensor"
    assert plan.parts("projector_mlp") == 1
    assert plan.length_parts == {"length": 1, "stem_length": 4, "projector_length": 4}
    assert plan.flops_ratio == pytest.approx(1)
    projector = next(decision for decision in plan.decisions if decision.group == "projector")
    assert (projector.action, projector.axis, projector.parts) == ("tokens sharded", "projector_length", 4)
    assert "62 projector_mlp columns do not divide over 4" in projector.reason


def test_a_group_that_divides_follows_those_whose_tokens_it_shares(tower):
    small = tower(heads=20, mlp=64, rules=tower().rules.replace(length="model"))
    plan = small.plan({"data": 1, "model": 8}, strategy="tensor")
    reasons = {decision.group: decision.reason for decision in plan.decisions}
    assert "20 heads do not divide over 8 devices" in reasons["attention"]
    assert reasons["mlp"].startswith(
        "the groups of 'length' do not all divide over 8 devices of 'model'; its tokens are"
    )


def test_a_stem_that_may_not_be_divided_counts(tower):
    plan = tower(rules=tower().rules.replace(stem_length=None)).plan({"data": 1, "model": 4}, strategy="tensor")
    assert plan.flops_ratio == pytest.approx((13 / 4 + 1) / (14 / 4))


def test_alternatives_are_tried_in_order_and_the_batch_gets_what_they_leave(tower):
    both = (("fsdp", "tensor"), "tensor")
    rules = AxisRules(
        layers=None, embed=None, patch=None, heads=both, head_dim=None, mlp=both, projector_mlp=both, projector_in=None,
        batch="data", length=None, stem_length=both, projector_length=both,
    )  # fmt: skip
    mesh = {"data": 1, "fsdp": 2, "tensor": 4}
    whole = tower(heads=16, rules=rules).plan(mesh)
    assert tuple(whole.parameter_specs["layers/mlp/up/kernel"]) == (None, ("fsdp", "tensor"), None)
    assert whole.strategy == "tensor"
    assert whole.rows_parts == 1
    part = tower(heads=20, rules=rules).plan(mesh)
    assert part.strategy == "tensor"
    assert tuple(part.parameter_specs["layers/mlp/up/kernel"]) == (None, "tensor", None)
    assert tuple(part.spec("batch", "length")) == (("data", "fsdp"), None)
    assert part.flops_ratio == pytest.approx(1)
    split = tower(heads=6, rules=rules).plan(mesh)
    assert split.strategy == "hybrid"
    assert split.parts("heads") == 2
    assert dict(split.mesh.shape) == {"data": 1, "fsdp": 2, "tensor_batch": 2, "tensor": 2}
    assert split.rows_parts == 4


def test_an_alternative_of_several_mesh_axes_is_never_split(tower):
    rules = tower().rules.replace(
        heads=(("fsdp", "tensor"),), mlp=(("fsdp", "tensor"),), projector_mlp=None, batch=None,
        stem_length=None, projector_length=None,
    )  # fmt: skip
    plan = tower(rules=rules).plan({"fsdp": 2, "tensor": 4})
    assert {candidate.strategy for candidate in plan.candidates} == {
        "tensor", "attention=pad", "data", "replicate",
    }  # fmt: skip
    assert plan.strategy == "data"
    assert plan.rows_parts == 8


def test_weights_of_no_group_may_use_the_axes_of_the_batch(tower):
    rules = AxisRules(
        layers=None, embed="fsdp", patch=None, heads="tensor", head_dim=None, mlp="tensor", projector_mlp="tensor",
        projector_in=None, batch="fsdp", length=None, stem_length="tensor", projector_length="tensor",
    )  # fmt: skip
    plan = tower(rules=rules).plan({"fsdp": 2, "tensor": 4, "expert": 1})
    assert tuple(plan.parameter_specs["layers/attention/query/kernel"]) == (None, "tensor", None, "fsdp")
    assert tuple(plan.spec("batch", "length", "embed")) == ("fsdp", None, None)
    assert plan.flops_ratio == pytest.approx(1)


def test_groups_on_two_mesh_axes_divide_on_each(tower):
    rules = tower().rules.replace(mlp="expert")
    plan = tower(heads=4, rules=rules).plan({"data": 1, "model": 2, "expert": 2}, strategy="tensor")
    assert tuple(plan.parameter_specs["layers/mlp/up/kernel"]) == (None, "expert", None)
    assert tuple(plan.parameter_specs["layers/attention/out/kernel"]) == (None, None, "model", None)
    assert plan.flops_ratio == pytest.approx(2)


def test_a_mesh_axis_that_no_rule_uses_is_said_to_be_idle(tower):
    plan = tower(heads=4).plan({"data": 1, "model": 4, "expert": 2})
    assert plan.flops_ratio == pytest.approx(2)
    assert "'expert' repeat the same work" in plan.reason


def test_meshes_of_one_axis(tower):
    rules = tower().rules
    model = tower(rules=rules.for_mesh(AbstractMesh((8,), ("model",)))).plan({"model": 8})
    assert (model.strategy, model.parts("heads"), model.rows_parts) == ("hybrid", 4, 2)
    assert tuple(model.spec("batch", "heads")) == ("model_batch", "model")
    data = tower(rules=rules.for_mesh(AbstractMesh((8,), ("data",)))).plan({"data": 8})
    assert (data.strategy, data.parts("heads"), data.rows_parts) == ("data", 1, 8)
    with pytest.raises(IndivisibleAxisError, match="It needs a mesh axis in the rules"):
        tower(rules=rules.for_mesh(AbstractMesh((8,), ("data",)))).plan({"data": 8}, strategy="tensor")


def test_explicit_and_auto_meshes_give_the_same_plan_on_auto_axes(tower):
    plans = [
        tower().plan(Mesh(make_mesh(model=8).devices, ("data", "model"), axis_types=(kind,) * 2))
        for kind in (AxisType.Auto, AxisType.Explicit)
    ]
    assert plans[0] == plans[1]
    assert plans[1].mesh.axis_types == (AxisType.Auto,) * 3


def test_an_abstract_mesh_gives_the_plan_of_the_devices(tower):
    real = tower().plan(make_mesh(data=2, model=4), device="h100")
    abstract = tower().plan({"data": 2, "model": 4})
    assert isinstance(abstract.mesh, AbstractMesh)
    assert abstract.to_json() == real.to_json()
    assert tower(heads=16, mlp=4304).plan({"data": 2, "model": 32}).parts("heads") == 16


def test_a_subset_of_the_devices(tower):
    plan = tower().plan(make_mesh(model=3, devices=eight()[4:]))
    assert plan.sharding("layers/mlp/up/kernel").device_set == set(eight()[4:7])


def test_a_name_that_a_split_would_need_is_no_obstacle_to_what_splits_nothing(tower):
    mesh = {"model_batch": 2, "model": 4}
    small = tower(heads=6, rules=tower().rules.replace(batch="model_batch"))
    assert small.plan(mesh).strategy == "data"
    with pytest.raises(IndivisibleAxisError, match="the other part would be 'model_batch', which is there already"):
        small.plan(mesh, strategy="hybrid")


def test_an_error_about_one_group_does_not_stumble_over_one_without_a_weight_axis(tower):
    small = tower(rules=tower().rules.replace(stem_length=None))
    with pytest.raises(IndivisibleAxisError, match="Sizes of 'model' that would work: 1, 2, 4, 5, 10, 20"):
        small.plan({"data": 1, "model": 8}, strategy="tensor")


def test_a_dimension_without_a_name_is_never_divided(tower):
    parameters = tower().parameters | {"scale": Parameter((6, 20), (None, "heads"), "float32")}
    plan = resolve(parameters, AbstractMesh((1, 4), ("data", "model")), rules=tower().rules, workload=tower().workload)
    assert tuple(plan.parameter_specs["scale"]) == (None, "model")


def test_groups_of_one_weight_axis_are_padded_together_or_not_at_all(tower):
    groups = tuple(
        GroupWork(name, "heads", "length", (1.0,), paddable=name == "attention") for name in ("attention", "pooling")
    )
    settings = {"workload": Workload((1,), groups), "rules": tower().rules}
    small, mesh = tower(heads=100), {"data": 1, "model": 101}
    with pytest.raises(RulesError, match=r"'attention' and 'pooling' share weight axis 'heads'.*'pad' and 'tensor'"):
        small.plan(mesh, strategy={"attention": "pad"}, **settings)
    with pytest.raises(ValueError, match="'pooling' cannot be padded"):
        small.plan(mesh, strategy={"attention": "pad", "pooling": "pad"}, **settings)
    # one head more of 100 is little enough to be padded without being asked, were it not for the pooling
    assert small.plan(mesh, **settings).strategy == "data"
    assert small.plan(mesh).strategy == "tensor"


def test_groups_and_parameters_have_to_meet(tower):
    lost = Workload((1,), (GroupWork("attention", "embed", "length", (1.0,)),))
    with pytest.raises(RulesError, match="group 'attention': no parameter has its axis 'embed'"):
        resolve({"a": Parameter((4,), ("heads",), "float32")}, AbstractMesh((1, 2), ("data", "model")),
                rules=tower().rules, workload=lost)  # fmt: skip
    with pytest.raises(ValueError, match="1 FLOPs for 2 items"):
        Workload((1, 2), (GroupWork("attention", "heads", "length", (1.0,)),))
