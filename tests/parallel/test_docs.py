"""What docs/sequence.md shows is what the code does."""

import re
from pathlib import Path

import numpy as np

from jaxpar.parallel.sequence import SequenceLayout

PAGE = (Path(__file__).parent.parent.parent / "docs" / "sequence.md").read_text()


def test_paragraphs_on_different_devices_and_a_packed_row_are_the_same(capsys):
    """Otherwise the page's program fails, or the two meanings of splitting a long text would differ."""
    program = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "paragraphs" in block)
    exec(compile(program, "sequence.md", "exec"), {"__name__": "sequence"})
    assert capsys.readouterr().out == "the same loss and gradients\n"


def test_the_picture_of_the_order_is_the_order():
    """Otherwise a reader would learn another layout than the one that arrays have."""
    shown = {
        m[1]: [int(n) for n in m[2].split()]
        for m in re.finditer(r"^(zigzag|in order)((?: +\d){16}) +device", PAGE, re.M)
    }
    held = SequenceLayout(4, 1).order(16)
    assert shown["zigzag"] == [int(np.argwhere(held == p)[0, 0]) for p in range(16)]
    work = {name: [sum(p + 1 for p in range(16) if of[p] == d) for d in range(4)] for name, of in shown.items()}
    assert work == {"zigzag": [34, 34, 34, 34], "in order": [10, 26, 42, 58]}
