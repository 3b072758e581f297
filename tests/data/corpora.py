"""Small corpora in every format, and a tokenizer.json made for them."""

import json

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"


def words(seed: int, count: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(["mesh", "axis", "shard", "naïve", "stage"], count))


def texts(count: int) -> list[str]:
    """Each another one, of 1 to 40 words."""
    return [f"{number} {words(number, 1 + number * 7 % 40)}\n" for number in range(count)]


def write_jsonl(path, found, key="text") -> None:
    path.write_text("".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(found)))


def write_tokenizer(path, vocabulary=300) -> None:
    """A byte-level BPE with a token that ends documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(50), trainer)
    tokenizer.save(str(path))
