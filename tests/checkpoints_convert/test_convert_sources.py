"""Opening checkpoints: what is read lazily, and what is refused with the culprit's name."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints_convert import CheckpointError, open_source
from tests.checkpoints_convert import tiny

INDEX = "model.safetensors.index.json"


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_every_dtype_as_safetensors_wrote_it(tmp_path):
    tensors = {
        "bf16": np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16),
        "f16": np.float16([[1.5, -2.0]]),
        "f32": np.float32([[0.1]]),
        "f64": np.float64([1e300]),
        "i8": np.int8([-1, 2, 3]),
        "flag": np.array([True, False]),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    source = open_source(tmp_path / "a.safetensors")
    for name, value in tensors.items():
        assert tiny.same_bits(source.read(name), value), name
        assert source.tensors[name].shape == value.shape
        assert source.tensors[name].size_bytes == value.nbytes


def test_reads_float8_and_tensors_at_odd_offsets(tmp_path):
    data = bytes([0x38]) + np.float32([1.5, -3.0]).tobytes()
    header = {"__metadata__": {"format": "pt"}, "f8": entry([1], 0, 1, "F8_E4M3"), "f32": entry([2], 1, 9)}
    source = open_source(tiny.write_raw(tmp_path / "a.safetensors", header, data))
    assert source.read("f8").dtype == ml_dtypes.float8_e4m3fn
    assert float(source.read("f8")[0]) == 1.0
    assert source.read("f32").tolist() == [1.5, -3.0]
    out = np.empty(1, np.float32)
    source.read_into("f32", out, start=1)
    assert out.tolist() == [-3.0]


def test_views_cannot_be_written(tmp_path):
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="read-only"):
        open_source(tmp_path / "a.safetensors").read("a")[0] = 1


def test_an_index_opens_only_the_files_that_hold_wanted_tensors(tmp_path):
    tiny.write_folder(tmp_path, {"lm.a": np.zeros(3, np.float32)}, {"v.a": np.ones(2, np.float32)})
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    source = open_source(tmp_path)
    assert set(source.names) == {"lm.a", "v.a"}
    assert source.open(["v.a", "v.absent"]) == []
    assert source.read("v.a").tolist() == [1, 1]
    assert source.sizes.keys() == {"model-00002-of-00002.safetensors"}
    (problem,) = source.open(["lm.a"])
    assert "model-00001-of-00002.safetensors: no such file" in problem
    assert "lm.a" in problem
    with pytest.raises(CheckpointError, match="model-00001-of-00002"):
        source.read("lm.a")


def test_a_folder_without_index_is_all_its_files(tmp_path):
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "x.safetensors")
    save_file({"b": np.ones(1, np.float32)}, tmp_path / "y.safetensors")
    assert set(open_source(tmp_path).names) == {"a", "b"}


def test_a_second_copy_of_the_weights_beside_model_safetensors_is_passed_over(tmp_path):
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    save_file({"a": np.ones(1, np.float32)}, tmp_path / "consolidated.safetensors")
    assert open_source(tmp_path).open(["a"]) == []


def test_a_tensor_in_two_files_is_reported_with_both(tmp_path):
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "x.safetensors")
    save_file({"a": np.ones(1, np.float32), "b": np.ones(1, np.float32)}, tmp_path / "y.safetensors")
    source = open_source(tmp_path)
    assert source.open(["b"]) == []
    assert source.open(["a"]) == ["a: is in 2 files: x.safetensors, y.safetensors"]
    with pytest.raises(CheckpointError, match="a: is in 2 files"):
        source.read("a")


def test_an_index_that_names_a_tensor_its_file_lacks_is_reported(tmp_path):
    tiny.write_folder(tmp_path, {"a": np.zeros(1, np.float32)})
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00001.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    source = open_source(tmp_path)
    assert source.open(["a"]) == []
    (problem,) = source.open(["ghost"])
    assert problem == "ghost: the index says it is in model-00001-of-00001.safetensors, which does not have it"


@pytest.mark.parametrize(
    "path",
    ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "..\\x.safetensors", "C:\\x.safetensors", "x.bin"],
)
def test_an_index_may_not_leave_its_folder(tmp_path, path):
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "x.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": path}}))
    with pytest.raises(CheckpointError) as error:
        open_source(folder)
    assert error.value.problems == [f"{path!r}: is not the path of a .safetensors file inside the checkpoint's folder"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "not readable JSON"), (b"[1]", "a list, not a JSON object"), (b"{}", "no 'weight_map'"),
     (b'{"weight_map": {"a": 1}}', "no 'weight_map'")],
)  # fmt: skip
def test_a_broken_index_is_named(tmp_path, content, message):
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as error:
        open_source(tmp_path)
    assert INDEX in str(error.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x01\x02", "truncated: 2 bytes, no room for a header"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "a header of 1099511627776 bytes"),
        ((500).to_bytes(8, "little") + b"{}", "truncated: the header alone is 500 bytes"),
        ((4).to_bytes(8, "little") + b"{{{{", "malformed header"),
        ((2).to_bytes(8, "little") + b"[]", "a list, not a JSON object"),
        ((2).to_bytes(8, "little") + b"\xff\xfe", "malformed header"),
    ],
)
def test_a_file_that_is_not_safetensors_is_named(tmp_path, raw, message):
    (tmp_path / "bad.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError) as error:
        open_source(tmp_path / "bad.safetensors")
    assert message in error.value.problems[0]
    assert error.value.problems[0].startswith("bad.safetensors: ")


def test_a_truncated_file_is_one_problem_however_many_tensors_are_cut_off(tmp_path):
    header = {"fine": entry([2], 0, 8), "w": entry([2], 8, 16), "v": entry([2], 16, 24), "u": entry([2], 24, 32)}
    path = tiny.write_raw(tmp_path / "a.safetensors", header, bytes(12))
    have = path.stat().st_size
    source = open_source(path)
    assert source.open(["fine"]) == []
    truncated = f"a.safetensors: truncated ({have} of {have + 20} bytes): "
    assert source.open(["w"]) == [truncated + "1 wanted tensor is cut off, the first is w"]
    assert source.open(["fine", "w", "v"]) == [truncated + "2 wanted tensors are cut off, the first is v"]
    with pytest.raises(CheckpointError, match="truncated"):
        source.read("w")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"w": entry([3], 0, 8)}, "8 bytes stored, but F32[3] takes 12"),
        ({"w": entry([2], 8, 0)}, "impossible data_offsets [8, 0]"),
        ({"w": entry([2], -8, 0)}, "impossible data_offsets [-8, 0]"),
        ({"w": entry([-2], 0, 8)}, "malformed shape [-2]"),
        ({"w": entry([2.0], 0, 8)}, "malformed shape [2.0]"),
        ({"w": {"dtype": "F32", "shape": [2]}}, "malformed data_offsets None"),
        ({"w": 7}, "malformed header entry 7"),
        ({"w": entry([2], 0, 8), "v": entry([2], 4, 12)}, "its bytes overlap those of v"),
        ({"w": entry([4], 0, 2, "F4")}, "dtype 'F4' is not one that can be read"),
        ({"w": entry([4], 0, 2, None)}, "malformed dtype None in the header"),
    ],
)
def test_a_broken_tensor_is_reported_only_where_it_is_wanted(tmp_path, header, message):
    ends = [
        value["data_offsets"][1] for value in header.values() if isinstance(value, dict) and "data_offsets" in value
    ]
    header = {**header, "fine": entry([0], 0, 0)}
    source = open_source(tiny.write_raw(tmp_path / "a.safetensors", header, bytes(max(ends, default=8))))
    assert source.open(["fine"]) == []
    (problem,) = source.open(["w"])
    assert problem.startswith("w (a.safetensors): ")
    assert message in problem
    with pytest.raises(CheckpointError, match=r"w \(a\.safetensors\)"):
        source.read("w")


@pytest.mark.parametrize(
    ("header", "data_bytes", "gap"),
    [
        ({"a": entry([2], 0, 8), "w": entry([2], 12, 20), "b": entry([2], 20, 28)}, 28, {"a": 8, "w": 8}),
        ({"w": entry([2], 4, 12), "b": entry([2], 12, 20)}, 20, {"w": 0}),
        ({"a": entry([2], 0, 8), "w": entry([2], 8, 16)}, 20, {"w": 16}),
    ],
)
def test_bytes_of_no_tensor_are_reported_for_the_tensors_beside_them(tmp_path, header, data_bytes, gap):
    path = tiny.write_raw(tmp_path / "a.safetensors", header, bytes(data_bytes))
    start, source = path.stat().st_size - data_bytes, open_source(path)
    for name in header:
        at = start + gap.get(name, 0)
        problem = f"{name} (a.safetensors): 4 bytes beside it, from {at} on, belong to no tensor"
        assert source.open([name]) == ([problem] if name in gap else [])


def test_a_name_that_is_in_one_header_twice_is_malformed(tmp_path):
    one = json.dumps(entry([2], 0, 8))
    tiny.write_raw(tmp_path / "a.safetensors", f'{{"w": {one}, "w": {one}}}'.encode(), bytes(8))
    with pytest.raises(CheckpointError, match=r"a\.safetensors: malformed header: 'w' is in it twice"):
        open_source(tmp_path / "a.safetensors")


def test_links_in_a_folder_may_lead_out_of_it(tmp_path):
    # as all files of huggingface_hub's cache do
    tiny.write_folder(tmp_path / "model", {"a": np.ones(1, np.float32)})
    file = tmp_path / "model" / "model-00001-of-00001.safetensors"
    file.rename(tmp_path / "blob")
    file.symlink_to(tmp_path / "blob")
    assert open_source(tmp_path / "model").read("a").tolist() == [1]


def test_what_is_read_is_counted(tmp_path):
    source = open_source(tiny.write_raw(tmp_path / "a.safetensors", {"w": entry([3], 0, 12)}, bytes(12)))
    header = (tmp_path / "a.safetensors").stat().st_size - 12
    assert source.bytes_read == header
    source.read_into("w", np.empty(2, np.float32), start=1)
    source.prefetch(["w"])
    assert (source.bytes_read, source.bytes_fetched) == (header + 8, 0)


def test_a_file_that_shrinks_after_its_header_was_read_is_an_error(tmp_path):
    path = tiny.write_raw(tmp_path / "a.safetensors", {"w": entry([3], 0, 12)}, bytes(12))
    source = open_source(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"a\.safetensors: ends early"):
        source.read_into("w", np.empty(3, np.float32))
    path.unlink()
    with pytest.raises(CheckpointError, match=r"a\.safetensors: cannot be read any more"):
        source.read("w")


def test_a_config_that_is_missing_or_no_json_is_named(tmp_path):
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        _ = source.config
    (tmp_path / "config.json").write_text("{oops")
    with pytest.raises(CheckpointError, match=r"config\.json is not readable JSON"):
        _ = source.config
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k25"}')
    assert source.config == {"model_type": "kimi_k25"}


def test_what_is_not_there_or_not_safetensors_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_source(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        open_source(tmp_path)
    (tmp_path / "training_args.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"if training_args\.bin is what you mean, give the path of that file"):
        open_source(tmp_path)
    (tmp_path / "weights.h5").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"not a \.safetensors file, nor PyTorch's \(\.bin, \.pt, \.pth\)"):
        open_source(tmp_path / "weights.h5")
    (tmp_path / "checkpoint.json").write_text("{}")
    with pytest.raises(CheckpointError, match="it is a converted checkpoint"):
        open_source(tmp_path)
