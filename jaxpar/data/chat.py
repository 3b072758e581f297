"""Conversations for fine-tuning: only the assistant's answers are learned."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from jaxpar.data.corpus import Document, find_files, json_object, malformed, nothing_found, read_file, split
from jaxpar.data.dataset import Dataset, EvaluationSet, Share, describe_sides
from jaxpar.data.declared import refuse
from jaxpar.data.packing import PackedRows, pack
from jaxpar.data.text import size_of
from jaxpar.data.tokenizer import Tokenizer
from jaxpar.data.tokenizer_file import load_tokenizer

ROLES = ("system", "user", "assistant", "tool")
_NEEDED = 'a list of {"role", "content"} under "messages"'

Message = tuple[str, str]  # role, content
Rendered = tuple[np.ndarray, np.ndarray]  # ids, which are learned


@dataclass(frozen=True)
class Conversation(Document):
    """One line of a JSONL file; `data` is the line."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class ChatData:
    """JSONL files, each line `{"messages": [{"role": ..., "content": ...}, ...]}`. Raises ConfigError as all do.

    The template, see `render`: for each message `<|role|>`, a line break and the content as text, then the end of
    document as one id. Weight 1 is on the tokens of assistants' contents and on the end after each. Conversations
    are packed like documents, and one longer than a row is cut like them: its later pieces do not see the earlier.
    """

    paths: tuple[str, ...]  # files, and folders of .jsonl files
    row_length: int  # positions of a row
    rows: int  # rows of a step, over all processes
    tokenizer: str = "bytes"  # or the path of a `tokenizer.json`
    end: str | None = None  # the token of that file that ends a message
    held_out: float = 0.1  # fraction of the conversations
    seed: int = 0  # of the split and the order of rows
    eval_rows: int | None = None  # evaluate on so many held-out rows, spread evenly over all of them

    def __post_init__(self) -> None:
        no_paths = isinstance(self.paths, str) or not self.paths
        refuse("chat data", self, [("paths", "a tuple of at least one path")] if no_paths else ())

    def build(self, process_index: int = 0, process_count: int = 1) -> Dataset:
        """Reads, splits and packs, alike on every process.

        Raises DataError for rows that the processes cannot share evenly, files that cannot be read, lines that are no
        conversation with an answer, and fewer than two conversations; and what `load_tokenizer` raises.
        """
        share = Share(self.rows, process_index, process_count)
        tokenizer = load_tokenizer(self.tokenizer, self.end)
        sides = split(read_conversations(self.paths), self.held_out, self.seed)
        rendered = [[render(c.messages, tokenizer) for c in side] for side in sides]
        train, held_out = (self._pack(side) for side in rendered)
        evaluation = EvaluationSet(held_out, share, self.eval_rows)
        cut = sum(len(ids) - 1 > self.row_length for side in rendered for ids, _ in side)
        answers = f"answers:  {train.num_targets:,} targets in training, {held_out.num_targets:,} held out"
        sizes = [size_of(side) for side in sides]
        return Dataset(
            train,
            {"held_out": evaluation},
            share,
            self.seed,
            tokenizer.vocab_size,
            describe_sides((sizes[0], train), (sizes[1], evaluation), self.rows, [])
            + f"\n{answers}; {cut:,} conversations longer than a row",
        )

    def _pack(self, rendered: Sequence[Rendered]) -> PackedRows:
        return pack([ids for ids, _ in rendered], self.row_length, [scored for _, scored in rendered])


def render(messages: Sequence[Message], tokenizer: Tokenizer) -> Rendered:
    """int32 [tokens] of a conversation, and bool [tokens]: which of them are learned.

    Each message is `<|role|>`, a line break, its content, and the end of document. The last is no text, so that no
    content can pretend to be the next message. To generate an answer, give the messages and `<|assistant|>` with its
    line break, and stop at the end of document.
    """
    ids: list[np.ndarray] = []
    scored: list[np.ndarray] = []
    for role, content in messages:
        head = tokenizer.encode(f"<|{role}|>\n")
        body = np.append(tokenizer.encode(content.encode("utf-8", "surrogatepass")), tokenizer.end_of_document)
        ids += [head, body]
        scored += [np.zeros(len(head), bool), np.full(len(body), role == "assistant")]
    return np.concatenate(ids).astype(np.int32), np.concatenate(scored)


def read_conversations(paths: Sequence[str | Path]) -> list[Conversation]:
    """Every line of the files, and of the `.jsonl` files below the folders. Raises DataError that names the line."""
    found = [
        _conversation(name, file, number, line)
        for name, file in find_files(paths, (".jsonl",), (".*",))
        for number, line in enumerate(read_file(file).split(b"\n"), start=1)
        if line.strip()
    ]
    if not found:
        raise nothing_found(paths, (".jsonl",), (".*",))
    return found


def _conversation(name: str, file: Path, number: int, line: bytes) -> Conversation:
    messages = json_object(line, file, partial(int, number), _NEEDED).get("messages")
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise malformed(file, number, f"{_NEEDED}, all text", "something else")
    pairs = tuple((message["role"], message["content"]) for message in messages)
    if unknown := [role for role, _ in pairs if role not in ROLES]:
        raise malformed(file, number, f"the roles {', '.join(ROLES)}", repr(unknown[0]))
    if all(role != "assistant" for role, _ in pairs):
        raise malformed(file, number, "an answer of the role assistant", f"{len(pairs)} messages of others")
    return Conversation(f"{name}:{number}", line, pairs)


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
