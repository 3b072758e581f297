"""Pretrains a small mixture of experts, eight of them and two for a token, on what `pretrain_lm.py` gives a Llama.

python experiments/pretrain_moe.py --simulate 8 --plan.mesh data=2,expert=4
python experiments/pretrain_moe.py --simulate 8 --plan.mesh data=2,pipe=2,expert=2 --plan.microbatches 4
"""

import sys

from experiments import pretrain_lm
from jaxpar.cli.experiment import run_experiment
from jaxpar.config import RunConfig
from jaxpar.data.tokenizer import ByteTokenizer
from models.moe import MoEConfig

CONFIG = RunConfig(
    name="pretrain_moe",
    model=MoEConfig(
        vocab_size=ByteTokenizer.vocab_size,
        num_layers=2,
        embed_dim=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        mlp_dim=256,
        num_experts=8,
        experts_per_token=2,
        moe_mlp_dim=128,
        log_load=True,
    ),
    data=pretrain_lm.CONFIG.data,
    optimizer=pretrain_lm.CONFIG.optimizer,
    plan=pretrain_lm.CONFIG.plan,
    trainer=pretrain_lm.CONFIG.trainer,
)

if __name__ == "__main__":
    sys.exit(run_experiment(CONFIG, pretrain_lm.sample))
