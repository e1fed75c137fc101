"""What devices can do, so that work, memory and messages become seconds and bytes: one table, from the datasheets."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from sharding_rules.mesh import AnyMesh


@dataclass(frozen=True)
class DeviceProfile:
    """What one device can do.

    Args:
      name: What it is called, lower case.
      flops_per_s: Dense peak FLOP/s by dtype, `"float32"` among them: IEEE products on GPUs (not TF32), precision
        "highest" on TPUs.
      efficiency: The part of the peak that large products reach, above 0 and at most 1; an estimate.
      memory_bytes: Memory.
      memory_bytes_per_s: Bandwidth of that memory.
      interconnect_bytes_per_s: What the device sends over all its links at once, in one direction.
      latency_s: What one collective takes however small it is; an estimate.
      kinds: How `device_kind` begins on the devices that JAX reports as this one.

    Raises:
      ValueError: There is no rate for float32, the efficiency is not a part of 1, or a number is out of range.
    """

    name: str
    flops_per_s: Mapping[str, float]
    efficiency: float
    memory_bytes: float
    memory_bytes_per_s: float
    interconnect_bytes_per_s: float
    latency_s: float
    kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if "float32" not in self.flops_per_s:
            raise ValueError(f"profile {self.name!r}: flops_per_s needs 'float32', has {sorted(self.flops_per_s)}")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"profile {self.name!r}: efficiency must be above 0 and at most 1, is {self.efficiency}")
        rates = (self.memory_bytes, self.memory_bytes_per_s, self.interconnect_bytes_per_s)
        if min(*rates, *self.flops_per_s.values()) <= 0 or self.latency_s < 0:
            raise ValueError(f"profile {self.name!r}: rates and memory must be positive and the latency not negative")

    def compute_seconds(self, flops: float, dtype: DTypeLike) -> float:
        """Seconds of large products: FLOPs over peak times efficiency; a dtype without a rate has float32's."""
        peak = self.flops_per_s.get(np.dtype(dtype).name, self.flops_per_s["float32"])
        return flops / (peak * self.efficiency)

    def read_seconds(self, size_bytes: float) -> float:
        """Seconds to read that many bytes from the device's memory once, or to write them."""
        return size_bytes / self.memory_bytes_per_s

    def collective_seconds(self, bytes_moved: float, count: int) -> float:
        """Seconds of collectives that follow each other and overlap with nothing.

        Args:
          bytes_moved: What one device sends in all of them; all-reducing n bytes in a ring of p: 2 n (p - 1) / p.
          count: How many there are.
        """
        return bytes_moved / self.interconnect_bytes_per_s + count * self.latency_s


def _peaks(bfloat16: float, float32: float) -> dict[str, float]:
    return {"bfloat16": bfloat16, "float32": float32}


# name, flops_per_s, efficiency, memory_bytes, memory_bytes_per_s, interconnect_bytes_per_s, latency_s, kinds
#
# GB is 1e9 bytes throughout. Vendors give links as the sum of both directions: here, half of it. The tensor-core rates
# of NVIDIA's pages are with sparsity: here, half of them. `efficiency` and `latency_s` are estimates everywhere.
#
# An ICI figure is the sum over a chip's four links. A mesh axis that lies along one dimension of the torus has two of
# them, in effect one where the ring does not close. TPUs make a float32 product at "highest" of six bfloat16 passes.
_ROWS = (
    # SXM5. "NVIDIA H100 Tensor Core GPU Architecture", the table of peak rates, dense:
    #   https://resources.nvidia.com/en-us-hopper-architecture/nvidia-h100-tensor-c
    # "NVIDIA H100 GPU" (80 GB, 3.35 TB/s, NVLink 900 GB/s): https://www.nvidia.com/en-us/data-center/h100/
    DeviceProfile("h100", _peaks(989.4e12, 66.9e12), 0.7, 80e9, 3.35e12, 450e9, 12e-6, ("NVIDIA H100",)),
    # SXM. "NVIDIA H200 GPU" (141 GB, 4.8 TB/s, NVLink 900 GB/s; the H100's peak rates, rounded there to 67 and, with
    # sparsity, 1,979 TFLOPS): https://www.nvidia.com/en-us/data-center/h200/
    DeviceProfile("h200", _peaks(989.4e12, 66.9e12), 0.7, 141e9, 4.8e12, 450e9, 12e-6, ("NVIDIA H200",)),
    # SXM4. "NVIDIA A100 Tensor Core GPU" datasheet (312 and 19.5 TFLOPS, 80 GB, 2,039 GB/s, NVLink 600 GB/s):
    #   https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/
    #   nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    DeviceProfile("a100", _peaks(312e12, 19.5e12), 0.8, 80e9, 2.039e12, 300e9, 15e-6, ("NVIDIA A100",)),
    # "TPU v5e", Cloud TPU documentation (197 TFLOPS, 16 GB, 819 GB/s, ICI 400 GB/s in both directions; an older
    # edition: 1,600 Gbit/s, which is half of it): https://docs.cloud.google.com/tpu/docs/v5e
    DeviceProfile("tpu_v5e", _peaks(197e12, 197e12 / 6), 0.8, 16e9, 819e9, 200e9, 5e-6, ("TPU v5 lite", "TPU v5e")),
    # "TPU v6e", Cloud TPU documentation (918 TFLOPS, 32 GB, 1,638 GB/s, ICI 800 GB/s in both directions):
    #   https://docs.cloud.google.com/tpu/docs/v6e
    DeviceProfile("tpu_v6e", _peaks(918e12, 918e12 / 6), 0.8, 32e9, 1.638e12, 400e9, 5e-6, ("TPU v6 lite", "TPU v6e")),
    # A placeholder without a source: orders of magnitude for one of several virtual devices on a host, however many
    # cores it has. Whoever plans for CPUs passes a profile of their own.
    DeviceProfile("cpu", _peaks(1e11, 1e11), 0.5, 8e9, 1e10, 1e9, 1e-4, ("cpu",)),
)
PROFILES: Mapping[str, DeviceProfile] = {profile.name: profile for profile in _ROWS}


def profile_of(device: str | DeviceProfile | None, *, mesh: AnyMesh | None = None) -> DeviceProfile:
    """The profile to plan with.

    Args:
      device: A name in `PROFILES`, upper or lower case; a profile of your own; or None, for what the mesh is made of.
      mesh: Read where `device` is None. The first device of a concrete mesh decides, by its `device_kind`, whatever
        its board (an "NVIDIA H100 PCIe" is taken for the SXM). Without a mesh, for an abstract one, and for a kind
        that is not in the table it is the H100.

    Raises:
      ValueError: There is no profile of that name.
    """
    if isinstance(device, DeviceProfile):
        return device
    if device is not None:
        if device.lower() not in PROFILES:
            raise ValueError(
                f"no device profile {device!r}; known are {', '.join(PROFILES)}, or pass a DeviceProfile of your own"
            )
        return PROFILES[device.lower()]
    kind = mesh.devices.flat[0].device_kind.lower() if isinstance(mesh, Mesh) and mesh.size else ""
    found = (profile for profile in PROFILES.values() if any(kind.startswith(each.lower()) for each in profile.kinds))
    return next(found, PROFILES["h100"])
