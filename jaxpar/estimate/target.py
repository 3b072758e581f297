"""What XLA's GPU compiler must know of a CUDA device that is not there."""

from dataclasses import dataclass, replace

from jaxpar.errors import ConfigError
from jaxpar.estimate.devices import Device, device


@dataclass(frozen=True)
class _Chip:
    """Beyond `Device`. Capability as (major, minor)."""

    capability: tuple[int, int]
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    l2_bytes: int
    clock_ghz: float


# CUDA programming guide, table of technical specifications by compute capability; data sheets for clock and L2.
_AMPERE = _Chip((8, 0), 64, 167_936, 166_912, 40 * 2**20, 1.41)
_HOPPER = _Chip((9, 0), 128, 233_472, 232_448, 50 * 2**20, 1.98)
_BLACKWELL = _Chip((10, 0), 128, 233_472, 232_448, 126 * 2**20, 1.965)
_CHIPS = {
    "a100-40": _AMPERE,
    "a100": _AMPERE,
    "h100": _HOPPER,
    "h100-pcie": _HOPPER,
    "h200": _HOPPER,
    "b200": _BLACKWELL,
    "gb200": _BLACKWELL,
    "gb300": replace(_BLACKWELL, capability=(10, 3)),
}


def target_config(kind: str, custom: Device | None = None) -> str:
    """The text of XLA's GpuTargetConfigProto for a CUDA device. Raises ConfigError for other kinds.

    `custom`: a variant of the kind, with memory and cores of its own.

    It names no interconnect: with NVLink in it XLA fuses small all-reduces into Triton kernels, and a scalar
    one over 64 devices then ends the process inside the compiler.
    """
    gpu = custom or device(kind)
    if kind not in _CHIPS:
        raise ConfigError(f"no target for {kind!r}: one exists for {', '.join(sorted(_CHIPS))}, which are CUDA devices")
    chip = _CHIPS[kind]
    major, minor = chip.capability
    accelerated = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} {f"minor: {minor} " if minor else ""}{accelerated} }}
  core_count: {gpu.cores}
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
