"""Numbers on a tracking service, which here only writes down what it is told."""

import sys
from types import SimpleNamespace

import pytest

from jaxpar.errors import ConfigError
from jaxpar.training.tracking import Tracking
from tests.training.fakes import make_loop, record


class Service:
    def __init__(self):
        self.runs, self.logged, self.finished = [], [], 0

    def module(self):
        return SimpleNamespace(init=lambda **about: self.runs.append(about), log=self.log, finish=self.finish)

    def log(self, numbers, step):
        self.logged.append((step, numbers))

    def finish(self):
        self.finished += 1


def track(monkeypatch, name, directory):
    service = Service()
    monkeypatch.setitem(sys.modules, name, service.module())
    tracking, loop = Tracking(name, directory, "lm", {"plan": {"zero": 3}}), make_loop()
    tracking.on_start(loop)
    tracking.on_record(loop, 7, record(loss=2.5))
    tracking.close()
    return service


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_records_are_logged_under_their_step(monkeypatch, tmp_path, name):
    """Otherwise a curve would be drawn against the number of calls, or the run would stay open."""
    service = track(monkeypatch, name, tmp_path)
    (about,) = service.runs
    assert about["project"] == "lm" and about["config"] == {"plan": {"zero": 3}} and about["resume"] == "allow"
    assert service.logged == [(7, record(loss=2.5))] and service.finished == 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resumed_run_goes_on_there_and_a_fresh_one_is_another(monkeypatch, tmp_path, name):
    """Otherwise the halves of one run would be two curves, or two runs one."""
    key = "id" if name == "wandb" else "name"
    here, other = tmp_path / "run", tmp_path / "other" / "run"
    here.mkdir()
    other.mkdir(parents=True)
    names = [track(monkeypatch, name, folder).runs[0][key] for folder in (here, here, other)]
    assert names[0] == names[1] != names[2] and names[0].startswith("run-")


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch, tmp_path):
    """Otherwise the run would end in an import error."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxpar\[tracking\]'"):
        Tracking("wandb", tmp_path, "lm", {})
