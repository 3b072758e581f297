"""The parity table of sequence parallelism as a page to read."""

from collections.abc import Mapping

import flax
import jax
import jaxlib

from experiments.sequence_table import FACTORS, LENGTH, ROWS, TOY, Cell

HEAD = """# Parity of sequence parallelism

Loss and gradients with positions split over `seq` against the same model, batch and seed on one device in one
microbatch. A cell is the largest error over the loss and all gradient leaves, as a share of what is allowed: 1e-5 of
the leaf's largest magnitude, plus 1e-7. **Above 1 would be a failure.** Float32, matrix products at highest precision,
eight simulated CPU devices.

The cells are a cover of all combinations in which every two choices that are allowed together meet: {factors}.
*hybrid* is Ulysses among two neighbours, inside a ring.

The cases: *weights* is the largest of four batches (uneven weights; one valid token; valid tokens in the first eighth
of each row alone, so that most devices have none; a first row with two valid tokens, its second and its last);
*packed* of two (three documents at random and padding; documents of 5, 6 and 5, then padding); *GPT* has dropout 0.1
and a z-loss; *two stacks* attends with a window of 5, then without, and has a term weighted by rows; *bfloat16* holds
the distance of all gradients from float32, a root mean square over 16 initialisations, against 1.1 times that of one
device (`experiments/rounding.py` says why).

- Model: `{toy}`; {length} positions, {rows} rows.
- Measured with jax {jax}, jaxlib {jaxlib}, flax {flax} by `python -m experiments.sequence_parity`.

**{count} cells, {failed} failed.** Largest: {worst:.2f} ({where}).

| case | mode | mesh | schedule | zero | microbatches | remat | share |
|---|---|---|---|---|---|---|---|
{lines}
"""


def report(shares: Mapping[Cell, float]) -> str:
    """Markdown: a line for every cell."""
    where, worst = max(shares.items(), key=lambda item: item[1])
    return HEAD.format(
        factors="; ".join(f"{name} {', '.join(map(str, values))}" for name, values in FACTORS.items()),
        toy=TOY,
        length=LENGTH,
        rows=ROWS,
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        flax=flax.__version__,
        count=len(shares),
        failed=sum(not share <= 1 for share in shares.values()),
        worst=worst,
        where=where,
        lines="\n".join(_line(cell, shares[cell]) for cell in sorted(shares, key=lambda c: (c.case, c.mode, c.mesh))),
    )


def _line(cell: Cell, share: float) -> str:
    schedule = cell.schedule if "pipe" in cell.mesh else ""
    values = (cell.case, cell.mode, cell.mesh, schedule, cell.zero, cell.microbatches, cell.remat)
    shown = f"{share:.2f}" if share <= 1 else f"**{share:.2f}**"
    return f"| {' | '.join(map(str, values))} | {shown} |"
