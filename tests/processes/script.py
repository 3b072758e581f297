"""An experiment whose processes note every row they draw, and do to themselves what TROUBLE says.

TROUBLE is `process:batch:what`: at that batch (of this start, from 1) that process sends itself the signal of this
number, or sleeps before this batch and all after it, for `what` = `slow`.
"""

import functools
import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import jax

from jaxpar.cli import experiment
from jaxpar.config import RunConfig
from jaxpar.data.dataset import Dataset
from jaxpar.data.iterator import RowIterator
from jaxpar.data.mixture import MixtureData
from jaxpar.data.text import TextData
from jaxpar.plan import Plan
from jaxpar.training.optimizer import OptimizerConfig
from jaxpar.training.trainer import TrainerConfig
from models.llama import LlamaConfig

MODEL = LlamaConfig(257, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=16)
NAP = 0.2  # seconds


def text(name):
    return TextData(paths=(f"text/{name}",), row_length=24, rows=8, eval_rows=7)


class Watched(RowIterator):
    """Appends to `rows-<process>.jsonl` what it gives out: what of this start, and which rows."""

    batches = 0

    def __next__(self):
        self.batches += 1
        trouble(self.batches)
        step = self.get_state()["rows_consumed"] // self._batch_rows
        batch = super().__next__()
        rows = [_name(batch["tokens"][i], batch["segments"][i]) for i in range(len(batch["tokens"]))]
        with Path(f"rows-{jax.process_index()}.jsonl").open("a") as file:
            file.write(json.dumps({"step": step + 1, "processes": jax.process_count(), "rows": rows}) + "\n")
        return batch


def trouble(batch):
    process, first, what = os.environ.get("TROUBLE", "-1:0:slow").split(":")
    if jax.process_index() != int(process):
        return
    if what == "slow" and batch >= int(first):
        time.sleep(NAP)
    elif what != "slow" and batch == int(first):
        os.kill(os.getpid(), int(what))


def _name(*arrays):
    return hashlib.blake2b(b"".join(a.tobytes() for a in arrays), digest_size=6).hexdigest()


class WatchedDataset(Dataset):
    def train(self):
        return Watched(self.train_rows, batch_rows=self.share.rows, local=self.share.local, seed=self.seed)


@dataclass(frozen=True)
class WatchedMixture(MixtureData):
    def build(self, process_index=0, process_count=1):
        dataset = super().build(process_index, process_count)
        return WatchedDataset(**{f.name: getattr(dataset, f.name) for f in fields(dataset)})


CONFIG = RunConfig(
    name="tiny",
    model=MODEL,
    data=WatchedMixture({"songs": text("songs"), "counts": text("counts")}, {"songs": 0.7, "counts": 0.3}, rows=8),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
    plan=Plan(mesh="data=-1", zero=1),
    trainer=TrainerConfig(steps=14, evaluate_every=7, checkpoint_every=100, keep_best=True),
)

if __name__ == "__main__":
    experiment.Stragglers = functools.partial(experiment.Stragglers, every=3)  # a run of 14 steps has no step 100
    sys.exit(experiment.run_experiment(CONFIG))
