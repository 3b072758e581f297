"""Does a device need more memory when rows grow with the number of devices that share them?

    python -m experiments.bench.context_memory [--h100]

Compiles the step of rows that are `seq` times as long on `seq` times as many devices, so that each device holds the
same number of tokens, and prints the peak per device: for simulated CPU devices, or for H100s that are not there.
Ring and Ulysses should need the same at any length; with gathered keys a layer grows by `gathered_bytes`.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import optax

import jaxpar
from jaxpar.estimate.compile import StepReport
from jaxpar.plan import Attention, Precision, Remat
from models.llama import LlamaConfig

SIZES = (1, 2, 4, 8)
MODES: tuple[Attention, ...] = ("ring", "ulysses", "allgather")
REMATS: tuple[Remat, ...] = ("full", "none")

# The proportions of Llama 3 8B; its own sizes with fewer layers.
SMALL = LlamaConfig(2048, 2, 128, num_heads=8, num_kv_heads=2, head_dim=16, mlp_dim=448)
LARGE = LlamaConfig(32768, 4, 4096, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=14336)


@dataclass(frozen=True)
class Case:
    """One row, of so many tokens for each device. The kind is `cpu` (as many as are simulated) or `h100`."""

    model: LlamaConfig = SMALL
    tokens: int = 512
    kind: str = "cpu"
    precision: Precision = "float32"

    def compile(self, seq: int, mode: Attention, remat: Remat) -> StepReport:
        plan = jaxpar.Plan(f"seq={seq}", attention=mode, remat=remat, precision=self.precision)
        program = jaxpar.Program(self.model.build, optax.sgd(0.1), plan)
        return program.compile(f"1x{seq}x{self.kind}", jaxpar.token_shapes(1, self.tokens * seq))

    def gathered_bytes(self, seq: int) -> int:
        """What `allgather` holds in a layer's backward: the row's keys and values in the dtype of the compute, and
        their gradients in float32. XLA may hold one of these once more, while it leaves the order of blocks."""
        elements = seq * self.tokens * self.model.num_kv_heads * self.model.head_dim
        return elements * 2 * (4 + (2 if self.precision == "bfloat16" else 4))


def peaks(case: Case, mode: Attention, remat: Remat, sizes: Sequence[int] = SIZES) -> Iterator[tuple[int, int]]:
    """-> (seq, peak bytes per device)."""
    for seq in sizes:
        yield seq, case.compile(seq, mode, remat).peak_bytes


def print_table(case: Case) -> None:
    unit, scale = ("GiB", 2**30) if case.kind == "h100" else ("MiB", 2**20)
    print(f"{case.kind}: {case.model}, {case.precision}, {case.tokens} tokens per device; peak of a device in {unit}")
    print(f"{'remat':<7}{'attention':<11}{'seq':>4}{'row':>8}{'peak':>10}{'of seq=1':>10}{'gathered':>10}")
    for remat in REMATS:
        first = case.compile(1, "ring", remat).peak_bytes
        print(f"{remat:<7}{'':<11}{1:>4}{case.tokens:>8}{first / scale:>10.2f}{1:>10.3f}", flush=True)
        for mode in MODES:
            for seq, peak in peaks(case, mode, remat, SIZES[1:]):
                more = f"{case.gathered_bytes(seq) / scale:>10.2f}" if mode == "allgather" else ""
                row = f"{remat:<7}{mode:<11}{seq:>4}{case.tokens * seq:>8}{peak / scale:>10.2f}{peak / first:>10.3f}"
                print(row + more, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--h100", action="store_true", help="compile for H100s, in bfloat16, a model of 8B's layers")
    options = parser.parse_args()
    jaxpar.simulate(max(SIZES))
    jax.config.update("jax_enable_compilation_cache", False)
    print_table(Case(LARGE, 8192, "h100", "bfloat16") if options.h100 else Case())
    return 0


if __name__ == "__main__":
    sys.exit(main())
