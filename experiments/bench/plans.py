"""Are published layouts the planner's own: their predicted time beside that of the best plan it finds for the same run.

    python -m experiments.bench.plans             (--own: jaxpar's own executor; --write: the table of docs/planner.md;
                                                   --compile: the best plans that are more than `CLOSE` ahead)

Megatron's models of 1.7B to 1T (Narayanan et al., 2021, table 1, and the scripts published with it), Llama 3 405B
(Grattafiori et al., 2024, table 4), and the runs of 70B models in `data/published_runs.csv`. Each side is predicted by
the same estimator for the same system, model, rows and devices; what the system cannot do (`SPACES`) is not tried. If
the published plan is more than `CLOSE` behind, the parts of the step say why, and the compiler whether the better one
fits: as jaxpar's program for such a cluster, which need not be there.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path

import optax
from rich.console import Console
from rich.table import Table

from experiments.bench.published import (
    AUTOMODEL,
    LLM_FOUNDRY,
    MAXTEXT,
    MEGATRON_2021,
    MEGATRON_CORE,
    TORCHTITAN,
    Run,
    read,
)
from jaxpar.batch import token_shapes
from jaxpar.estimate.devices import Device, device, every_kind
from jaxpar.estimate.hardware import Cluster
from jaxpar.estimate.system import JAXPAR, System
from jaxpar.plan import Plan
from jaxpar.planner.candidate import Candidate
from jaxpar.planner.explain import differences
from jaxpar.planner.question import Question
from jaxpar.planner.search import Search
from jaxpar.planner.sharpen import sharpen
from jaxpar.planner.space import Space
from jaxpar.planner.verify import verify
from jaxpar.planner.words import name
from jaxpar.structure import Build
from models.gpt import GPTConfig
from models.llama import LlamaConfig

CLOSE = 0.1
# Of the best plans, how many are traced before one is compiled.
TRACED = 4
DOCS = Path(__file__).parents[2] / "docs"
MARK = "<!-- The table below is written by experiments/bench/plans.py -->"
COLUMNS = ("run", "system", "published plan", "predicted", "best plan", "predicted", "behind", "why")

_REMATS = ("none", "dots", "full")
_MEGATRON = Space(
    zero=(0, 1), within_node=(False,), pipeline=("1f1b", "interleaved"), fill=(False,), attention=("ring",),
    most_virtual_stages=16, remat=_REMATS,
)  # fmt: skip
_FSDP = Space(pipe=(1,), zero=(3,), within_node=(False,), attention=("ring",), remat=_REMATS)
# What each system can do.
SPACES = {
    MEGATRON_2021.name: replace(_MEGATRON, zero=(0,), seq=(1,), remat=("full",), split_norms=False),
    MEGATRON_CORE.name: replace(_MEGATRON, zero=(0, 1, 3)),
    LLM_FOUNDRY.name: replace(_FSDP, tensor=(1,), seq=(1,)),
    TORCHTITAN.name: _FSDP,
    MAXTEXT.name: replace(_FSDP, remat=(*_REMATS, "named:qkv,out")),
    AUTOMODEL.name: _FSDP,
    JAXPAR.name: Space(within_node=(False,)),
}

# Of table 1: billions of parameters, heads, embed, layers, tensor, pipe, devices, rows; of the scripts: rows of a
# microbatch, virtual stages.
_TABLE_1 = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 16, 1),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 16, 1),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 16, 1),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 8, 1),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 4, 1),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 2, 3),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 2, 2),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 1, 2),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 1, 3),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 1, 2),
)
LLAMA_405B = LlamaConfig(
    vocab_size=128256, num_layers=126, embed_dim=16384, num_heads=128, num_kv_heads=8, head_dim=128, mlp_dim=53248
)
# By how the table's words start. What Megatron calls selective, the scores of attention, fused kernels always do.
_REMAT = {"full": "full", "selective(op)": "dots", "custom": "named:qkv,out"}


@dataclass(frozen=True)
class Published:
    """A run and the plan it was published with."""

    name: str
    build: Build
    plan: Plan
    rows: int
    length: int
    device: Device
    devices: int
    system: System

    def question(self, system: System) -> Question:
        each = gcd(self.devices, 8)
        kind = next(kind for kind in every_kind() if device(kind).name == self.device.name)
        cluster = Cluster(self.devices // each, each, kind, custom=self.device)
        base = Plan(precision=self.plan.precision)
        shapes = token_shapes(self.rows, self.length)
        return Question(self.build, optax.adamw(3e-4), cluster, shapes, base, SPACES[system.name], system=system)


@dataclass(frozen=True)
class Compared:
    published: Published
    theirs: Candidate
    best: Candidate | None

    @property
    def behind(self) -> float:
        """Of their predicted time over the best's."""
        return self.theirs.time.total / self.best.time.total - 1 if self.best else 0.0

    @property
    def why(self) -> str:
        """Which parts of the step differ, seconds, the largest first."""
        large = [] if self.theirs.fits else [f"theirs is predicted {self.theirs.overflow / 1e9:.0f} GB too large"]
        if self.best is None or self.behind <= CLOSE:
            return "".join(large)
        parts = [" ".join(line.split()) for line in differences(self.best, self.theirs)]
        report = self.best.report
        peak = [] if report is None else [f"compiled: {report.peak_bytes / 1e9:.1f} of {self.best.limit / 1e9:.0f} GB"]
        return ", ".join([*parts[:4], *large, *peak])

    def cells(self) -> tuple[str, ...]:
        best = self.best
        return (
            self.published.name, self.published.system.name, name(self.theirs), f"{self.theirs.time.total:.3g} s",
            "none fits" if best is None else name(best), "" if best is None else f"{best.time.total:.3g} s",
            f"{self.behind:+.1%}", self.why,
        )  # fmt: skip


