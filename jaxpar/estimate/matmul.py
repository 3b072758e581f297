"""How long one device takes for a matrix product, for attention, and for bytes moved, by their shapes."""

from dataclasses import dataclass
from math import ceil

from jaxpar.estimate.constants import Constants
from jaxpar.estimate.devices import Device

# A tile of the result that one core computes at a time: what cuBLAS and CUTLASS choose for large products on all
# generations since Ampere.
TILE_M, TILE_N = 128, 256


@dataclass(frozen=True)
class Rates:
    """Seconds by shape on one device, with the constants worked in."""

    device: Device
    constants: Constants

    def peak(self, precision: str) -> float:
        """FLOP/s that a large matrix product sustains. `precision`: float32, bfloat16 or fp8."""
        device = self.device
        if precision == "fp8" and device.fp8_flops:
            return device.fp8_flops * device.fp8_fraction * device.sustained * self.constants.matmul
        full = device.f32_flops if precision == "float32" else device.bf16_flops
        return full * device.matmul_fraction * device.sustained * self.constants.matmul

    def matmul(self, m: float, k: float, n: float, precision: str) -> float:
        """Seconds of `[m, k] x [k, n]`: as many whole waves of tiles as the cores need, or the time that its operands
        and result take from and to memory, whichever is longer."""
        if m <= 0 or k <= 0 or n <= 0:
            return 0.0
        c, device = self.constants, self.device
        tiles = ceil(m / TILE_M) * ceil(n / TILE_N)
        waves = tiles / device.cores
        flops = 2.0 * tiles * TILE_M * TILE_N * k
        # Fewer tiles than cores: the product is cut along k as well.
        tail = c.matmul_tail * min(1.0, waves)
        compute = flops * (1.0 + tail / waves) / self.peak(precision)
        width = {"float32": 4, "bfloat16": 2, "fp8": 1}[precision]
        moved = (m * k + k * n) * width + m * n * max(width, 2)
        return max(compute, self.moved(moved)) + c.kernel_seconds

    def moved(self, size: float) -> float:
        """Seconds for kernels that read and write `size` bytes of the device's memory."""
        return size / (self.device.memory_bandwidth * self.constants.memory)

    def attention(self, flops: float, head_dim: int, forward: bool, older: bool = False) -> float:
        """Seconds of fused attention. `older`: its kernel was not written for this generation of devices."""
        c = self.constants
        share = self.device.tensor_share * c.attention_older if older else 1.0
        fraction = c.attention_forward if forward else c.attention_backward
        rate = self.device.bf16_flops * share * fraction * head_dim / (head_dim + c.attention_width)
        return flops / rate + c.kernel_seconds
