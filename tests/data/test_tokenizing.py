import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxpar.data import shards
from jaxpar.data.shards import TokenFiles, load_index
from jaxpar.data.sources import Sources
from jaxpar.data.tokenizer import ByteTokenizer
from jaxpar.data.tokenizer_file import FileTokenizer
from jaxpar.data.tokenizing import Tokenizing, tokenize
from jaxpar.errors import ConfigError, DataError
from tests.data.corpora import texts, write_jsonl, write_tokenizer

RUN = """
import sys
from pathlib import Path
from jaxpar.data.sources import Sources
from jaxpar.data.tokenizing import Tokenizing, tokenize
if __name__ == "__main__":
    source, directory = sys.argv[1:]
    tokenize(Tokenizing(Sources((source,)), shard_bytes=600), Path(directory), processes=2)
"""


@pytest.fixture
def source(tmp_path) -> Path:
    """40 documents and an empty one, in three files."""
    (tmp_path / "input").mkdir()
    write_jsonl(tmp_path / "input" / "a.jsonl", texts(38))
    (tmp_path / "input" / "b.txt").write_text("one file\n")
    (tmp_path / "input" / "empty.txt").touch()
    (tmp_path / "input" / "z.txt").write_text("the last\n")
    return tmp_path / "input"


def job(source, **options) -> Tokenizing:
    return Tokenizing(Sources((str(source),)), **{"shard_bytes": 600} | options)


def documents(directory) -> list[list[int]]:
    """The ids of each document."""
    index = load_index(directory)
    ends = index.documents()["end"].tolist()
    stream = TokenFiles(index)
    return [stream[start:stop].tolist() for start, stop in zip([0, *ends], ends, strict=False)]


