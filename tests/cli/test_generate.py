"""`jaxpar generate`: from a run on disk to text."""

import sys

import pytest

from jaxpar.cli.entry import main
from jaxpar.cli.experiment import run_experiment
from jaxpar.cli.generate import generate_command, load_config

SCRIPT = """
import sys
from jaxpar.cli.experiment import run_experiment
from jaxpar.config import RunConfig
from jaxpar.data.text import TextData
from jaxpar.training.optimizer import OptimizerConfig
from jaxpar.training.trainer import TrainerConfig
from models.llama import LlamaConfig

CONFIG = RunConfig(
    name="tiny",
    model=LlamaConfig(257, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16),
    data=TextData(paths=("text",), row_length=16, rows=8, eval_rows=8),
    optimizer=OptimizerConfig(learning_rate=3e-2, warmup_steps=2, average=0.5),
    trainer=TrainerConfig(steps=60, evaluate_every=60, checkpoint_every=60),
)

if __name__ == "__main__":
    sys.exit(run_experiment(CONFIG))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a script and its run: text of one sentence."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text").mkdir()
    for i in range(12):
        (folder / "text" / f"{i}.txt").write_text("abcdefgh" * 50)
    (folder / "script.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        assert run_experiment(load_config("script.py"), arguments=["--plan.mesh", "data=4,tensor=2"]) == 0
    return folder


@pytest.fixture
def here(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    monkeypatch.setattr(sys, "path", list(sys.path))
    capsys.readouterr()


def ends(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["generate", *arguments])
    return ended.value.code


def test_a_trained_model_goes_on_with_what_it_has_learned(here, capsys):
    """Otherwise the text would come from other parameters than those that were trained."""
    assert generate_command(["script.py", "--prompt", "abc", "--tokens", "21", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "abcdefgh" * 3 + "\n"


def test_another_model_than_the_trained_one_is_named(here, capsys):
    """Otherwise the checkpoint would be refused leaf by leaf, or fit by chance."""
    assert ends("script.py", "--prompt", "abc", "--model.mlp-dim", "32") == 2
    assert "model.mlp_dim: 16 then, 32 now" in capsys.readouterr().err


def test_mistakes_are_one_message(here, capsys, tmp_path):
    """Otherwise a wrong key, folder or script would be a traceback, or be passed over."""
    (tmp_path / "empty.py").write_text("x = 1\n")
    for arguments, said in [
        (["script.py", "--prompt", "abc", "--simulate", "8"], "it takes --directory alone"),
        (["script.py", "--prompt", "abc", "--directory", "nowhere"], "nowhere holds no run: train first"),
        (["script.py", "--prompt", "", "--tokens", "0"], "prompt needs a text that is not empty"),
        ([str(tmp_path / "empty.py"), "--prompt", "abc"], "needs one RunConfig among its names, found none"),
        (["missing.py", "--prompt", "abc"], "there is no script 'missing.py' here"),
    ]:
        assert ends(*arguments) == 2
        assert said in capsys.readouterr().err
