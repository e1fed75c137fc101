from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

from sharding_rules import PROFILES, DeviceProfile, make_mesh
from sharding_rules.profiles import profile_of

OWN = DeviceProfile(
    name="own",
    flops_per_s={"float32": 100.0, "bfloat16": 400.0},
    efficiency=0.5,
    memory_bytes=1000,
    memory_bytes_per_s=20.0,
    interconnect_bytes_per_s=10.0,
    latency_s=0.25,
)


@dataclass(frozen=True)
class Device:
    """What a mesh needs to hold, of a device that is not here."""

    device_kind: str


def test_a_name_is_found_in_any_case():
    assert list(PROFILES) == ["h100", "h200", "a100", "tpu_v5e", "tpu_v6e", "cpu"]
    assert all(profile.name == name for name, profile in PROFILES.items())
    assert profile_of("h100") is profile_of("H100") is PROFILES["h100"]
    assert profile_of("TPU_v5e") is PROFILES["tpu_v5e"]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'h900'; known are h100, h200, a100, tpu_v5e, tpu_v6e, cpu, or pass"):
        profile_of("h900")


def test_a_name_and_an_own_profile_go_before_the_mesh():
    assert profile_of(OWN) is OWN
    assert profile_of(OWN, mesh=make_mesh(model=2)) is OWN
    assert profile_of("a100", mesh=make_mesh(model=2)).name == "a100"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("TPU v5 lite", "tpu_v5e"),
        ("TPU v5e", "tpu_v5e"),
        ("TPU v6 lite", "tpu_v6e"),
        ("TPU v6e", "tpu_v6e"),
        ("cpu", "cpu"),
        ("NVIDIA GH200 480GB", "h100"),
        ("TPU v5", "h100"),
        ("TPU v5p", "h100"),
        ("Radeon", "h100"),
        ("", "h100"),
    ],
)
def test_a_concrete_mesh_is_known_by_the_kind_of_its_devices(kind, name):
    mesh = Mesh(np.array([Device(kind)]), ("model",))
    assert profile_of(None, mesh=mesh).name == name


def test_a_mesh_of_virtual_cpu_devices_is_known():
    assert profile_of(None, mesh=make_mesh(data=2, model=4)).name == "cpu"


def test_without_devices_it_is_the_h100():
    assert profile_of(None).name == "h100"
    assert profile_of(None, mesh=AbstractMesh((8,), ("model",))).name == "h100"
    assert profile_of(None, mesh=Mesh(np.empty((), dtype=object), ())).name == "h100"


def test_seconds_are_work_over_rate():
    assert OWN.compute_seconds(200.0, "float32") == 4.0
    assert OWN.compute_seconds(200.0, jnp.bfloat16) == OWN.compute_seconds(200.0, np.dtype("bfloat16")) == 1.0
    assert OWN.read_seconds(5.0) == 0.25
    assert OWN.collective_seconds(30.0, 2) == 3.5
    assert OWN.collective_seconds(0, 0) == 0.0


def test_a_dtype_without_a_rate_has_that_of_float32():
    assert OWN.compute_seconds(200.0, "float16") == OWN.compute_seconds(200.0, np.int8) == 4.0


def test_a_second_of_an_h100_by_hand():
    h100 = PROFILES["h100"]
    # 989.4e12 * 0.7 = 692.58e12 and 66.9e12 * 0.7 = 46.83e12 FLOP/s
    assert h100.compute_seconds(692.58e12, "bfloat16") == pytest.approx(1.0)
    assert h100.compute_seconds(46.83e12, "float32") == pytest.approx(1.0)
    assert h100.read_seconds(3.35e9) == pytest.approx(1e-3)
    # 45 MB at 450 GB/s: 100 us, and ten times 12 us
    assert h100.collective_seconds(45e6, 10) == pytest.approx(220e-6)


@pytest.mark.parametrize(
    ("name", "bfloat16_tflops", "float32_tflops", "memory_gb", "memory_gb_per_s", "link_gb_per_s"),
    [
        ("h100", 989.4, 66.9, 80, 3350, 900 / 2),
        ("h200", 989.4, 66.9, 141, 4800, 900 / 2),
        ("a100", 312, 19.5, 80, 2039, 600 / 2),
        ("tpu_v5e", 197, 32.8333, 16, 819, 1600 / 8),
        ("tpu_v6e", 918, 153, 32, 1638, 800 / 2),
    ],
)
def test_units_are_plain_flops_and_bytes_a_second_in_one_direction(
    name, bfloat16_tflops, float32_tflops, memory_gb, memory_gb_per_s, link_gb_per_s
):
    profile = PROFILES[name]
    assert profile.flops_per_s["bfloat16"] == pytest.approx(bfloat16_tflops * 1e12)
    assert profile.flops_per_s["float32"] == pytest.approx(float32_tflops * 1e12, rel=1e-5)
    assert profile.memory_bytes == pytest.approx(memory_gb * 1e9)
    assert profile.memory_bytes_per_s == pytest.approx(memory_gb_per_s * 1e9)
    assert profile.interconnect_bytes_per_s == pytest.approx(link_gb_per_s * 1e9)
    assert 1e-6 < profile.latency_s < 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flops_per_s": {"bfloat16": 1.0}}, r"'own': flops_per_s needs 'float32', has \['bfloat16'\]"),
        ({"efficiency": 0.0}, "efficiency must be above 0 and at most 1, is 0.0"),
        ({"efficiency": 70}, "efficiency must be above 0 and at most 1, is 70"),
        ({"memory_bytes": 0}, "must be positive"),
        ({"interconnect_bytes_per_s": -1.0}, "must be positive"),
        ({"flops_per_s": {"float32": 0.0}}, "must be positive"),
        ({"latency_s": -1e-6}, "must be positive and the latency not negative"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(changes, message):
    fields = {name: getattr(OWN, name) for name in OWN.__dataclass_fields__}
    with pytest.raises(ValueError, match=message):
        DeviceProfile(**(fields | changes))
