"""The parity table as a page to read."""

from collections.abc import Mapping

import flax
import jax
import jaxlib

from experiments.parity_table import CASES, LENGTH, MESHES, MICROBATCHES, TOY, ZERO, Cell

HEAD = """# Parity: every plan against one device

Loss and gradients of a small Llama under every plan of this table, against the same model, batch and seed on one
device in one microbatch. A cell is the largest error over the loss and all gradient leaves, as a share of what is
allowed: 1e-5 of the leaf's largest magnitude, plus 1e-7. **Above 1 would be a failure.** Float32, matrix products at
highest precision, eight simulated CPU devices.

- Model: {model}; {length} positions, 16 rows (32 where data x microbatches needs them).
- Weights are random and uneven (later rows have more valid tokens), but for: *untied* (all 1), *one valid token*
  (row 0, position 5), *masked shard* (the first half of the rows counts nothing), *packed* (three documents a row,
  with segments, positions that start again, and padding at the end).
- Measured with jax {jax}, jaxlib {jaxlib}, flax {flax} by `python -m experiments.parity`.

{summary}
"""


def report(shares: Mapping[Cell, float]) -> str:
    """Markdown: one table per mesh, plans down, cases across."""
    head = HEAD.format(
        model=f"`{TOY}`",
        length=LENGTH,
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        flax=flax.__version__,
        summary=_summary(shares),
    )
    return "\n".join([head, *(_table(shares, mesh, kv_heads) for mesh, kv_heads in MESHES)])


def _summary(shares: Mapping[Cell, float]) -> str:
    failed = sum(not share <= 1 for share in shares.values())
    cell, worst = max(shares.items(), key=lambda item: item[1])
    return f"**{len(shares)} cells, {failed} failed.** Largest: {worst:.2f} ({cell})."


def _table(shares: Mapping[Cell, float], mesh: str, kv_heads: int) -> str:
    lines = [
        f"## {mesh}, {kv_heads} kv head{'s' if kv_heads > 1 else ''}",
        "",
        f"| zero | microbatches | {' | '.join(CASES)} |",
        f"|---|---|{'---|' * len(CASES)}",
    ]
    for zero in ZERO:
        for microbatches in MICROBATCHES:
            row = [_cell(shares[Cell(case, mesh, kv_heads, zero, microbatches)]) for case in CASES]
            lines.append(f"| {zero} | {microbatches} | {' | '.join(row)} |")
    return "\n".join([*lines, ""])


def _cell(share: float) -> str:
    return f"{share:.2f}" if share <= 1 else f"**{share:.2f}**"
