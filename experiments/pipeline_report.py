"""The parity table of pipelines as a page to read."""

from collections.abc import Mapping

import flax
import jax
import jaxlib

from experiments.pipeline_table import (
    CASES,
    FACTORS,
    LENGTH,
    MICROBATCHES,
    SCHEDULES,
    STAGE_LAYERS,
    STAGES,
    TOY,
    VIRTUAL,
    Cell,
)

HEAD = """# Parity of pipelines

Loss and gradients under every schedule against the same model, batch and seed on one device in one microbatch. A cell
is the largest error over the loss and all gradient leaves, as a share of what is allowed: 1e-5 of the leaf's largest
magnitude, plus 1e-7. **Above 1 would be a failure.** `-`: the plan is refused with a `PlanError`, within 5 seconds and
before anything compiles. Float32, matrix products at highest precision, eight simulated CPU devices.

Measured with jax {jax}, jaxlib {jaxlib}, flax {flax} by `python -m experiments.pipeline_parity`.

{summary}

## Schedules alone

`{toy}`, but 16 layers, in as many parts as there are stages x virtual stages; {length} positions, 24 rows (20 for 5
microbatches), weights random and uneven. A vocabulary of 61 divides over no pipeline.
"""

COMPOSED = """
## Schedules composed with everything else

A cover of all combinations in which every two choices that are allowed together meet: {factors}.

The cases: *weights* is the largest of three batches (uneven weights, one valid token, half of the rows masked); *11
layers* are cut as evenly as they go, *stage_layers* as {stage_layers} by parts; *packed* has three documents a row;
*embed 35* is padded by ZeRO; *1 kv head* is replicated over tensor; *bfloat16* holds the distance of all gradients
from float32, a root mean square over 16 initialisations, against 1.1 times that of one device
(`experiments/rounding.py` says why); *within node* shards ZeRO over two of four data replicas; *two stacks* has 5
layers of one type, then 4 of another with a term of their own; *GPT* has dropout 0.1 and a z-loss; *ViT*
has dropout and a head that no stage shares.

| case | schedule | mesh | microbatches | zero | remat | sequence_sharded_norms | share |
|---|---|---|---|---|---|---|---|
"""


def report(shares: Mapping[Cell, float | None]) -> str:
    """Markdown: the grids of schedules alone, then a line for every composed cell."""
    head = HEAD.format(
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        flax=flax.__version__,
        summary=_summary(shares),
        toy=TOY,
        length=LENGTH,
    )
    counts = ", ".join(f"{len(values)} of `{name}`" for name, values in FACTORS.items())
    composed = COMPOSED.format(factors=counts, stage_layers=", ".join(map(str, STAGE_LAYERS.values())))
    lines = [_line(cell, share) for cell, share in shares.items() if cell.case != "alone"]
    order = {name: i for i, name in enumerate(CASES)}
    lines.sort(key=lambda line: order[line.split(" | ")[0].removeprefix("| ")])
    return head + _alone(shares) + composed + "\n".join(lines) + "\n"


def _summary(shares: Mapping[Cell, float | None]) -> str:
    played = {cell: share for cell, share in shares.items() if share is not None}
    failed = sum(not share <= 1 for share in played.values())
    cell, worst = max(played.items(), key=lambda item: item[1])
    return (
        f"**{len(shares)} cells: {len(played)} played, {len(shares) - len(played)} refused, {failed} failed.** "
        f"Largest: {worst:.2f} ({cell})."
    )


def _alone(shares: Mapping[Cell, float | None]) -> str:
    counts = " | ".join(f"m={m}" for m in MICROBATCHES)
    lines = ["", f"| schedule | stages | virtual stages | {counts} |", f"|---|---|---|{'---|' * len(MICROBATCHES)}"]
    for schedule in SCHEDULES:
        for stages in STAGES:
            for virtual in VIRTUAL:
                row = [Cell("alone", schedule, f"pipe={stages}", m, virtual) for m in MICROBATCHES]
                if row[0] in shares:
                    text = " | ".join(_share(shares[cell]) for cell in row)
                    lines.append(f"| {schedule} | {stages} | {virtual} | {text} |")
    return "\n".join([*lines, ""])


def _line(cell: Cell, share: float | None) -> str:
    norms = "yes" if cell.norms else ""
    values = (cell.case, cell.schedule, cell.mesh, cell.microbatches, cell.zero, cell.remat, norms, _share(share))
    return f"| {' | '.join(map(str, values))} |"


def _share(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{share:.2f}" if share <= 1 else f"**{share:.2f}**"
