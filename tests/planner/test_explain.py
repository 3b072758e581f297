"""Explanations: parts that add up, reasons with numbers, ways out that work."""

from dataclasses import replace

import optax
import pytest

import jaxpar
from jaxpar.estimate.hardware import Cluster
from jaxpar.plan import Plan
from jaxpar.planner.explain import explain
from jaxpar.planner.question import Question
from jaxpar.planner.search import Search
from models.llama import LlamaConfig

LLAMA = LlamaConfig(
    vocab_size=32000, num_layers=16, embed_dim=2048, num_heads=16, num_kv_heads=16, head_dim=128, mlp_dim=5504
)


def question(cluster="1x8xh100", rows=32, budget=None) -> Question:
    shapes, plan = jaxpar.token_shapes(rows, 4096), Plan(precision="bfloat16")
    return Question(LLAMA.build, optax.adamw(1e-3), Cluster.parse(cluster), shapes, plan, budget=budget)


def test_the_winner_and_its_runner_up_are_told_apart_by_their_parts():
    """Otherwise a user could not see why a plan is the best."""
    ranked = Search(question()).run()
    told = explain(ranked)
    best, other = ranked.best, told.runner_up
    assert other is not None and other.time.total > best.time.total
    text = told.text()
    for part, seconds in best.time.parts.items():
        assert (part in text) or seconds < 0.01 * best.time.total
    assert "where the" in text and "why not" in text and told.to_dict()["runner_up"]["seconds"] == other.time.total


def test_what_nearly_fits_would_be_faster_and_says_by_how_much_it_does_not_fit():
    """Otherwise a user with a little more memory would not hear of a better plan."""
    q = question()
    tight = Search(replace(q, budget=int(Search(q).run().best.peak_bytes * 0.8))).run()
    told = explain(tight)
    assert told.near
    for candidate in told.near:
        assert candidate.time.total < tight.best.time.total and candidate.overflow > 0
    assert "too large (most of it" in told.text()


def test_ways_out_of_an_impossible_budget_are_plans_that_fit_cheapest_first():
    """Otherwise the advice would fail as well."""
    ranked = Search(question("1x1xh100", budget=6 * 10**9)).run()
    assert not ranked
    ways = explain(ranked).ways_out
    assert len(ways) == 3
    same = [way.cost for way in ways if not way.numerics]
    assert same == sorted(same) and all(way.best.fits for way in ways)
    assert "ways out, the cheapest first" in explain(ranked).text()


def test_seventeen_devices_are_told_to_be_sixteen_or_to_take_other_rows():
    """Otherwise a cluster that nothing divides would have no way out."""
    q = replace(question("1x17xcpu", rows=4), budget=10**12)
    ranked = Search(q).run()
    assert not ranked.found and not ranked.near
    changes = [way.change for way in explain(ranked).ways_out]
    assert any("use 16 of the 17 devices" in change for change in changes)
    assert any("17 rows a step" in change for change in changes)


@pytest.mark.parametrize("budget", [None, 2 * 10**9])
def test_an_explanation_has_a_text_whether_there_is_a_plan_or_not(budget):
    """Otherwise a run of the command would end without a word."""
    assert explain(Search(question("1x2xh100", budget=budget)).run()).text()
