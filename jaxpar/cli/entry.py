"""`jaxpar <command>`: which function each command is."""

import difflib
import os
import runpy
import sys
from collections.abc import Callable, Sequence

from jaxpar.cli.check import check
from jaxpar.cli.compile import compile_command
from jaxpar.cli.friendly import friendly_errors
from jaxpar.cli.generate import generate_command
from jaxpar.cli.report import report
from jaxpar.cli.timeline import timeline_command
from jaxpar.cli.tokenize import tokenize_command
from jaxpar.errors import ConfigError

_TRAIN_USAGE = """usage: jaxpar train SCRIPT [--key value ...]

The same as `python SCRIPT --key value ...`: SCRIPT builds a RunConfig, and the keys override it, e.g.
  jaxpar train experiments/pretrain_lm.py --simulate 8 --plan.mesh data=4,tensor=2 --plan.zero 3
`jaxpar train SCRIPT --help` lists the script's keys."""


def train(arguments: Sequence[str]) -> int:
    """Runs a script as `python` would."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_TRAIN_USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    script = arguments[0]
    if not os.path.isfile(script):
        raise ConfigError(
            f"there is no script {script!r} here ({os.getcwd()}); the first argument is a file, keys follow"
        )
    sys.argv = list(arguments)
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")
    return 0


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (train, "run an experiment's script, with overrides"),
    "compile": (compile_command, "compile a step for a cluster that is not there, and report what it takes"),
    "check": (check, "compare a model on meshes with the model on one device"),
    "report": (report, "make one HTML page of a run"),
    "generate": (generate_command, "continue a prompt with the model of a run"),
    "timeline": (timeline_command, "draw a pipeline schedule, and say what it costs"),
    "tokenize": (tokenize_command, "write text as token ids, for corpora larger than memory"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name, *rest = arguments
    with friendly_errors():
        if name not in COMMANDS:
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"commands: {', '.join(COMMANDS)}"
            raise ConfigError(f"jaxpar has no command {name!r}; {hint}")
        return COMMANDS[name][0](rest)


def _usage() -> str:
    lines = [f"  {name:<10}{summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(["usage: jaxpar COMMAND ...", "", *lines, "", "`jaxpar COMMAND --help` says more."])
