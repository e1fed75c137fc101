"""Problems of a checkpoint: each names its culprit, and all come in one report."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints_convert import CheckpointError, Target, detect, load_parameters, mappings, open_source
from checkpoints_convert.mapping import Entry, Mapping
from tests.checkpoints_convert import tiny

KIMI = mappings.kimi_k25.mappings(**tiny.KIMI)
ORIGINAL = KIMI["original"]
BLOCK = "vision_tower.encoder.blocks."


def problems(tmp_path, tensors, mapping=ORIGINAL, targets=None):
    save_file(tensors, tmp_path / "model.safetensors")
    return mapping.check(open_source(tmp_path), mapping.shapes if targets is None else targets)


def test_a_sound_checkpoint_has_no_problem(tmp_path):
    assert problems(tmp_path, tiny.kimi_original() | tiny.language_model()) == []


def test_a_missing_tensor_is_named(tmp_path):
    tensors = tiny.kimi_original()
    del tensors[f"{BLOCK}1.wo.bias"]
    assert problems(tmp_path, tensors) == [f"{BLOCK}1.wo.bias: missing"]


def test_a_tensor_missing_from_several_layers_is_one_line(tmp_path):
    tensors = {name: value for name, value in tiny.kimi_original().items() if not name.endswith("norm0.bias")}
    assert problems(tmp_path, tensors) == [f"{BLOCK}{{layer}}.norm0.bias of layers 0-2: missing"]


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path):
    tensors = tiny.kimi_original()
    # The same number of elements, so that a reshape would let it through.
    tensors["vision_tower.patch_embed.proj.weight"] = np.zeros((32, 2, 2, 3), ml_dtypes.bfloat16)
    assert problems(tmp_path, tensors) == [
        "vision_tower.patch_embed.proj.weight: shape [32, 2, 2, 3], expected [32, 3, 2, 2]"
    ]


def test_a_renamed_tensor_is_matched_to_the_missing_one(tmp_path):
    tensors = tiny.kimi_original()
    tensors[f"{BLOCK}0.w_o.weight"] = tensors.pop(f"{BLOCK}0.wo.weight")
    assert problems(tmp_path, tensors) == [
        f"{BLOCK}0.wo.weight: missing",
        f"{BLOCK}0.w_o.weight: unknown tensor in the tower; the nearest known is {BLOCK}0.wo.weight",
    ]


def test_tensors_outside_the_towers_prefixes_are_ignored(tmp_path):
    assert problems(tmp_path, tiny.kimi_original() | {"vision_tower_2.x": np.zeros(1)}) == []


def test_too_many_layers_are_said_once(tmp_path):
    tensors = tiny.kimi_original()
    tensors |= {name.replace("blocks.2.", "blocks.3."): v for name, v in tensors.items() if "blocks.2." in name}
    assert problems(tmp_path, tensors) == [f"{BLOCK}: layers 3 are there, but the config says 3 layers"]


def test_too_few_layers_are_said_once(tmp_path):
    tensors = {name: value for name, value in tiny.kimi_original().items() if "blocks.1." not in name}
    assert problems(tmp_path, tensors) == [
        f"{BLOCK}: layers 1 are missing: the config says 3 layers, the checkpoint has 2 of them"
    ]


def test_an_integer_tower_is_called_quantised(tmp_path):
    tensors = tiny.kimi_original()
    tensors[f"{BLOCK}0.wo.weight"] = np.zeros((32, 32), np.int8)
    (problem,) = problems(tmp_path, tensors)
    assert problem.startswith(f"{BLOCK}0.wo.weight: dtype int8")
    assert "quantised" in problem


def test_packed_weights_are_called_quantised(tmp_path):
    tensors = tiny.kimi_original()
    tensors[f"{BLOCK}0.wo.weight_packed"] = np.zeros((32, 4), np.int32)
    del tensors[f"{BLOCK}0.wo.weight"]
    missing, packed = problems(tmp_path, tensors)
    assert missing == f"{BLOCK}0.wo.weight: missing"
    assert packed.startswith(f"{BLOCK}0.wo.weight_packed: unknown tensor")
    assert "quantised" in packed


def test_targets_and_mapping_must_agree(tmp_path):
    targets = dict(ORIGINAL.shapes)
    del targets["final_norm/bias"]
    targets["final_norm/biass"] = (32,)
    targets["position_embed"] = (4, 6, 31)
    assert problems(tmp_path, tiny.kimi_original(), targets=targets) == [
        "final_norm/bias: the mapping fills it, but there is no such parameter; the nearest known is final_norm/biass",
        "final_norm/biass: no tensor fills this parameter; the nearest known is final_norm/bias",
        "position_embed: parameter of shape [4, 6, 31], the checkpoint's gives [4, 6, 32]",
    ]


def test_two_entries_for_one_parameter_or_one_tensor_are_reported(tmp_path):
    entries = (Entry("a", "x", stored=(2,)), Entry("a", "y", stored=(2,)), Entry("b", "y", stored=(2,)))
    mapping = Mapping("toy", "original", entries=entries, prefixes=())
    tensors = {"x": np.zeros(2, np.float32), "y": np.zeros(2, np.float32)}
    assert problems(tmp_path, tensors, mapping) == [
        "a: filled by 2 entries of the mapping",
        "y: used 2 times by the mapping",
    ]


def test_config_sizes_that_contradict_the_tensors_are_one_line_a_pattern(tmp_path):
    wider = mappings.kimi_k25.mappings(**{**tiny.KIMI, "mlp": 56})["original"]
    assert problems(tmp_path, tiny.kimi_original(), wider) == [
        f"{BLOCK}{{layer}}.mlp.fc0.weight of layers 0-2: shape [48, 32], expected [56, 32]",
        f"{BLOCK}{{layer}}.mlp.fc0.bias of layers 0-2: shape [48], expected [56]",
        f"{BLOCK}{{layer}}.mlp.fc1.weight of layers 0-2: shape [32, 48], expected [32, 56]",
    ]


def test_all_problems_come_in_one_error_whose_first_line_names_the_checkpoint(tmp_path):
    tensors = tiny.kimi_original()
    del tensors["mm_projector.proj.2.bias"]
    tensors["mm_projector.pre_norm.weight"] = np.zeros(31, ml_dtypes.bfloat16)
    tensors["vision_tower.extra"] = np.zeros(1, np.float32)
    tensors[f"{BLOCK}2.wqkv.bias"] = np.zeros(96, np.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    with pytest.raises(CheckpointError) as error:
        load_parameters(source, ORIGINAL, {path: Target(shape, "float32") for path, shape in ORIGINAL.shapes.items()})
    text = str(error.value)
    assert text.splitlines()[0] == f"{tmp_path}: does not hold the kimi_k25 tower asked for (4 problems):"
    culprits = ["mm_projector.proj.2.bias", "mm_projector.pre_norm.weight", f"{BLOCK}2.wqkv.bias", "vision_tower.extra"]
    for culprit in culprits:
        assert any(problem.startswith(culprit) for problem in error.value.problems), culprit
        assert culprit in text


def test_a_missing_file_of_the_language_model_does_not_matter_and_one_of_the_tower_does(tmp_path):
    tower = tiny.kimi_original()
    first = dict(list(tower.items())[:20])
    second = dict(list(tower.items())[20:])
    tiny.write_folder(tmp_path, tiny.language_model(), first, second)
    (tmp_path / "model-00001-of-00003.safetensors").write_bytes(b"not opened")
    assert ORIGINAL.check(open_source(tmp_path)) == []
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    (problem,) = ORIGINAL.check(open_source(tmp_path))
    assert problem.startswith("model-00002-of-00003.safetensors: no such file")
    assert "20 of the wanted tensors" in problem


def test_a_tower_tensor_that_the_index_is_silent_about_is_reported(tmp_path):
    tower = tiny.kimi_original()
    tiny.write_folder(tmp_path, tower | {"vision_tower.extra": np.zeros(1, np.float32)})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    del index["weight_map"]["vision_tower.extra"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (problem,) = ORIGINAL.check(open_source(tmp_path))
    assert problem.startswith("vision_tower.extra: unknown tensor in the tower")


def test_no_tower_at_all_is_said_with_what_is_there(tmp_path):
    save_file(tiny.language_model(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no kimi_k25 tower: nothing under .*vision_tower.*language_model \(3\)"):
        detect(open_source(tmp_path), KIMI)
