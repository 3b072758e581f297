"""Pretrains a small GPT, with learned positions, dropout and a z-loss, on what `pretrain_lm.py` gives a Llama.

python experiments/pretrain_gpt.py --simulate 8 --plan.mesh data=4,tensor=2 --plan.zero 3
jaxpar generate experiments/pretrain_gpt.py --prompt "def " --temperature 0.5
"""

import sys

from experiments import pretrain_lm
from jaxpar.cli.experiment import run_experiment
from jaxpar.config import RunConfig
from jaxpar.data.tokenizer import ByteTokenizer
from models.gpt import GPTConfig

CONFIG = RunConfig(
    name="pretrain_gpt",
    model=GPTConfig(
        vocab_size=ByteTokenizer.vocab_size,
        num_layers=2,
        embed_dim=128,
        num_heads=4,
        mlp_dim=512,
        num_positions=pretrain_lm.ROW_LENGTH,
        dropout=0.05,
        z_loss_coef=1e-4,
    ),
    data=pretrain_lm.CONFIG.data,
    optimizer=pretrain_lm.CONFIG.optimizer,
    plan=pretrain_lm.CONFIG.plan,
    trainer=pretrain_lm.CONFIG.trainer,
)

if __name__ == "__main__":
    sys.exit(run_experiment(CONFIG, pretrain_lm.sample))
