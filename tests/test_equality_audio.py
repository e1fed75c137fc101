"""The other audio encoders give the same rows and gradients on any mesh, whatever lies where."""

import numpy as np
import pytest

import jaxenc
from tests import equality
from tests.parity.checkpoints import AudioSizes, PooledSizes, log_mel, qwen2_5_omni_audio, qwen2_audio, qwen3_asr_audio

# the published numbers of heads
CHECKPOINTS = {
    "qwen2_audio": qwen2_audio(PooledSizes(heads=20, head_dim=4)),
    "qwen2_5_omni_audio": qwen2_5_omni_audio(PooledSizes(heads=20, head_dim=4, positions=20)),
    "qwen3_asr_audio": qwen3_asr_audio(AudioSizes(heads=14, head_dim=4, mel=16)),
}
FRAMES = (120, 61, 37, 95, 3, 118)
CLIPS = {
    "qwen2_audio": [jaxenc.AudioItem(log_mel(120, bins=16, seed=n), frames=n, name=f"{n} frames") for n in FRAMES],
    "qwen2_5_omni_audio": [jaxenc.AudioItem(log_mel(n, bins=16), name=f"{n} frames") for n in FRAMES],
    "qwen3_asr_audio": [jaxenc.AudioItem(log_mel(n, bins=16), name=f"{n} frames") for n in (*FRAMES, 1050)],
}


# Qwen3-ASR's is Qwen3-Omni's module, which is tried on many meshes elsewhere
MESHES = [
    *(("qwen2_audio", mesh) for mesh in ((1, 8), (1, 3))),
    *(("qwen2_5_omni_audio", mesh) for mesh in ((1, 8), (2, 4), (1, 3))),
    ("qwen3_asr_audio", (1, 8)),
]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """By family: its checkpoint, its clips, and what one device makes of them."""
    made = {}
    for family, checkpoint in CHECKPOINTS.items():
        folder = checkpoint.write(tmp_path_factory.mktemp(family))
        encoder = jaxenc.load(folder, tower="audio", dtype="float32")
        made[family] = folder, CLIPS[family], encoder.encode_items(CLIPS[family])
    return made


@pytest.mark.parametrize(("family", "mesh_shape"), MESHES, ids=str)
def test_rows_are_those_of_one_device(cases, family, mesh_shape):
    folder, clips, expected = cases[family]
    mesh = jaxenc.make_mesh(data=mesh_shape[0], model=mesh_shape[1])
    encoder = jaxenc.load(folder, tower="audio", mesh=mesh, dtype="float32")
    assert encoder.plan.flops_ratio <= 1.10
    for layout in ("rows", "length"):
        for clip, rows, got in zip(clips, expected, encoder.encode_items(clips, layout=layout), strict=True):
            equality.assert_same(got, rows, f"{layout} on {mesh_shape}: {clip.name}")


@pytest.mark.parametrize("family", ["qwen2_audio", "qwen2_5_omni_audio"])
def test_gradients_are_finite_and_those_of_one_device(cases, family):
    folder, clips, expected = cases[family]
    single = jaxenc.load(folder, tower="audio", dtype="float32")
    many = jaxenc.load(folder, tower="audio", mesh=jaxenc.make_mesh(data=2, model=4), dtype="float32")
    (rows, slopes), (_, divided) = (equality.rows_and_gradients(encoder, clips) for encoder in (single, many))
    for clip, got, row in zip(clips, rows, expected, strict=True):
        equality.assert_same(got, row, clip.name)
    for path, slope in slopes.items():
        assert np.isfinite(slope).all(), path
        # of `audio_bos_eos_token` no row is made
        assert np.any(slope) != (path == "boundary_embed"), path
        # softmax does not see what all keys have in common: that gradient is rounding alone
        scale = slopes[path.replace("key/bias", "query/bias")]
        if path != "boundary_embed":
            true = tuple(slice(size) for size in slope.shape)
            equality.assert_same(np.asarray(divided[path])[true], slope, path, scale)


@pytest.mark.parametrize("devices", [3, 6, 8, 32])
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_work_is_divided_evenly(family, devices):
    for variant in jaxenc.models.FAMILIES[family].VARIANTS:
        plan = jaxenc.plan(f"{family}:{variant}", mesh_shape={"data": 1, "model": devices})
        assert plan.flops_ratio <= 1.10, variant
