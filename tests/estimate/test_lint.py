"""The lint finds what XLA does against a plan, by parameter and source line, and is silent where nothing is wrong."""

from dataclasses import replace
from pathlib import Path

import optax
import pytest

import jaxpar
from experiments.lint_table import entry, lint_one
from experiments.parity_table import Cell as PlainCell
from experiments.pipeline_table import Cell as PipelineCell
from experiments.sequence_table import Cell as SequenceCell
from jaxpar.estimate.lint import Finding
from tests.estimate import faulty

PLAIN = jaxpar.Plan("data=4,tensor=2", zero=1, microbatches=2)
SEQUENCE_NORMS = replace(PLAIN, zero=3, sequence_sharded_norms=True)


def findings(build, plan: jaxpar.Plan, cluster: str = "1x8xcpu") -> tuple[Finding, ...]:
    return jaxpar.Program(build, optax.sgd(0.1), plan).compile(cluster, jaxpar.token_shapes(32, 16)).lint


def line(mark: str) -> str:
    """`faulty.py:n` of the line with this comment."""
    source = Path(faulty.__file__).read_text().splitlines()
    return f"faulty.py:{1 + next(i for i, text in enumerate(source) if text.endswith(f'# {mark}'))}"


@pytest.mark.parametrize("cluster", ["1x8xcpu", "1x8xh100"])
def test_a_weight_gathered_inside_the_loop_is_found_by_name_and_line(cluster):
    """Otherwise tensor parallelism is undone in every layer, and only the bill would tell."""
    found = findings(faulty.gathering, PLAIN, cluster)
    weights = [f for f in found if f.fault == "gathered parameter"]
    assert {f.parameter for f in weights} == {f"blocks.mlp.{name}.kernel" for name in ("gate", "up", "down")}
    for f in weights:
        assert line("gathered weights") in f.source
        assert "inside a loop" in f.text and "over tensor" in f.text
        assert f.bytes >= 3 * 2 * 32 * 64 * 4  # in each of 3 layers and 2 microbatches


def test_a_missing_constraint_is_found_by_line():
    """Otherwise XLA trades activations to and fro, because nobody said how they lie."""
    found = findings(faulty.unconstrained, SEQUENCE_NORMS)
    assert any(line("missing constraint") in f.source and f.fault == "gathered activation" for f in found)
    assert {"blocks.mlp.gate.kernel", "blocks.mlp.down.kernel"} <= {f.parameter for f in found}


def test_a_norm_that_is_not_constrained_names_the_line_that_calls_it():
    """Otherwise the finding would point at the norm, which is right, and not at who uses it."""
    found = findings(faulty.unnormed, SEQUENCE_NORMS)
    assert found and all(line("norm not constrained") in f.source for f in found)


def test_a_replicated_embedding_is_found_by_name_and_line():
    """Otherwise every device holds the largest parameter whole."""
    (found,) = findings(faulty.ReplicatedEmbedding, PLAIN)
    assert (found.fault, found.parameter) == ("replicated parameter", "embedding")
    assert found.source.endswith(line("lookup of the replicated table"))
    assert found.bytes == 64 * 32 * 4 // 2


def test_a_split_table_looked_up_as_if_whole_is_found():
    """Otherwise the whole vocabulary is gathered in every step."""
    found = findings(faulty.gathered_embedding, SEQUENCE_NORMS)
    assert [(f.fault, f.parameter) for f in found] == [("gathered parameter", "embedding")]
    assert found[0].source.endswith(line("lookup of a split table"))


# Those of the tables whose programs gather most: `python -m experiments.lint_plans` lints all.
SILENT = [
    PlainCell("untied", "data=4,tensor=2", 4, zero=1, microbatches=2, layers=2),
    PlainCell("vocab 61", "tensor=8", 4, zero=0, microbatches=1, layers=2),
    PipelineCell("GPT", "interleaved", "pipe=4,tensor=2", 3, 2, zero=1, norms=True),
    PipelineCell("embed 35", "zero_bubble fill", "data=2,pipe=2,tensor=2", 8, zero=2, norms=True),
    SequenceCell("8 kv heads", "hybrid", "tensor=2,seq=4", "1f1b", zero=3, microbatches=2, remat="none"),
    SequenceCell("two stacks", "allgather", "tensor=2,seq=4", "1f1b", zero=2, microbatches=2, remat="none"),
]


@pytest.mark.parametrize("cell", SILENT, ids=str)
def test_plans_that_do_as_they_promise_are_passed_in_silence(cell):
    """Otherwise people learn to read past the findings."""
    assert lint_one(entry(cell), "1x8xcpu") == []


def test_gathers_that_xla_combines_are_still_told_by_who_wrote_them():
    """Otherwise ZeRO-3's gathers of weights, in one with those of documents, would seem to be nobody's."""
    cell = SequenceCell("packed", "ulysses", "seq=8", "1f1b", zero=3, microbatches=2, remat="none")
    assert lint_one(entry(cell), "1x8xh100") == []
