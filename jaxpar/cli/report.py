"""`jaxpar report RUN`: a run as one HTML page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from jaxpar.training.page import page

FILE = "report.html"


@dataclass(frozen=True)
class ReportConfig:
    """Writes one HTML page with the config, plan, losses, speed, memory, communication and samples of a run.

    Attributes:
      run: the run's folder.
      output: the page, by default `report.html` in that folder.
    """

    run: tyro.conf.Positional[Path]
    output: Path | None = None


def report(arguments: Sequence[str]) -> int:
    """Says where the page is. The page needs no network and no other file."""
    config = tyro.cli(ReportConfig, args=list(arguments), prog="jaxpar report")
    output = config.output or config.run / FILE
    output.write_text(page(config.run), encoding="utf-8")
    print(output)
    return 0
