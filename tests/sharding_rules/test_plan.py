import io
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh

from sharding_rules import IndivisibleAxisError, RulesError, make_mesh


def test_the_printed_plan_says_what_happened_to_20_heads_on_8_devices(tower):
    text = str(tower().plan({"data": 1, "model": 8}))
    flat = " ".join(text.split())
    assert "on 8 devices, mesh (data=1, model=8) Strategy: hybrid" in flat
    assert (
        "Strategy: hybrid, chosen by auto. 20 heads do not divide over 8 devices of 'model' (20 = 8 x 2 + 4)." in flat
    )
    split = "'model' is split 4 x 2: weights over 4 devices ('model'), the batch over 2 ('data' and 'model_batch')."
    assert f"{split} The plan's mesh is then (data=1, model_batch=2, model=4)." in flat
    assert "flops ratio: work of the busiest device over an equal share" in flat
    assert "'model' is split 4 x 2: 5 heads on each of 4, and the batch over the remaining 2" in flat
    assert "attention heads 20 model 4 5 sharded" in flat
    assert "> hybrid 4 x 2 rows 1.00" in flat
    assert "attention=pad 8 x 1 rows 1.06" in flat
    assert max(map(len, text.splitlines())) < 120


@pytest.mark.parametrize("strategy", ["auto", "tensor", "data", "replicate", {"attention": "replicate"}])
def test_every_line_of_a_printed_plan_is_below_120_columns(tower, strategy):
    text = str(
        tower(heads=12, mlp=144, name="an encoder of a rather long name").plan(
            {"data": 8, "model": 12}, strategy=strategy
        )
    )
    assert max(map(len, text.splitlines())) < 120
    assert all(line == line.rstrip() for line in text.splitlines())


def test_json_round_trips_and_has_what_the_command_line_promises(tower):
    plan = tower().plan({"data": 1, "model": 8})
    data = json.loads(json.dumps(plan.to_json()))
    assert data == plan.to_json()
    assert data["mesh"] == {"data": 1, "model": 8}
    assert data["plan_mesh"] == {"data": 1, "model_batch": 2, "model": 4}
    assert (data["strategy"], data["batch_layout"], data["rows_parts"]) == ("hybrid", "rows", 2)
    assert data["flops_ratio"] == pytest.approx(1)
    assert data["padding_ratio"] == pytest.approx(1)
    assert data["flops_per_device"] == pytest.approx(data["flops_ideal"])
    heads = next(decision for decision in data["decisions"] if decision["axis"] == "heads")
    assert {**heads, "reason": ""} == {
        "group": "attention", "axis": "heads", "size": 20, "padded_size": 20, "mesh_axes": ["model"], "parts": 4,
        "action": "sharded", "reason": "",
    }  # fmt: skip
    strategies = [(c["strategy"], c["weight_parts"], c["batch_parts"], c["chosen"]) for c in data["candidates"]]
    assert strategies == [
        ("tensor", 8, 1, False),
        ("attention=pad", 8, 1, False),
        ("hybrid", 4, 2, True),
        ("hybrid", 2, 4, False),
        ("data", 1, 8, False),
        ("replicate", 1, 1, False),
    ]
    assert data["candidates"][0]["flops_ratio"] is None
    assert data["candidates"][5]["flops_ratio"] == pytest.approx(8)
    assert data["candidates"][2]["param_bytes_per_device"] == data["param_bytes_per_device"]
    assert [c["collectives_per_layer"] for c in data["candidates"]] == [None, 2, 2, 2, 0, 0]


def test_html_is_a_table_with_everything_escaped(tower):
    text = tower(name="<b>&").plan({"data": 1, "model": 8})._repr_html_()
    assert "&lt;b&gt;&amp;" in text
    assert "<b>&" not in text
    assert text.count("<table>") == text.count("</table>") == 2


@pytest.mark.parametrize("width", [80, 100, 200])
def test_rich_shows_the_same_in_any_width_with_the_chosen_in_colour(tower, width):
    rich = pytest.importorskip("rich.console")
    plan = tower().plan({"data": 1, "model": 8})
    console = rich.Console(width=width, force_terminal=True, color_system="standard", record=True, file=io.StringIO())
    console.print(plan)
    text = console.export_text(clear=False)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for said in ("5 heads on each of 4", "20 heads do not divide over 8 devices", "(data=1, model_batch=2, model=4)"):
        assert said in flat
    assert "\u2026" not in text  # nothing is cut
    rows = [(re.sub(r"\x1b\[[\d;]*m", "", line), line) for line in console.export_text(styles=True).splitlines()]
    green = {plain.split()[1]: "\x1b[1;32m" in row for plain, row in rows if plain.strip().startswith("hybrid  ")}
    assert green == {"4": True, "2": False}
    assert "\x1b" not in str(plan)


def test_diff_says_what_changes_and_nothing_else(tower):
    hybrid, data = (tower().plan({"data": 1, "model": 8}, strategy=strategy) for strategy in ("hybrid", "data"))
    lines = diffed(hybrid, data)
    assert lines["strategy"] == ["hybrid", "data"]
    assert lines["attention: heads"] == ["5 on each of 4 (model)", "whole"]
    assert lines["mesh once split"] == ["data=1, model_batch=2, model=4", "-"]
    assert lines["parts of the batch"] == ["2", "8"]
    assert lines.keys().isdisjoint({"encoder", "devices", "mesh", "flops ratio", "items or windows", "batch layout"})
    assert hybrid.diff(hybrid) == "no difference"


