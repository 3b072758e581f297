"""`jaxpar check` finds a model that differs on a mesh, and passes one that does not."""

import sys

import pytest

from jaxpar.cli.entry import main

MODULE = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
import jaxpar

class Layer(nnx.Module):
    def __init__(self, dim, *, rngs):
        init = jaxpar.named(nnx.initializers.normal(0.3), None, None)
        self.w = nnx.Param(init(rngs.params(), (dim, dim), jnp.float32))
    def __call__(self, x, ctx):
        return x + self.scale(x) * jnp.tanh(x @ self.w[...])
    def scale(self, x):
        return 1.0

class Leaky(Layer):
    def scale(self, x):
        return x.mean(0, keepdims=True)  # looks at the rows of its own device alone

class Model(nnx.Module):
    def __init__(self, layer, *, rngs):
        table = jaxpar.named(nnx.initializers.normal(1.0), NAME, None)
        self.table = nnx.Param(table(rngs.params(), (11, 8), jnp.float32))
        self.blocks = jaxpar.stack(layer, 2, 8, rngs=rngs)
    def embed(self, batch, ctx):
        return jaxpar.embedding_lookup(self.table[...], batch["tokens"])
    def head(self, x, batch, ctx):
        total = jaxpar.cross_entropy(x, self.table[...], batch["targets"], batch["weights"])
        return {"cross_entropy": total}
    def terms(self, batch):
        return {"cross_entropy": jaxpar.Term(jnp.sum(batch["weights"]))}

NAME = "vocab"
def build(rngs): return Model(Layer, rngs=rngs)
def leaky(rngs): return Model(Leaky, rngs=rngs)
def batch():
    return {"tokens": np.arange(16, dtype=np.int32).reshape(8, 2) % 11, "targets": np.zeros((8, 2), np.int32),
            "weights": np.ones((8, 2), np.float32)}
number = 3
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    (tmp_path / "checked_model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("checked_model", None)


def test_a_model_that_follows_the_protocol_passes(model, capsys):
    """Otherwise users could not test their own models, or would be told that a sound one is broken."""
    assert main(["check", "checked_model:build", "--meshes", "data=4", "--zero", "0", "3"]) == 0
    out = capsys.readouterr().out
    assert "data=4 zero=0  equal, loss" in out and "every plan equals one device" in out


def test_a_pipeline_is_checked_like_any_mesh(model, capsys):
    """Otherwise a model is never held against what it is trained with; on 3 stages it has too few layers."""
    arguments = ["--meshes", "pipe=2", "data=2,pipe=2", "pipe=3", "--zero", "1", "--microbatches", "2"]
    assert main(["check", "checked_model:build", *arguments]) == 1
    out = capsys.readouterr().out
    assert out.count("equal, loss") == 2 and "pipe=3 zero=1" in out and "has 2 layers for 3 stages" in out


def test_a_model_that_mixes_rows_and_a_mesh_that_is_not_legal_fail(model, capsys):
    """Otherwise a check would pass whatever the model does."""
    arguments = ["checked_model:leaky", "--meshes", "data=4", "data=3", "--zero", "0"]
    assert main(["check", *arguments, "--batch", "checked_model:batch"]) == 1
    out = capsys.readouterr().out
    assert "blocks.w: differs by" in out and "data=3 zero=0  not legal: 8 rows do not divide" in out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("checked_model", "needed module:function"),
        ("nowhere:build", "there is no module 'nowhere'"),
        ("checked_model:nothing", "has no function 'nothing'"),
        ("checked_model:number", "has no function 'number'"),
    ],
)
def test_a_name_that_leads_nowhere_is_explained(model, name, message, capsys):
    """Otherwise a typo would be a traceback."""
    with pytest.raises(SystemExit) as ended:
        main(["check", name])
    assert ended.value.code == 2 and message in capsys.readouterr().err
