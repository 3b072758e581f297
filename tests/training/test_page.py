"""A run as one page."""

import json
import re

import pytest

from jaxpar.cli.entry import main
from jaxpar.errors import ConfigError
from jaxpar.training.page import page
from jaxpar.training.program_file import binary

PROGRAM = {
    "plan": "Plan(mesh='data=2')",
    "device_kind": "cpu",
    "devices": 2,
    "compile_seconds": 1.25,
    "dot_flops": 1e9,
    "memory": {"parameters": 1024, "optimizer state": 2048, "batch": 100, "temporaries": 2**20},
    "collectives": [{"axes": "data", "kind": "all-reduce", "executions": 14, "bytes": 8_400_000}],
    "bigram_entropy": 2.5,
}


SHARDING = """Plan() on 2 devices; 12 parameters

parameter  logical names   split    notes
embedding  [vocab, embed]  1: data  stored padded
norm       [embed]         0: data

parameters: 24 bytes/device
"""


def step(number, **more):
    return {"step": number, "loss": 3.0 / number, "skipped": 0.0, "tokens_per_second": 1e3 * number, **more}


@pytest.fixture
def folder(tmp_path):
    records = [step(1), step(2, mfu=0.4), {"step": 2, "validation_loss": 1.5}, step(3, loss=None, skipped=1.0)]
    records.append({"step": 3, "validation_loss": None})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "config.json").write_text(json.dumps({"name": "<tiny>", "trainer": {"steps": 9}, "model": {"a": [1]}}))
    (tmp_path / "program.json").write_text(json.dumps(PROGRAM))
    (tmp_path / "sharding.txt").write_text(SHARDING)
    (tmp_path / "sample.txt").write_text("if a < b & c:\n", encoding="utf-8")
    return tmp_path


def test_the_page_shows_every_part_of_a_run(folder):
    """Otherwise one would have to know which file holds what."""
    html = page(folder)
    for text in ("3 of 9", "not finite", "1.5000 at step 2", "2 x cpu", "all-reduce", "8.01\N{NO-BREAK SPACE}MiB"):
        assert text in html, text
    for title in ("Loss", "Evaluations", "Throughput", "Memory", "Communication", "Where every", "Samples", "Config"):
        assert f"<h2>{title}" in html, title
    assert "<dt>skipped steps</dt><dd>1</dd>" in html and "<dt>MFU</dt><dd>40.0%</dd>" in html


def test_where_parameters_lie_is_a_table_whose_cells_say_what_they_are(folder):
    """Otherwise the split, which one looks for, would stand outside a narrow screen, or a number have no name there."""
    html = page(folder)
    assert '<td data-column="split">1: data</td><td data-column="notes">stored padded</td>' in html
    assert '<td data-column="split">0: data</td><td data-column="notes"></td>' in html
    assert "<p>Plan() on 2 devices; 12 parameters</p>" in html and "<p>parameters: 24 bytes/device</p>" in html
    (folder / "sharding.txt").write_text("cut off")
    assert "<p>cut off</p>" in page(folder)


def test_rows_have_a_curve_where_they_change(folder):
    """Otherwise a warm-up of the batch would not be seen, or a straight line be shown for nothing."""
    assert "rows of a step" not in page(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(step(i, rows=float(i))) + "\n" for i in (4, 5)))
    assert "<summary>rows of a step</summary>" in page(folder)


def test_the_page_needs_nothing_from_outside(folder):
    """Otherwise it would be empty where there is no network, or tell a server who reads it."""
    html = page(folder)
    links = re.findall(r'(?:src|href|url)\s*[=(]\s*"?([^">\s)]{1,40})', html)
    assert links and all(link.startswith("data:image/svg+xml;base64,") for link in links)
    assert "<script" not in html and "@import" not in html


def test_text_of_a_run_is_no_html(folder):
    """Otherwise a model that writes a tag would break the page, or worse."""
    html = page(folder)
    assert "if a &lt; b &amp; c:" in html and "&lt;tiny&gt;" in html and "<tiny>" not in html


def test_a_run_that_has_only_begun_has_a_page(tmp_path):
    """Otherwise the page of a run that fails in its first step would be a traceback."""
    (tmp_path / "config.json").write_text("{}")
    assert "not compiled yet" in page(tmp_path)


def test_a_folder_without_a_run_is_named(tmp_path):
    """Otherwise a typo would be a traceback."""
    with pytest.raises(ConfigError, match=r"there is no run in .*needed a folder with config\.json"):
        page(tmp_path)


def test_the_command_writes_the_page_into_the_folder(folder, capsys):
    """Otherwise nobody would find it."""
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_bytes_have_the_unit_that_keeps_them_short():
    """Otherwise a size would be read a thousand times too large."""
    sizes = [binary(n).replace("\N{NO-BREAK SPACE}", " ") for n in (0, 1023, 1024, 1536, 24.5 * 2**20, 3 * 2**50)]
    assert sizes == ["0 B", "1023 B", "1 KiB", "1.5 KiB", "24.5 MiB", "3.07e+03 TiB"]