def test_diff_between_two_meshes_says_memory_time_and_batch_layout(tower):
    small = tower(units=(3360,)).plan({"data": 1, "model": 4})
    large = tower(units=(3360,)).plan({"data": 8, "model": 8}, strategy="attention=pad")
    lines = diffed(small, large)
    assert lines["devices"] == ["4", "64"]
    assert lines["mesh"] == ["data=1, model=4", "data=8, model=8"]
    assert lines["attention: heads"] == ["5 on each of 4 (model)", "3 on each of 8 (model), 20 + 4 of zeros"]
    assert lines["stem: stem_length"] == ["1/4 on each of 4 (model)", "1/8 on each of 8 (model)"]
    assert lines["batch layout"] == ["rows", "length"]
    before, after = small.cost, large.cost
    assert lines["parameters on each device"][1].endswith(
        f"{after.param_bytes_per_device / before.param_bytes_per_device:.3g} times"
    )
    assert lines["predicted time on h100"] == [
        f"{before.seconds * 1e3:.3g} ms",
        f"{after.seconds * 1e3:.3g} ms, {after.seconds / before.seconds:.3g} times",
    ]


def diffed(one, other):
    """Lines of a diff: what -> [before, after]."""
    lines = (re.split(r" {2,}", line, maxsplit=1) for line in one.diff(other).splitlines())
    return {what: [side.strip() for side in sides.split("  ->  ")] for what, sides in lines}


def test_shardings_are_found_by_path_and_a_wrong_path_names_the_nearest(tower):
    plan = tower().plan(make_mesh(model=8))
    assert plan.sharding("layers/attention/query/bias").spec == jax.P(None, "model", None)
    assert plan.sharding("layers/attention/query/bias").mesh is plan.mesh
    with pytest.raises(KeyError, match="did you mean 'stem/kernel'"):
        plan.sharding("stem/kernl")


def test_activations_are_placed_by_name(tower):
    plan = tower().plan({"data": 1, "model": 8})
    assert tuple(plan.spec("batch", "length", "heads", "head_dim")) == (("data", "model_batch"), None, "model", None)
    assert tuple(plan.spec("batch", "stem_length", None)) == (("data", "model_batch"), "model", None)
    with pytest.raises(RulesError, match="'hedas'; did you mean 'heads'"):
        plan.spec("batch", "hedas")
    with pytest.raises(RulesError, match="'heads' and 'mlp' both use mesh axis 'model'"):
        plan.spec("heads", "mlp")


def test_constrain_divides_inside_the_users_jit(tower):
    plan = tower().plan(make_mesh(data=2, model=4), strategy="tensor")
    out = jax.jit(lambda x: plan.constrain(x * 2, "batch", "length", "heads"))(jnp.ones((2, 3, 20)))
    assert out.sharding.shard_shape(out.shape) == (1, 3, 5)
    assert (out == 2).all()
    assert plan.constrain(jnp.ones((2, 20)), "batch", "heads").sharding.shard_shape((2, 20)) == (1, 5)


def test_constrain_works_inside_set_mesh_and_on_a_split_mesh(tower):
    mesh = make_mesh(model=8)
    plan = tower().plan(mesh)
    with jax.set_mesh(mesh):
        out = jax.jit(lambda x: plan.constrain(x, "batch", "heads"))(jnp.ones((2, 20)))
    assert out.sharding.shard_shape(out.shape) == (1, 5)


def test_constrain_in_an_explicit_mesh_names_both_meshes_and_works_through_auto_axes(tower):
    mesh = Mesh(make_mesh(model=8).devices, ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    plan = tower().plan(mesh)

    def double(x: jax.Array) -> jax.Array:
        return plan.constrain(x, "batch", "heads") * 2

    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=r"data=1, model=8\) has Explicit axes.*data=1, model_batch=2, model=4"):
            jax.jit(double)(jnp.ones((2, 20)))
        out = jax.jit(jax.sharding.auto_axes(double, out_sharding=jax.P()))(jnp.ones((2, 20)))
    assert (out == 2).all()


def test_constrain_raises_at_trace_time_where_jax_would_replicate(tower):
    plan = tower().plan(make_mesh(data=2, model=4))
    with pytest.raises(IndivisibleAxisError) as error:
        jax.eval_shape(lambda x: plan.constrain(x, "batch", "length", "heads"), jnp.ones((2, 3, 18)))
    assert "axis 'heads' (dimension 2 of [2, 3, 18]) has size 18" in str(error.value)
    assert "the 4 devices of mesh axes 'model' (data=2, model=4). Make it a multiple of 4." in str(error.value)
    with pytest.raises(ValueError, match=r"2 names .* for 3 dimensions"):
        plan.constrain(jnp.ones((2, 3, 20)), "batch", "heads")


def test_constrain_traces_on_an_abstract_mesh(tower):
    plan = tower().plan({"data": 8, "model": 8})
    out = jax.eval_shape(
        jax.jit(lambda x: plan.constrain(x, "batch", "heads")), jax.ShapeDtypeStruct((16, 20), "float32")
    )
    assert out.shape == (16, 20)


def test_constrain_does_nothing_on_one_device(tower):
    plan = tower().plan(make_mesh())
    x = jnp.ones((3, 20))
    assert plan.constrain(x, "batch", "heads") is x
    with pytest.raises(RulesError):
        plan.constrain(x, "batch", "hedas")


def test_the_repr_is_one_line(tower):
    assert "\n" not in repr(tower().plan({"data": 1, "model": 8}))
