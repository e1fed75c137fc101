"""`sharding_rules` on models that are not ours, and without jaxenc: the code on its page, in a process of its own."""

import json
import os
import subprocess
import sys
from collections import namedtuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sharding_rules import AxisRules, GroupWork, Parameter, RulesError, Workload, make_mesh, named_parameters, resolve
from tests.sharding_rules import page

RULES = AxisRules(embed=None, heads="model", batch="data", length=None)


@pytest.fixture(scope="module")
def fresh():
    """What the blocks print in a process that starts with nothing, and the modules it has in the end."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, "-m", "tests.sharding_rules.page"]
    done = subprocess.run(
        command, cwd=page.PAGE.parents[1], env=environment | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_code_on_the_page_runs_and_prints_what_the_page_shows(fresh):
    # it compares itself what is computed on eight devices with what is computed on one
    assert page.PAGE.read_text().count("np.testing.assert_allclose(") == 3
    assert fresh["printed"] == page.shown(), "python -m tests.sharding_rules.page --write puts it into the page"


def test_the_code_on_the_page_needs_neither_jaxenc_nor_checkpoints_convert(fresh):
    assert {"sharding_rules", "flax"} <= set(fresh["modules"])
    assert not {"jaxenc", "checkpoints_convert"} & set(fresh["modules"])


def test_sharding_rules_needs_no_flax():
    code = "import sharding_rules, sys; print(*{'flax', 'rich', 'jaxenc', 'checkpoints_convert'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=page.PAGE.parents[1], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "")


# trees of parameters


Tree = namedtuple("Tree", "kernel scale")


def tree(heads=12):
    return {"b": [Tree(np.arange(5 * heads, dtype="float32").reshape(5, heads), np.ones(3))], "a": np.float32(2)}


NAMES = {"b": [Tree(("embed", "heads"), PartitionSpec())], "a": PartitionSpec()}


def test_any_tree_gives_parameters_by_path():
    assert named_parameters(jax.eval_shape(tree), NAMES) == {
        "a": Parameter((), (), np.dtype("float32")),
        "b/0/kernel": Parameter((5, 12), ("embed", "heads"), np.dtype("float32")),
        "b/0/scale": Parameter((3,), (None,), np.dtype("float32")),
    }


def test_a_tree_of_names_has_to_fit():
    with pytest.raises(ValueError, match="'c'"):
        named_parameters(tree(), {**NAMES, "c": PartitionSpec()})
    with pytest.raises(RulesError, match=r"b/0/kernel: \(\('embed', 'heads'\), None\) should be one name for each"):
        named_parameters(tree(), {**NAMES, "b": [Tree(PartitionSpec(("embed", "heads"), None), PartitionSpec())]})


def plan_of(parameters, **settings):
    groups = (GroupWork("attention", "heads", "length", (1.0,) * 8, paddable=True),)
    return resolve(
        parameters, make_mesh(model=8), rules=RULES, workload=Workload((1,) * 8, groups), name="tree", **settings
    )


@pytest.mark.parametrize(("strategy", "held"), [("hybrid", 12), ({"attention": "pad"}, 16)])
def test_a_tree_is_placed_and_padded(strategy, held):
    plan = plan_of(named_parameters(tree(), NAMES), strategy=strategy)
    placed = plan.place(tree())
    kernel = placed["b"][0].kernel
    assert kernel.shape == (5, held)
    np.testing.assert_array_equal(kernel[:, :12], tree()["b"][0].kernel)
    assert not kernel[:, 12:].any()
    for value, sharding in zip(jax.tree.leaves(placed), jax.tree.leaves(plan.shardings(tree())), strict=True):
        assert isinstance(sharding, NamedSharding)
        assert value.sharding == sharding
    assert plan.sharding("b/0/kernel") == kernel.sharding


def test_a_tree_is_made_in_its_place():
    plan = plan_of(named_parameters(tree(), NAMES))
    make = jax.jit(lambda: jax.tree.map(jax.numpy.asarray, tree()), out_shardings=plan.shardings(jax.eval_shape(tree)))
    assert make()["b"][0].kernel.sharding == plan.sharding("b/0/kernel")
    assert plan.parts("heads") == 4


def test_a_tree_that_the_plan_was_not_made_for_is_refused():
    plan = plan_of(named_parameters(tree(), NAMES))
    with pytest.raises(ValueError, match=r"b/0/kernel has shape \[5, 16\], the plan was made for \[5, 12\]"):
        plan.place(tree(heads=16))
    with pytest.raises(KeyError, match="tree has no parameter 'c'"):
        plan.place({**tree(), "c": np.ones(3)})
