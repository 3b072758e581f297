"""The compiler's word against the prediction."""

from dataclasses import replace

import optax
import pytest
from rich.console import Console

import jaxpar
from jaxpar.estimate.hardware import Cluster
from jaxpar.planner.calibration import Calibration, Sample, default_path
from jaxpar.planner.measure import measure
from jaxpar.planner.search import Search, search
from jaxpar.planner.space import Space
from jaxpar.planner.stopwatch import Stopwatch
from jaxpar.planner.table import show
from jaxpar.planner.verify import of_each_kind, verify
from models.llama import LlamaConfig

TOY = LlamaConfig(vocab_size=64, num_layers=2, embed_dim=32, num_heads=2, num_kv_heads=2, head_dim=16, mlp_dim=64)
SMALL = Space(pipe=(1,), seq=(1,), zero=(1,), remat=("none",), microbatches=(1,), within_node=(False,))


def ranked(budget=None):
    shapes = jaxpar.token_shapes(8, 16)
    return search(TOY.build, optax.sgd(1e-2), "1x4xcpu", shapes, space=SMALL, budget=budget)


@pytest.fixture(scope="module")
def verified():
    return verify(ranked(), 1)


def test_a_compiled_candidate_has_the_compilers_memory(verified):
    """Otherwise a table would show a guess where the truth is known."""
    best = verified[0]
    assert best.report is not None and best.peak_bytes == best.report.peak_bytes != best.memory.total
    assert verified[1].report is None and not verified.dropped


def test_what_the_compiler_finds_too_large_is_dropped_with_both_numbers(verified):
    """Otherwise a user would rent a cluster for a plan that does not fit."""
    found = ranked()
    limit = verified[0].report.peak_bytes - 1
    tight = replace(found, found=tuple(replace(c, limit=limit) for c in found.found[:1]))
    after = verify(tight, 1)
    assert not after.found and after.counts.contradicted == 1
    assert "the compiler needs" in after.dropped[0][1] and "predicted were" in after.dropped[0][1]


def test_a_mixed_cluster_is_compiled_for_each_kind_and_says_whose_pace_it_has():
    """Otherwise a plan for one would end in an error, or promise the speed of its faster part."""
    kinds = of_each_kind(Cluster.parse("1x8xh100+2x8xa100+1x8xh100"))
    assert [str(cluster) for cluster in kinds] == ["4x8xh100", "4x8xa100"]
    mixed = Search(replace(ranked().question, cluster=Cluster.parse("1x2xcpu+1x2xcpu"))).run()
    after = verify(mixed, 1)
    assert after[0].report is not None and not after.dropped
    show(after, 1, console := Console(record=True, width=300))
    assert "as if every device were the slowest" in console.export_text()


def test_measured_steps_correct_the_next_search(tmp_path):
    """Otherwise measuring would teach nothing."""
    devices = replace(ranked().question, cluster=ranked().question.cluster.parse("1x8xcpu"))
    found = jaxpar.planner.search.Search(devices).run()
    after, learned = measure(found, 2)
    timed = [c for c in after if c.measured is not None]
    assert 2 <= len(timed) == len(learned.samples) <= 4
    assert [c.measured for c in after[: len(timed)]] == sorted(c.measured for c in timed)
    before = sum(abs(s.compute + s.communication + s.fixed - s.measured) for s in learned.samples)
    assert sum(abs(c.time.total - c.measured) for c in timed) < before
    learned.save(tmp_path / "a" / "b.json")
    assert Calibration.load(tmp_path / "a" / "b.json") == learned


class Told(Stopwatch):
    """Every step takes ten times what is predicted, but without `tensor` as long as is predicted."""

    def seconds(self, plan):
        return Search(self.question).evaluate(plan).time.total * (10.0 if plan.shape.tensor > 1 else 1.0)

    def in_turns(self, plans, rounds=1):
        return {plan: [self.seconds(plan)] for plan in plans}


def test_what_looks_faster_by_what_was_learned_is_timed_too():
    """Otherwise the best of the few that were timed would be taken for the best of all."""
    question = replace(ranked().question, cluster=ranked().question.cluster.parse("1x8xcpu"))
    found = Search(question).run()
    assert found[0].plan.shape.tensor > 1 == found[1].plan.shape.tensor
    after, learned = measure(found, 1, stopwatch=Told(question))
    assert len(learned.samples) == 2 and learned.doubt > 0
    assert after.best.plan == found[1].plan and after.best.measured < after[1].measured


def test_measuring_elsewhere_is_refused():
    """Otherwise a laptop's times would be taken for a cluster's."""
    with pytest.raises(jaxpar.ConfigError, match="to measure on 1x4xcpu it must be here: found 8"):
        measure(ranked(), 1)


def test_a_fit_finds_the_factors_that_samples_have():
    """Otherwise corrections would be anything."""
    parts = [(1.0, 0.1, 0.03), (0.5, 0.5, 0.03), (0.2, 1.0, 0.03), (2.0, 0.01, 0.03)]
    samples = [Sample(str(p), *p, 1.5 * p[0] + 0.7 * p[1] + p[2]) for p in parts]
    fitted = Calibration.fit("cpu", samples)
    assert fitted.compute == pytest.approx(1.5, rel=0.02) and fitted.communication == pytest.approx(0.7, rel=0.02)


def test_a_broken_calibration_names_the_file(tmp_path, monkeypatch):
    """Otherwise a half-written file would stop every search without a hint."""
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(jaxpar.ConfigError, match="remove the file"):
        Calibration.load(tmp_path / "c.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path("cpu") == tmp_path / "jaxpar" / "calibration-cpu.json"
