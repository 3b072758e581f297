"""Traced memory in place of arithmetic, for the candidates that a person sees."""

from dataclasses import replace

import optax

import jaxpar
from jaxpar.planner.sharpen import sharpen
from tests.planner.test_verify import TOY, ranked


def test_the_fastest_have_the_memory_that_a_program_predicts():
    """Otherwise the table and `jaxpar compile` would name two figures for one plan."""
    after = sharpen(ranked(), 1)
    best = after[0]
    program = jaxpar.Program(TOY.build, optax.sgd(1e-2), best.plan)
    assert best.memory == program.memory("1x4xcpu", jaxpar.token_shapes(8, 16))
    assert len(after) == len(ranked()) and after[1].memory == ranked()[1].memory


def test_what_arithmetic_took_for_too_large_is_ranked_if_it_fits():
    """Otherwise the fastest plan could be left out by a guess that is too high."""
    found = ranked()
    traced = sharpen(found, 1)[0].memory.total
    guess = found[0].memory
    guess = replace(guess, batch=guess.batch + int(1.2 * traced) - guess.total)
    high = replace(found[0], memory=guess, limit=traced)
    assert not high.fits
    after = sharpen(replace(found, found=(), near=(high,)), 1)
    assert len(after) == 1 and after[0].fits and not after.near


def test_what_does_not_fit_is_dropped_with_its_number():
    """Otherwise a plan would be offered that its own prediction contradicts."""
    found = ranked()
    traced = sharpen(found, 1)[0].memory.total
    after = sharpen(replace(found, found=(replace(found[0], limit=traced - 1),)), 1)
    assert not after.found and "traced, a step takes" in after.dropped[0][1]


def test_where_the_compiler_contradicts_all_that_is_the_reason():
    """Otherwise a user would read that no mesh has the devices, of plans that were legal and did not hold."""
    found = ranked()
    none = replace(found, found=(), near=(), dropped=((found[0], "the compiler needs 12 GB"),))
    assert "the compiler needs 12 GB" in none.reason and "legal ones" in none.reason


def test_by_how_much_arithmetic_is_wrong_is_learned_on_the_way():
    """Otherwise the fastest plans would be traced one by one, all of them too large, and the ones that fit never."""
    found = ranked()
    best, first = sharpen(found, 1)[0].memory.total, found[0]
    low = replace(first.memory, batch=first.memory.batch + best // 2 - first.memory.total)
    many = tuple(replace(first, memory=low, limit=int(0.8 * best)) for _ in range(40))
    after = sharpen(replace(found, found=many), 1)
    assert not after.found and len(after.dropped) == 1 and len(after.near) == 40
    assert after.near[0].memory.total > after.near[0].limit and "too much" in after.reason
