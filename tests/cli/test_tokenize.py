"""`jaxpar tokenize` as it is typed."""

import io

import pytest
from rich.console import Console

from jaxpar.cli import tokenize
from jaxpar.cli.entry import main
from jaxpar.data.shards import load_index


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for i in range(5):
        (tmp_path / "in" / f"{i}.txt").write_text("text " * (i + 1))
    return tmp_path


def ends(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["tokenize", *arguments])
    return ended.value.code


def test_a_folder_becomes_shards_and_a_line_says_what_is_in_them(folder, capsys):
    """Otherwise the command would not do what its first example says, or one would have to guess."""
    assert main(["tokenize", "in", "-o", "out", "--shard-bytes", "20", "--processes", "1"]) == 0
    out = capsys.readouterr().out
    assert "80 tokens of 5 documents in 3 shards in out/ (vocabulary of 257, uint16; 0 empty" in out
    assert load_index(folder / "out").tokens == 80
    assert main(["tokenize", "in/1.txt", "in/2.txt", "--output", "two"]) == 0
    assert "27 tokens of 2 documents" in capsys.readouterr().out


def test_a_users_mistake_is_one_message_and_status_2(folder, capsys):
    """Otherwise it would look like a bug of the program."""
    for arguments, message in (
        (["nowhere", "-o", "out"], "path nowhere does not exist"),
        (["in", "-o", "out", "--processes", "0"], "processes must be at least 1, found 0"),
        (["in", "-o", "out", "--tokenizer", "none.json"], "none.json cannot be read as a tokenizer.json"),
        (["in"], "--output"),
    ):
        assert ends(*arguments) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(capsys, monkeypatch):
    """Otherwise a log file would be full of control characters, or a terminal show nothing for hours."""
    screen = io.StringIO()
    with tokenize._progress(Console(file=screen, force_terminal=True, width=80)) as report:
        report(50_000, 100_000)
    assert "tokenize" in screen.getvalue() and "50.0/100.0" in screen.getvalue()
    monkeypatch.setattr(tokenize, "_PLAIN_EVERY", 0.0)
    with tokenize._progress(Console(file=io.StringIO())) as report:
        report(500_000, 2_000_000)
    assert capsys.readouterr().out == "0.5 of 2.0 MB (25%)\n"
