"""What a device can do, and what a cluster is: `4x8xh100` is 4 nodes of 8 H100s."""

from dataclasses import dataclass

from jaxpar.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """One kind of device. Rates are peaks: FLOP/s of dense matrix products, bytes/s of its own memory."""

    name: str
    bf16_flops: float
    f32_flops: float  # without TF32
    memory_bytes: int
    memory_bandwidth: float


@dataclass(frozen=True)
class _Chip:
    """What XLA's GPU compiler must know of a CUDA device beyond `Device`."""

    capability: int
    cores: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    l2_bytes: int
    clock_ghz: float


# FLOP/s and bandwidth: NVIDIA's data sheets of the SXM modules (tensor-core peaks without sparsity, plain
# float32). Memory: what the driver reports as usable, which is a little less than the name of the module
# says.
_DEVICES = {
    # H100 data sheet: 1979 TFLOP/s bf16 with sparsity, 67 TFLOP/s float32, 3.35 TB/s.
    "h100": Device("NVIDIA H100 80GB HBM3", 989.4e12, 66.9e12, 84_942_979_072, 3.35e12),
    # H200 data sheet: the H100's chip, 4.8 TB/s of 141 GB HBM3e.
    "h200": Device("NVIDIA H200", 989.4e12, 66.9e12, 151_397_597_184, 4.8e12),
    # A100 data sheet, 80 GB SXM: 312 TFLOP/s bf16, 19.5 TFLOP/s float32, 2039 GB/s.
    "a100": Device("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12, 85_100_068_864, 2.039e12),
    # A simulated device, nominal: one AVX2 core at 3 GHz (2 units x 8 lanes x multiply-add), which computes
    # bfloat16 in float32; one channel of DDR4-3200; 16 GiB.
    "cpu": Device("cpu", 96e9, 96e9, 2**34, 25.6e9),
}

# CUDA programming guide, table of technical specifications by compute capability; data sheets for cores,
# clock and L2.
_HOPPER = _Chip(9, 132, 128, 233_472, 232_448, 50 * 2**20, 1.98)
_AMPERE = _Chip(8, 108, 64, 167_936, 166_912, 40 * 2**20, 1.41)
_CHIPS = {"h100": _HOPPER, "h200": _HOPPER, "a100": _AMPERE}


@dataclass(frozen=True)
class Cluster:
    """`nodes` machines of `devices_per_node` devices of one kind; `str` gives the notation back."""

    nodes: int
    devices_per_node: int
    kind: str

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """Reads NODESxDEVICESxKIND, as in `4x8xh100`. Raises ConfigError on any other form or kind."""
        parts = text.strip().lower().split("x", 2)
        if len(parts) != 3 or not all(p.isascii() and p.isdecimal() and int(p) > 0 for p in parts[:2]):
            raise ConfigError(
                f"cluster {text!r}: needs NODESxDEVICESxKIND with two positive whole numbers and one kind "
                f"of device, such as '4x8xh100' (kinds: {_kinds()}); for mixed kinds compile once for each"
            )
        device(parts[2])
        return cls(int(parts[0]), int(parts[1]), parts[2])

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def device(self) -> Device:
        return device(self.kind)

    def __str__(self) -> str:
        return f"{self.nodes}x{self.devices_per_node}x{self.kind}"


def device(kind: str) -> Device:
    """The device of that kind. Raises ConfigError, which names the known kinds."""
    if kind not in _DEVICES:
        raise ConfigError(f"unknown kind of device {kind!r}: known kinds are {_kinds()}")
    return _DEVICES[kind]


def device_named(name: str) -> Device | None:
    """The device that jax calls so (`jax.Device.device_kind`); None for others, and for a CPU, simulated or not."""
    return next((d for kind, d in _DEVICES.items() if d.name == name and kind != "cpu"), None)


def target_config(kind: str) -> str:
    """The text of XLA's GpuTargetConfigProto for a CUDA device. Raises ConfigError for other kinds.

    It names no interconnect: with NVLink in it XLA fuses small all-reduces into Triton kernels, and a scalar
    one over 64 devices then ends the process inside the compiler.
    """
    gpu = device(kind)
    if kind not in _CHIPS:
        raise ConfigError(f"{kind!r} is no CUDA device: a target exists for {', '.join(sorted(_CHIPS))}")
    chip = _CHIPS[kind]
    accelerated = "feature_extension: ACCELERATED_FEATURES" if chip.capability >= 9 else ""
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {chip.capability} {accelerated} }}
  core_count: {chip.cores}
  fpus_per_core: {chip.fpus_per_core}
  clock_rate_ghz: {chip.clock_ghz}
  device_memory_size: {gpu.memory_bytes}
  memory_bandwidth: {int(gpu.memory_bandwidth)}
  l2_cache_size: {chip.l2_bytes}
  shared_memory_per_core: {chip.shared_memory_per_core}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {chip.shared_memory_per_block_optin}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.name}"
"""


def _kinds() -> str:
    return ", ".join(_DEVICES)
