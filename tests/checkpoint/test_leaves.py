"""What does not fit is said leaf by leaf."""

from jaxpar.checkpoint.leaves import by_name, differences, from_names


def test_missing_unexpected_shape_and_dtype_are_each_named():
    """Otherwise a leaf would be left at its random start, or dropped, in silence."""
    found = {"same": [[2], "float32"], "gone": [[], "int32"], "shape": [[2, 3], "float32"], "type": [[1], "bfloat16"]}
    needed = {"same": [[2], "float32"], "new": [[4], "float32"], "shape": [[2, 4], "float32"], "type": [[1], "float32"]}
    assert differences(found, needed) == [
        "new: missing in the checkpoint, needed float32[4]",
        "gone: int32[] in the checkpoint, not in the model",
        "shape: needed float32[2, 4], found float32[2, 3]",
        "type: needed float32[1], found bfloat16[1]",
    ]
    assert differences(found, found) == []


def test_a_long_list_ends_with_how_many_more():
    """Otherwise the wrong model would print thousands of lines, or hide how many there are."""
    lines = differences({}, {f"leaf{i}": [[1], "float32"] for i in range(50)})
    assert len(lines) == 21 and lines[-1] == "... and 30 more leaves"


def test_names_lead_back_to_the_same_tree():
    """Otherwise two leaves could be exchanged."""
    tree = {"b": (1, [2, 3]), "a.c": {"d": 4}}
    names = by_name(tree)
    assert names == {"a.c/d": 4, "b/0": 1, "b/1/0": 2, "b/1/1": 3}
    assert from_names(dict(reversed(names.items())), tree) == tree
