"""`jaxpar ...` as it is typed."""

import sys

import pytest

from jaxpar.cli.entry import main


def ends(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_without_a_command_the_commands_are_listed(capsys):
    """Otherwise one would have to read the source to begin."""
    assert main([]) == 2
    assert "train" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "check" in capsys.readouterr().out


def test_a_command_that_is_not_there_names_the_nearest(capsys):
    """Otherwise a typo would be a traceback."""
    assert ends("trian", "x.py") == 2
    assert "did you mean 'train'?" in capsys.readouterr().err


def test_train_without_a_script_or_with_one_that_is_missing_says_what_it_needs(capsys):
    """Otherwise the first thing that a new user types would be a traceback."""
    assert main(["train"]) == 2
    assert "jaxpar train SCRIPT" in capsys.readouterr().err
    assert main(["train", "--help"]) == 0
    assert ends("train", "nowhere.py") == 2
    assert "there is no script 'nowhere.py' here" in capsys.readouterr().err


def test_train_runs_a_script_as_python_does(tmp_path, monkeypatch, capsys):
    """Otherwise the two ways to start a run would differ."""
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nprint(__name__, sys.argv[1:], beside.VALUE)\nsys.exit(3)\n")
    monkeypatch.setattr(sys, "argv", ["jaxpar"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert ends("train", str(script), "--a", "1") == 3
    assert capsys.readouterr().out == "__main__ ['--a', '1'] 7\n"


def test_an_interrupt_is_no_traceback(tmp_path, monkeypatch, capsys):
    """Otherwise Ctrl-C while the data is read would print pages."""
    script = tmp_path / "script.py"
    script.write_text("raise KeyboardInterrupt\n")
    monkeypatch.setattr(sys, "argv", ["jaxpar"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert ends("train", str(script)) == 130
    assert "interrupted" in capsys.readouterr().err