def contents(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_shards_hold_every_document_with_its_end_in_order(source, tmp_path):
    """Otherwise a run would not be trained on the corpus."""
    index = tokenize(job(source), tmp_path / "out")
    expected = [*texts(38), "one file\n", "the last\n"]
    assert documents(tmp_path / "out") == [[*text.encode(), 256] for text in expected]
    assert len(index.shards) > 4 and index.dtype == np.uint16
    assert index.documents()["bytes"].tolist() == [len(text.encode()) for text in expected]
    assert sum(shard.empty for shard in index.shards) == 1
    assert index == load_index(tmp_path / "out")


def test_a_tokenizer_file_is_kept_beside_its_ids(source, tmp_path):
    """Otherwise nobody could read the ids once the tokenizer has moved."""
    write_tokenizer(tmp_path / "mine.json")
    index = tokenize(job(source, tokenizer=str(tmp_path / "mine.json")), tmp_path / "out")
    kept = FileTokenizer(tmp_path / "out" / index.tokenizer)
    assert kept.fingerprint == FileTokenizer(tmp_path / "mine.json").fingerprint
    found = documents(tmp_path / "out")
    assert [kept.decode(ids) for ids in found[:38]] == texts(38)
    assert {ids[-1] for ids in found} == {kept.end_of_document}


def test_a_large_vocabulary_takes_four_bytes():
    """Otherwise ids past 65,535 would wrap around."""
    assert [shards.dtype_of(size) for size in (257, 2**16, 2**16 + 1)] == [np.uint16, np.uint16, np.uint32]


class Killed(BaseException):
    """Ends a run between two writes, as a kill does."""


def test_a_run_killed_at_any_write_goes_on_to_the_same_files(source, tmp_path, monkeypatch):
    """Otherwise half a shard would be taken as whole, or finished shards be written again."""
    whole, written = tmp_path / "whole", []
    real = os.fsync
    monkeypatch.setattr(shards.os, "fsync", lambda file: (written.append(file), real(file)))
    tokenize(job(source), whole)
    calls = len(written)
    assert calls > 20

    for instant in range(calls):
        directory = tmp_path / str(instant)
        left = iter(range(instant))

        def fsync(file, left=left):
            if next(left, None) is None:
                if stat.S_ISREG(os.fstat(file).st_mode):  # what is not on the disk yet may be lost
                    os.ftruncate(file, os.fstat(file).st_size // 2)
                raise Killed

        monkeypatch.setattr(shards.os, "fsync", fsync)
        with pytest.raises(Killed):
            tokenize(job(source), directory)
        before = {name: (directory / name).stat().st_mtime_ns for name in contents(directory) if name.endswith(".json")}
        if (directory / "index.json").exists():
            load_index(directory)
        else:
            with pytest.raises(DataError, match=r"there is no .*index\.json.* or let that finish"):
                load_index(directory)
        monkeypatch.setattr(shards.os, "fsync", lambda file: None)
        tokenize(job(source), directory)
        assert contents(directory) == contents(whole)
        assert before.items() <= {name: (directory / name).stat().st_mtime_ns for name in before}.items()


def test_two_processes_killed_at_once_leave_no_worker_and_go_on_to_the_files_of_one(tmp_path):
    """Otherwise workers without a parent would write beside the next run, or shards depend on how many there are."""
    source = tmp_path / "a.jsonl"
    write_jsonl(source, texts(500))
    tokenize(job(source), tmp_path / "whole")
    command = [sys.executable, "-c", RUN, str(source), str(tmp_path / "out")]
    running = subprocess.Popen(command, cwd=Path(__file__).parents[2], start_new_session=True)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "out").glob("0*.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    running.kill()
    running.wait()
    while time.monotonic() < deadline:
        try:
            os.killpg(running.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("workers outlived their parent")
    assert not (tmp_path / "out" / "index.json").exists()
    tokenize(job(source), tmp_path / "out", processes=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_progress_counts_the_shards_that_are_there(source, tmp_path):
    """Otherwise the time left of a resumed run would be wrong."""
    seen = []
    tokenize(job(source), tmp_path / "out", report=lambda done, total: seen.append((done, total)))
    total = sum(file.stat().st_size for file in source.iterdir())
    assert seen[0] == (0, total) and seen[-1] == (total, total) and len(seen) > 5
    (tmp_path / "out" / "index.json").unlink()
    seen.clear()
    tokenize(job(source), tmp_path / "out", report=lambda done, total: seen.append((done, total)))
    assert seen == [(total, total)]


def test_a_folder_of_other_shards_is_refused_with_what_differs(source, tmp_path):
    """Otherwise shards of two corpora or two tokenizers would be mixed."""
    tokenize(job(source), tmp_path / "out")
    tokenize(job(source), tmp_path / "out")  # nothing to do
    write_tokenizer(tmp_path / "mine.json")
    with pytest.raises(DataError, match="made otherwise: tokenizer, shard_bytes differ"):
        tokenize(job(source, tokenizer=str(tmp_path / "mine.json"), shard_bytes=700), tmp_path / "out")
    (source / "new.txt").write_text("new")
    with pytest.raises(DataError, match="made otherwise: input differ"):
        tokenize(job(source), tmp_path / "out")


def test_a_second_writer_of_a_folder_is_refused(source, tmp_path):
    """Otherwise each would delete what the other is writing."""

    def again(done, total):
        with pytest.raises(DataError, match="another process writes to"):
            tokenize(job(source), tmp_path / "out")

    tokenize(job(source), tmp_path / "out", report=again)


def test_an_error_in_a_worker_is_the_users_message_and_finished_shards_stay(source, tmp_path):
    """Otherwise one bad line would lose hours of work, or be a traceback of a pool."""
    bad = source / "y.jsonl"
    bad.write_text('{"text": 3}\n')
    with pytest.raises(DataError, match=r"y\.jsonl, line 1: needed .* string"):
        tokenize(job(source), tmp_path / "out", processes=2)
    assert not (tmp_path / "out" / "index.json").exists()
    with pytest.raises(ConfigError, match="shard_bytes must be at least 1, found 0"):
        job(source, shard_bytes=0)


def test_shards_that_are_not_whole_are_named(source, tmp_path):
    """Otherwise a copy that was cut off would be trained on."""
    tokenize(job(source), tmp_path / "out")
    file = tmp_path / "out" / "00001.tokens"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"00001\.tokens needs \d+ bytes, found \d+"):
        load_index(tmp_path / "out")
    file.unlink()
    with pytest.raises(DataError, match=r"00001\.tokens is missing"):
        load_index(tmp_path / "out")
    (tmp_path / "out" / "index.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(DataError, match="is not what `jaxpar tokenize` writes"):
        load_index(tmp_path / "out")


def test_bytes_are_ids_of_the_byte_tokenizer(source, tmp_path):
    """Otherwise a model trained on shards could not go on with text."""
    assert tokenize(job(source), tmp_path / "out").vocab_size == ByteTokenizer.vocab_size
