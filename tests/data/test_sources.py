import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from jaxpar.data.sources import Sources, pieces_of, read_piece
from jaxpar.errors import BackendError, DataError
from tests.data.corpora import texts, write_jsonl


def read(path, piece_bytes=100, key="text") -> list[list[str]]:
    """The texts of each piece."""
    pieces = pieces_of(Sources((str(path),), key=key), piece_bytes)
    return [[text.decode() for text in read_piece(piece, key)] for piece in pieces]


def flat(parts) -> list[str]:
    return [text for part in parts for text in part]


def test_lines_belong_to_one_piece_wherever_the_file_is_cut(tmp_path):
    """Otherwise a line at a border would be read twice, or by nobody."""
    write_jsonl(tmp_path / "a.jsonl", texts(9))
    size = (tmp_path / "a.jsonl").stat().st_size
    for piece_bytes in (1, 17, 64, 100, size - 1, size):
        assert flat(read(tmp_path, piece_bytes)) == texts(9)
    line = len((tmp_path / "a.jsonl").read_bytes().split(b"\n")[0]) + 1
    assert flat(read(tmp_path, line)) == texts(9)  # cut exactly behind a line
    assert len(read(tmp_path, 100)) > 5


def test_a_malformed_line_in_a_later_piece_is_named_by_its_number_in_the_file(tmp_path):
    """Otherwise one bad line among millions could not be found."""
    write_jsonl(tmp_path / "a.jsonl", texts(9))
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"body": "x"}\n')
    with pytest.raises(DataError, match=r'a\.jsonl, line 10: .*string under "text", found the keys'):
        read(tmp_path)


def test_row_groups_of_a_parquet_file_are_pieces(tmp_path):
    """Otherwise a large table could not be read by several processes, or in little memory."""
    pq.write_table(pa.table({"text": texts(10), "n": range(10)}), tmp_path / "a.parquet", row_group_size=4)
    assert [len(part) for part in read(tmp_path)] == [4, 4, 2]
    assert flat(read(tmp_path)) == texts(10)


def test_a_saved_dataset_is_read_in_pieces(tmp_path):
    """Otherwise what Hugging Face's package saves would have to be converted first."""
    Dataset.from_dict({"id": range(10), "body": texts(10)}).select(range(9, -1, -1)).save_to_disk(tmp_path / "saved")
    assert flat(read(tmp_path / "saved", 300, key="body")) == texts(10)[::-1]
    assert len(read(tmp_path / "saved", 300, key="body")) > 2
    with pytest.raises(DataError, match="has no column 'text'; it has id, body"):
        read(tmp_path / "saved")


def test_the_splits_of_a_saved_dataset_are_named(tmp_path):
    """Otherwise all of them, or none, would be read without notice."""
    part = Dataset.from_dict({"text": texts(2)})
    DatasetDict({"train": part, "test": part}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"holds the splits train, test: name one of them, such as .*saved/train"):
        read(tmp_path / "saved")
    assert flat(read(tmp_path / "saved" / "train")) == texts(2)


def test_a_folder_of_all_formats_is_read_once_in_one_order(tmp_path):
    """Otherwise shards would depend on the file system, or hold a text twice."""
    write_jsonl(tmp_path / "b.jsonl", ["b1", "b2"])
    (tmp_path / "c.txt").write_text("c")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    sources = Sources((str(tmp_path), str(tmp_path / "c.txt")))
    pieces = pieces_of(sources, 1000)
    assert [text for piece in pieces for text in read_piece(piece, "text")] == [b"a", b"b1", b"b2", b"c"]


def test_tables_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    """Otherwise it would be a traceback out of another package."""
    (tmp_path / "a.parquet").write_text("no table")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
        read(tmp_path)
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="needed text in column 'text', found a NoneType"):
        read(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BackendError, match=r"pip install 'jaxpar\[parquet\]'"):
        read(tmp_path)


def test_an_empty_folder_says_which_suffixes_were_looked_for(tmp_path):
    """Otherwise nobody would know why nothing was found."""
    with pytest.raises(DataError, match=r"no document found .* names that end in .*\.parquet"):
        read(tmp_path)
