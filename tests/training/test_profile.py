"""A trace of a few steps."""

import gzip
import json

import pytest

from jaxpar.errors import ConfigError
from jaxpar.training.profile import Profile, ProfiledSteps
from jaxpar.training.trainer import train
from tests.training.fakes import make_loop
from tests.training.tiny import make_data, make_run


@pytest.mark.parametrize("text", ["10", "10:", "a:b", "13:10", "1:2", "-1:4", ""])
def test_any_other_form_is_refused(text):
    """Otherwise a typo would trace nothing, which one learns after the run."""
    with pytest.raises(ConfigError, match="needs FIRST:LAST"):
        ProfiledSteps.parse(text)
    assert ProfiledSteps.parse("10:13") == ProfiledSteps(10, 13)


@pytest.mark.parametrize(("first", "last"), [(5, 7), (6, 8), (8, 21)])
def test_steps_that_this_start_does_not_reach_are_refused_with_those_that_it_does(tmp_path, first, last):
    """Otherwise a resumed run would go to its end and leave no trace."""
    loop = make_loop(step=6, steps=20)
    with pytest.raises(ConfigError, match="choose steps from 8 to 20"):
        Profile(tmp_path, ProfiledSteps(first, last)).on_start(loop)


def test_the_trace_holds_these_steps_and_no_other(tmp_path):
    """Otherwise one would look at compilation, or at a step that is not the one that was slow."""
    said = []
    profile = Profile(tmp_path, ProfiledSteps(3, 4), said.append)
    train(run := make_run(), run.init(), make_data(), 6, [profile])
    (trace,) = tmp_path.glob("plugins/profile/*/perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = {event["args"]["step_num"] for event in events if event.get("name") == "train"}
    assert steps == {"3", "4"}
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
    assert gzip.decompress((tmp_path / "memory-4.prof").read_bytes())
    assert said == [f"traced steps 3 to 4 into {tmp_path}/plugins/profile/"]


def test_a_run_that_ends_inside_the_range_ends_the_trace(tmp_path):
    """Otherwise the next trace of this process would be refused, and this one lost."""
    profile, loop = Profile(tmp_path, ProfiledSteps(3, 9)), make_loop(step=2, steps=9)
    profile.on_step(loop)
    profile.close()
    profile.close()
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
