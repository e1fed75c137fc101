"""`verify --against torch`: every encoder beside its original, which transformers loads from the same checkpoint."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoints_convert
from benchmarks.subjects import SUBJECTS
from checkpoints_convert import CheckpointError, originals, rows
from checkpoints_convert.cli import app
from checkpoints_convert.mappings import clip as names
from jaxenc import console
from jaxenc.loading import open_checkpoint
from tests.checkpoints_convert.hub import Hub
from tests.checkpoints_convert.test_convert_hub import command_line
from tests.parity.checkpoints import write_checkpoint

# published names that transformers does not read, so that our table is gone through
RENAMED = {"internvit:300m", "internvit:6b, 8 layers", "qwen3_asr_audio:1.7b"}


@pytest.mark.parametrize("name", SUBJECTS)
def test_rows_are_those_of_the_original_as_transformers_loads_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src, dst = converted(name, tmp_path)
    code, found, _ = verify(capsys, src, dst)
    assert code == 0
    assert found["ok"]
    assert found["exact"]
    against = found["against"]
    assert against["independent"] is (name not in RENAMED)
    for item in against["items"]:
        assert 0 < item["difference_rms"] < item["difference_max"] < 1e-5
        assert 0 < item["torch_max"] < 1e-5
        assert item["ours_max"] <= item["allowed"]


@pytest.mark.parametrize(
    ("name", "layout", "config", "independent"),
    [
        ("pixtral:12b", "mistral", "params", False),
        ("pixtral:mistral-small-3.1", "mistral", "params", False),
        ("internvit:300m", "original", "chat", False),
        ("internvit:6b, 8 layers", "hub", "original", True),
        ("kimi_k25", "transformers", "transformers", True),
        ("qwen2_5_vl:7b", "model", "original", True),
        ("qwen3_omni_audio", "thinker", "thinker", True),
        ("qwen3_asr_audio:1.7b", "transformers", "transformers", True),
        ("dinov2:giant", "classifier", "original", True),
    ],
)
def test_other_published_layouts_are_read_too(
    name: str, layout: str, config: str, independent: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subject = SUBJECTS[name]
    src = subject.checkpoint(small=True).write(tmp_path / "published", layout=layout, config=config)
    if config == "params":
        (src / "config.json").rename(src / "params.json")
    code, found, _ = verify(capsys, str(src), "--tower", subject.config.modality)
    assert (code, found["against"]["independent"]) == (0, independent)


def test_a_tensor_that_rows_depend_on_and_that_is_not_read_is_named(tmp_path: Path) -> None:
    src, _ = converted("clip:large", tmp_path)
    stored = open_checkpoint(src)
    assert stored.source is not None
    assert stored.mapping is not None
    entries = tuple(entry for entry in stored.mapping.entries if not entry.target.startswith("pre_norm"))
    with pytest.raises(CheckpointError, match=r"\n  vision_model\.pre_layrnorm\.weight: transformers finds no tensor"):
        rows.differences(stored.source, replace(stored.mapping, entries=entries), stored.config)


def test_names_that_transformers_does_not_know_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    src, dst = converted("internvit:300m", tmp_path)
    monkeypatch.setattr(originals, "READS", {})
    code, _, error = verify(capsys, src, dst)
    assert code == 1
    assert "vision_model.encoder.layers.0.ls1 (and 2 more like it): transformers does not know this tensor" in error


def test_of_a_hub_repository_only_the_towers_files_are_asked_for(tmp_path: Path) -> None:
    checkpoint = SUBJECTS["kimi_k25"].checkpoint(small=True)
    # the language model's tensors come first: they fill the first file
    repository = checkpoint.write(tmp_path / "repository", shards=6)
    index = json.loads((repository / "model.safetensors.index.json").read_text())["weight_map"]
    hub = Hub(repository)
    script = "from checkpoints_convert.cli import main; main()"
    arguments = ["verify", "hf://org/tiny@v1", "--against", "torch", "--json"]
    done = command_line(hub, tmp_path, "-c", script, *arguments)
    hub.close()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["against"]["independent"]
    files = {index[name] for name in checkpoint.tensors["original"]}
    assert index["language_model.lm_head.weight"] not in files
    assert hub.fetched() == {"config.json", "model.safetensors.index.json", *files}


def test_only_torch_can_be_compared_with(tmp_path: Path) -> None:
    assert console.run(app, ["verify", str(tmp_path), "--against", "numpy"]) == 2


def test_without_dst_the_published_checkpoint_is_encoded_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src, _ = converted("qwen3_omni_audio", tmp_path)
    code, found, _ = verify(capsys, src, "--tower", "audio")
    assert code == 0
    assert found.keys() == {"source", "against", "ok"}
    assert [item["item"] for item in found["against"]["items"]] == ["speech"]


def test_what_a_conversion_rounds_is_rounded_for_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = SUBJECTS["clip:large"].checkpoint(small=True)
    tensors = {name: value * np.float32(1.00037) for name, value in checkpoint.tensors["original"].items()}
    src, dst = str(write_checkpoint(tmp_path / "published", tensors, checkpoint.configs["original"])), tmp_path / "dst"
    assert console.run(app, ["convert", src, str(dst), "--dtype", "bfloat16", "--quiet"]) == 0
    code, found, _ = verify(capsys, src, str(dst))
    assert code == 0
    assert found["rounded"]


def test_an_encoder_that_computes_something_else_is_found_though_every_tensor_is_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src, dst = converted("clip:large", tmp_path)
    metadata = checkpoints_convert.read_metadata(dst)
    assert metadata["sizes"]["activation"] == "quick_gelu"
    metadata["sizes"]["activation"] = "gelu_erf"
    checkpoints_convert.save_checkpoint(tmp_path / "mistaken", checkpoints_convert.restore_host(dst), metadata)
    code, found, error = verify(capsys, src, str(tmp_path / "mistaken"))
    assert (code, found["ok"], found["differing"]) == (1, False, [])
    assert found["exact"]
    assert "\n  photograph: rows are " in error


def test_a_table_that_confuses_tensors_is_found_though_its_inverse_confuses_them_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = names.NAMES.qkv
    monkeypatch.setattr(names, "NAMES", replace(names.NAMES, qkv=(key, query, value)))
    code, found, error = verify(capsys, *converted("clip:large-336", tmp_path))
    assert (code, found["ok"], found["differing"]) == (1, False, [])
    assert "\n  photograph: rows are " in error


def test_swapped_heads_are_found_by_their_values_and_by_their_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src, dst = converted("whisper:large-v3", tmp_path)
    params = checkpoints_convert.restore_host(dst)
    value = params["layers/attention/value/kernel"]
    params["layers/attention/value/kernel"] = value[:, [1, 0, *range(2, value.shape[1])]]
    checkpoints_convert.save_checkpoint(tmp_path / "swapped", params, checkpoints_convert.read_metadata(dst))
    code, found, error = verify(capsys, src, str(tmp_path / "swapped"))
    assert (code, len(found["differing"])) == (1, 2)
    assert "layers.0.self_attn.v_proj.weight: " in error
    assert "\n  speech: rows are " in error


@pytest.mark.parametrize("lacking", ["torch", "transformers"])
def test_without_torch_or_transformers_one_error_says_what_to_install(
    lacking: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == lacking else find(name))
    code, _, error = verify(capsys, str(tmp_path))
    assert code == 1
    assert error.startswith(f"error: --against torch: there is no {lacking} here; ")
    assert error.endswith('pip install "jaxenc[verify]"\n')


def test_an_old_transformers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.57.1")
    code, _, error = verify(capsys, str(tmp_path))
    assert code == 1
    assert error.startswith("error: --against torch: transformers 4.57.1 is too old")
    assert error.endswith('pip install "jaxenc[verify]"\n')


def converted(name: str, folder: Path) -> tuple[str, str]:
    """The tiny checkpoint of a subject, published and converted."""
    subject = SUBJECTS[name]
    src = str(subject.checkpoint(small=True).write(folder / "published"))
    dst = str(folder / "converted")
    assert console.run(app, ["convert", src, dst, "--tower", subject.config.modality, "--quiet"]) == 0
    return src, dst


def verify(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and stderr."""
    capsys.readouterr()
    code = console.run(app, ["verify", *arguments, "--against", "torch", "--json"])
    out, error = capsys.readouterr()
    return code, json.loads(out or "{}"), error
