"""The table of devices: what one of each kind can do by itself, and how fast it reaches its neighbours."""

from dataclasses import dataclass

from jaxpar.errors import ConfigError


@dataclass(frozen=True)
class Link:
    """One level of a network. `bandwidth`: bytes/s that a device sends, while it receives as much; `latency`: seconds
    from one device to the next."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Device:
    """One kind of device. Rates are peaks: FLOP/s of dense matrix products, bytes/s of its own memory.

    `fp8_flops` is 0 where it has no float8. `matmul_fraction` and `fp8_fraction`: the part of the peak that the best
    measured matrix product reaches (it differs by kind: power, not logic, is what limits the newer ones). `sustained`:
    of that, what a kind keeps up in a training step, over what the others do. `cores`: what the tiles of a matrix
    product are dealt out to. `tensor_share`: the part of the peak that kernels written for the generation before reach
    at most. `fast` joins the `node` devices of one domain, `slow` joins domains. `price`: per device and hour, in any
    currency, if the user says it.
    """

    name: str
    bf16_flops: float
    f32_flops: float  # without TF32
    memory_bytes: int
    memory_bandwidth: float
    fp8_flops: float = 0.0
    matmul_fraction: float = 0.8
    fp8_fraction: float = 0.7
    sustained: float = 1.0
    cores: int = 100
    tensor_share: float = 1.0
    fast: Link = Link(50e9, 3e-6)
    slow: Link = Link(10e9, 10e-6)
    node: int = 8
    price: float | None = None


# Of NVIDIA's, if nothing else is said: FLOP/s and bandwidth from the data sheets (tensor-core peaks without sparsity,
# plain float32), memory as the driver reports it or, from the B200 on, as the data sheet says. Fractions: the best
# matrix product in the tables of "Maximum Achievable Matmul FLOPS" (stas00/ml-engineering, compute/accelerator):
# measured TFLOP/s over the peak here. Latencies, of all: the order of what nccl-tests show for small messages, 2 us
# by NVLink and 5 us by InfiniBand for each hop of a ring.
_NVLINK3 = Link(300e9, 2e-6)  # A100 data sheet: 600 GB/s, both directions together
_NVLINK4 = Link(450e9, 2e-6)  # H100 data sheet: 900 GB/s, both directions
_NVLINK5 = Link(900e9, 2e-6)  # B200 data sheet: 1.8 TB/s, both directions
_HDR = Link(25e9, 5e-6)  # DGX A100: a 200 Gb/s adapter for each GPU
_NDR = Link(50e9, 5e-6)  # DGX H100 and B200: a 400 Gb/s adapter for each GPU
_XDR = Link(100e9, 5e-6)  # GB300 NVL72: an 800 Gb/s adapter for each GPU
_DCN = Link(6.25e9, 20e-6)  # jax-ml/scaling-book, "How to think about TPUs": 6.25 GB/s for each chip between slices

# Hopper's tensor cores reach their peak through warpgroup instructions alone. What is written for Ampere runs at
# Ampere's rate for each core and clock: 312 TFLOP/s x (132 x 1.755 GHz) / (108 x 1.41 GHz) = 475 of 989.
_HOPPER_SHARE = 0.48

_DEVICES = {
    # A100 data sheet, SXM: 312 TFLOP/s bf16, 19.5 float32, 1555 GB/s of 40 GB. Best matrix product 271.2 TFLOP/s.
    "a100-40": Device(
        "NVIDIA A100-SXM4-40GB", 312e12, 19.5e12, 42_506_059_776, 1.555e12,
        matmul_fraction=0.869, cores=108, fast=_NVLINK3, slow=_HDR,
    ),
    # The same with 80 GB at 2039 GB/s.
    "a100": Device(
        "NVIDIA A100-SXM4-80GB", 312e12, 19.5e12, 85_100_068_864, 2.039e12,
        matmul_fraction=0.869, cores=108, fast=_NVLINK3, slow=_HDR,
    ),
    # H100 data sheet, SXM: 1979 TFLOP/s bf16 with sparsity, 3958 fp8, 67 float32, 3.35 TB/s. Best matrix products 794.5
    # TFLOP/s bf16, 1402.6 fp8.
    "h100": Device(
        "NVIDIA H100 80GB HBM3", 989.4e12, 66.9e12, 84_942_979_072, 3.35e12, 1978.9e12, 0.803, 0.709,
        cores=132, tensor_share=_HOPPER_SHARE, fast=_NVLINK4, slow=_NDR,
    ),
    # H100 data sheet, PCIe: 1513 TFLOP/s bf16 with sparsity, 3026 fp8, 51 float32, 2 TB/s; neighbours by PCIe 5 x16. No
    # matrix product of it is in the table: the SXM's fractions, at half the power an upper bound.
    "h100-pcie": Device(
        "NVIDIA H100 PCIe", 756e12, 51.2e12, 84_942_979_072, 2.0e12, 1513e12, 0.803, 0.709,
        cores=114, tensor_share=_HOPPER_SHARE, fast=Link(64e9, 3e-6), slow=_NDR,
    ),
    # H200 data sheet: the H100's chip, 4.8 TB/s of 141 GB HBM3e. Best fp8 product 1453.4 TFLOP/s.
    "h200": Device(
        "NVIDIA H200", 989.4e12, 66.9e12, 151_397_597_184, 4.8e12, 1978.9e12, 0.803, 0.734,
        cores=132, tensor_share=_HOPPER_SHARE, fast=_NVLINK4, slow=_NDR,
    ),
    # HGX B200 data sheet: 4.5 PFLOP/s bf16 with sparsity, 9 fp8, 75 TFLOP/s float32, 180 GB at 7.7 TB/s. Best matrix
    # products 1745 and 3432.5 TFLOP/s.
    "b200": Device(
        "NVIDIA B200", 2250e12, 75e12, 180_000_000_000, 7.7e12, 4500e12, 0.776, 0.763,
        sustained=0.789, cores=148, fast=_NVLINK5, slow=_NDR,
    ),
    # GB200 NVL72 data sheet: 5 PFLOP/s bf16 with sparsity, 10 fp8, 80 TFLOP/s float32, 186 GB at 8 TB/s; 72 GPUs in one
    # NVLink domain. Best matrix products 1822 and 3615.6 TFLOP/s, but in the published runs (all of them float8,
    # `experiments/bench/calibrate_time.py`) it sustains 0.79 of what the other kinds do; a GB300, which may draw more
    # power, all of it. So for the B200, which is the same chip.
    "gb200": Device(
        "NVIDIA GB200", 2500e12, 80e12, 186_000_000_000, 8e12, 5000e12, 0.729, 0.723,
        sustained=0.789, cores=148, fast=_NVLINK5, slow=_NDR, node=72,
    ),
    # GB300 NVL72 data sheet: the same rates, 279 GB, 800 Gb/s for each GPU. No matrix product of it is in the table:
    # the B300's, 1769 and 3353.3 TFLOP/s of 2250 and 4500.
    "gb300": Device(
        "NVIDIA GB300", 2500e12, 80e12, 279_000_000_000, 8e12, 5000e12, 0.786, 0.745,
        cores=148, fast=_NVLINK5, slow=_XDR, node=72,
    ),
    # MI300X data sheet: 1307.4 TFLOP/s bf16, 2614.9 fp8, 163.4 float32, 5.3 TB/s of 192 GB; 7 Infinity Fabric links of
    # 64 GB/s each way. Best matrix product 668.4 TFLOP/s; of fp8 none is in the table: the same fraction.
    "mi300x": Device(
        "AMD Instinct MI300X", 1307.4e12, 163.4e12, 206_141_652_992, 5.3e12, 2614.9e12, 0.511, 0.511,
        cores=304, fast=Link(448e9, 3e-6), slow=_NDR,
    ),
    # TPUs, a chip each: cloud.google.com/tpu/docs (peaks, memory) and jax-ml/scaling-book (links: v5e 45 GB/s, v5p and
    # v6e 90 GB/s one way; 4 of them in a 2D torus, 6 in a 3D one). They have no float8; float32 by three passes of
    # bfloat16 or more. `node`: the largest slice of one domain. No measured matrix product is published: 0.9 is what
    # the scaling book expects of large ones.
    "v5e": Device(
        "TPU v5 lite", 197e12, 49e12, 17_179_869_184, 8.19e11,
        matmul_fraction=0.9, cores=4, fast=Link(180e9, 1e-6), slow=_DCN, node=256,
    ),
    "v5p": Device(
        "TPU v5", 459e12, 115e12, 102_005_473_280, 2.765e12,
        matmul_fraction=0.9, cores=8, fast=Link(540e9, 1e-6), slow=_DCN, node=8960,
    ),
    "v6e": Device(
        "TPU v6 lite", 918e12, 230e12, 34_359_738_368, 1.64e12,
        matmul_fraction=0.9, cores=2, fast=Link(360e9, 1e-6), slow=_DCN, node=256,
    ),
    # A simulated device, nominal: one AVX2 core at 3 GHz (2 units x 8 lanes x multiply-add), which computes
    # bfloat16 in float32; one channel of DDR4-3200; 16 GiB. Its neighbours are copies in the same memory.
    "cpu": Device(
        "cpu", 96e9, 96e9, 2**34, 25.6e9,
        matmul_fraction=0.8, cores=1, fast=Link(10e9, 20e-6), slow=Link(1e9, 50e-6),
    ),
}  # fmt: skip


def device(kind: str) -> Device:
    """The device of that kind. Raises ConfigError, which names the known kinds."""
    if kind not in _DEVICES:
        raise ConfigError(f"unknown kind of device {kind!r}: known kinds are {kinds()}; others come from a file")
    return _DEVICES[kind]


def device_named(name: str) -> Device | None:
    """The device that jax calls so (`jax.Device.device_kind`); None for others, and for a CPU, simulated or not."""
    return next((d for kind, d in _DEVICES.items() if d.name == name and kind != "cpu"), None)


def kinds() -> str:
    """The names of all kinds, with commas between them."""
    return ", ".join(_DEVICES)


def every_kind() -> tuple[str, ...]:
    return tuple(_DEVICES)
