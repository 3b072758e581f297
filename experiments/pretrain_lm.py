"""Pretrains a small Llama on the bytes of Python's own standard library.

    python experiments/pretrain_lm.py --simulate 8 --plan.mesh data=4,tensor=2 --plan.zero 3

It runs as it is on one device, on simulated ones, and on a GPU. At the end the validation loss is well below the
bigram entropy of the held-out files: the model uses more than the byte before. The control
`--data.shuffle-bytes` gives it the same bytes in random order, and it cannot.
"""

import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from jaxpar.cli.experiment import run_experiment
from jaxpar.config import RunConfig
from jaxpar.data.text import TextData
from jaxpar.data.tokenizer import ByteTokenizer
from jaxpar.plan import Plan
from jaxpar.training.callbacks import Callback
from jaxpar.training.optimizer import OptimizerConfig
from jaxpar.training.sample import Sample
from jaxpar.training.trainer import TrainerConfig
from models.llama import LlamaConfig

ROW_LENGTH = 128

CONFIG = RunConfig(
    name="pretrain_lm",
    model=LlamaConfig(
        vocab_size=ByteTokenizer.vocab_size,
        num_layers=2,
        embed_dim=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        mlp_dim=256,
    ),
    data=TextData(
        paths=(sysconfig.get_path("stdlib"),),
        suffixes=(".py",),
        exclude=(".*", "test", "tests", "idlelib", "site-packages", "__pycache__"),
        row_length=ROW_LENGTH,
        rows=32,
        eval_rows=128,
    ),
    optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=40),
    plan=Plan(mesh="data=-1"),
    trainer=TrainerConfig(steps=400, evaluate_every=50, checkpoint_every=100),
)


def sample(directory: Path) -> Sequence[Callback]:
    tokenizer = ByteTokenizer()
    return [Sample(directory, tokenizer.encode, tokenizer.decode, "def ", window=ROW_LENGTH)]


if __name__ == "__main__":
    sys.exit(run_experiment(CONFIG, sample))