def megatron() -> Iterator[Published]:
    for billions, heads, embed, layers, tensor, pipe, devices, rows, each, virtual in _TABLE_1:
        data = devices // (tensor * pipe)
        model = GPTConfig(51200, layers, embed, heads, 4 * embed, 2048)
        plan = Plan(
            f"data={data},pipe={pipe},tensor={tensor}", microbatches=rows // (data * each), precision="bfloat16",
            pipeline="interleaved" if virtual > 1 else "1f1b", virtual_stages=virtual, remat="full",
        )  # fmt: skip
        yield Published(
            f"GPT {billions}B, {devices} A100", model.build, plan, rows, 2048, device("a100"), devices, MEGATRON_2021
        )


def llama_405b() -> Iterator[Published]:
    """16M tokens a step; what the paper says of its schedule is nearest to interleaved 1F1B."""
    for devices, data in ((8192, 64), (16384, 128)):
        plan = Plan(
            f"data={data},pipe=16,tensor=8", zero=1, microbatches=2048 // data, precision="bfloat16",
            pipeline="interleaved", virtual_stages=4, sequence_sharded_norms=True,
        )  # fmt: skip
        label = f"Llama 3 405B, {devices} H100"
        yield Published(label, LLAMA_405B.build, plan, 2048, 8192, device("h100"), devices, MEGATRON_CORE)


def seventy() -> Iterator[Published]:
    """The fastest of the runs of one model, batch, precision and number of devices."""
    fastest: dict[tuple, Run] = {}
    for run in read():
        row = run.row
        if "70b" in run.model.lower():
            key = (run.model, row["device"], row["devices"], run.layout.precision, row["seq_len"], row["global_batch"])
            if key not in fastest or run.seconds < fastest[key].seconds:
                fastest[key] = run
    yield from map(_of_run, fastest.values())


_SIZES = ("vocab", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn")


def _of_run(run: Run) -> Published:
    row, layout = run.row, run.layout
    vocab, layers, embed, heads, kv_heads, head_dim, mlp = (int(row[key]) for key in _SIZES)
    build: Build
    if row["gated_mlp"] == "y":
        build = LlamaConfig(vocab, layers, embed, heads, kv_heads, head_dim, mlp).build
    else:
        build = GPTConfig(vocab, layers, embed, heads, mlp, layout.length).build
    plan = Plan(
        f"data={layout.data},pipe={layout.pipe},tensor={layout.tensor},seq={layout.seq}", zero=layout.zero,
        microbatches=layout.microbatches, precision=layout.precision,  # type: ignore[arg-type]
        pipeline="interleaved" if layout.chunks > 1 else "1f1b", virtual_stages=layout.chunks,
        sequence_sharded_norms=layout.split_norms, remat=_remat(row["recompute"]),
    )  # fmt: skip
    step = f"{layout.precision}, {row['global_batch']} x {layout.length}"
    label = f"{run.model}, {row['devices']} {row['device']}, {step}"
    return Published(
        label, build, plan, int(row["global_batch"]), layout.length, run.device, int(row["devices"]), run.system
    )


def _remat(text: str) -> str:
    """The policy of jaxpar that is nearest."""
    return next((policy for start, policy in _REMAT.items() if text.startswith(start)), "none")


def compare(published: Published, own: bool = False, confirm: bool = False) -> Compared:
    """`confirm`: where ours is better, the best is the first one that the compiler agrees with."""
    search = Search(published.question(JAXPAR if own else published.system))
    theirs, ranked = search.evaluate(published.plan), search.run()
    compared = Compared(published, theirs, next(iter(ranked.found), None))
    if compared.behind <= CLOSE or not confirm:
        return compared
    held = verify(sharpen(ranked, TRACED), 1)
    return replace(compared, best=next((c for c in held if c.report is not None), None))


def markdown(found: Sequence[Compared]) -> str:
    lines = (f"| {' | '.join(row)} |" for row in (COLUMNS, ["---"] * len(COLUMNS), *(c.cells() for c in found)))
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own", action="store_true", help="as jaxpar's own executor would run both plans")
    parser.add_argument("--write", action="store_true", help="write the table of docs/planner.md")
    parser.add_argument("--compile", action="store_true", help="confirm plans that are better than the published one")
    parser.add_argument("--only", default="", help="of the runs, those with this in their name")
    arguments, console = parser.parse_args(), Console(width=220)
    found = []
    for published in (*megatron(), *llama_405b(), *seventy()):
        if arguments.only.lower() not in published.name.lower():
            continue
        compared = compare(published, arguments.own, arguments.compile)
        found.append(compared)
        console.print(f"{published.name}: {compared.behind:+.1%} {compared.why}", highlight=False)
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for compared in found:
        table.add_row(*compared.cells())
    console.print(table)
    unexplained = [c for c in found if c.behind > CLOSE and not c.why]
    close = sum(c.behind <= CLOSE for c in found)
    console.print(f"{close} of {len(found)} published plans within {CLOSE:.0%} of the best; the others say why")
    if arguments.write:
        page = DOCS / "planner.md"
        page.write_text(page.read_text().partition(MARK)[0] + MARK + "\n\n" + markdown(found))
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
