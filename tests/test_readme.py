"""The README's program runs as it is printed."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_program_in_the_readme_learns(capsys):
    """Otherwise the first thing a reader copies fails."""
    program = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class Block" in block)
    exec(compile(program, "README.md", "exec"), {"__name__": "readme"})
    assert float(capsys.readouterr().out) < 1.0


def test_every_file_that_the_readme_links_to_exists():
    """Otherwise the tour leads into rooms that are not there."""
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (Path(__file__).parent.parent / link).exists()] == []
