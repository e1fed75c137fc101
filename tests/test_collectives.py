"""What devices say to each other, read from the compiled programs: as much as the plan promises, and nothing else."""

import re
from collections import Counter

import pytest

import jaxenc
from jaxenc.models import whisper
from tests.conftest import KIMI, QWEN

WHISPER = whisper.Config(2, 64, 8, 128, positions=96)
COLLECTIVE = re.compile(r"= \S+ (all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter)(?:-start)?\(")


def collectives(config, strategy, *, model, **rules):
    mesh = jaxenc.make_mesh(data=1, model=model)
    rules = jaxenc.default_rules(mesh).replace(**rules)
    encoder = jaxenc.from_config(config, mesh=mesh, strategy=strategy, rules=rules)
    encoder.warmup(encoder.budgets[:1])
    (program,) = encoder.compiled.values()
    return encoder.plan, Counter(COLLECTIVE.findall(program.as_text()))


@pytest.mark.parametrize(
    ("config", "strategy", "model"), [(KIMI, "tensor", 8), (QWEN, "hybrid", 8), (QWEN, "tensor", 4)]
)
def test_divided_weights_reduce_twice_a_layer_and_permute_nothing(config, strategy, model):
    plan, found = collectives(config, strategy, model=model)
    assert plan.collectives_per_layer == 2
    # the blocks are scanned, so their two reductions stand once; the third is the projector's. The stem's tokens are
    # divided, and gathered once. A flat fused QKV would cost permutes in every layer.
    assert found == {"all-reduce": 3, "all-gather": 1}


def test_whispers_convolutions_gather_their_channels_or_with_those_whole_their_tokens():
    # the second convolution reads all channels of the first, and the blocks all of the second
    _, found = collectives(WHISPER, "tensor", model=8)
    assert found == {"all-reduce": 2, "all-gather": 2}
    plan, found = collectives(WHISPER, "tensor", model=8, channels=None)
    assert plan.length_parts["stem_length"] == 8
    assert found == {"all-reduce": 2, "all-gather": 1}


@pytest.mark.parametrize("config", [KIMI, QWEN, WHISPER], ids=["kimi", "qwen", "whisper"])
@pytest.mark.parametrize("strategy", ["data", "replicate"])
def test_whole_weights_need_no_collective_at_all(config, strategy):
    plan, found = collectives(config, strategy, model=8)
    assert plan.collectives_per_layer == 0
    assert not found
