"""Source lines are read off either notation of XLA's."""

import pytest

from jaxpar.estimate.source_lines import PACKAGE, SourceLines, best_line, model_lines

TABLES = """HloModule m

FileNames
1 "/model/layers.py"
2 "/model/block.py"
3 "{package}/executor/layer.py"

FunctionNames
1 "f"

FileLocations
1 {{file_name_id=3 function_name_id=1 line=30 end_line=30 column=1 end_column=2}}
2 {{file_name_id=2 function_name_id=1 line=20 end_line=20 column=1 end_column=2}}
3 {{file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}}

StackFrames
1 {{file_location_id=1 parent_frame_id={first}}}
2 {{file_location_id=2 parent_frame_id={second}}}
3 {{file_location_id=3 parent_frame_id={third}}}

"""


@pytest.mark.parametrize("offset", [0, 1])
def test_a_stack_is_followed_whether_parents_are_numbered_from_0_or_1(offset):
    """Otherwise findings would name a frame's neighbour in the table."""
    parents = dict(zip(("first", "second", "third"), (offset, 1 + offset, 2 + offset), strict=True))
    frames = SourceLines(TABLES.format(package=PACKAGE, **parents)).frames("metadata={stack_frame_id=3}")
    assert [f.line for f in frames] == [10, 20, 30]
    assert best_line(frames) == "/model/layers.py:10 < /model/block.py:20"


def test_older_programs_have_the_line_at_the_instruction():
    """Otherwise they would have no lines at all."""
    frames = SourceLines("HloModule m\n").frames('metadata={op_name="x" source_file="/model/a.py" source_line=7}')
    assert best_line(frames) == "/model/a.py:7"


def test_what_the_executor_does_itself_is_not_the_models():
    """Otherwise a fetch of weights would be blamed on the script that started the run."""
    frames = SourceLines(TABLES.format(package=PACKAGE, first=1, second=1, third=1)).frames("stack_frame_id=1")
    assert model_lines(frames) == [] and best_line(frames).endswith("executor/layer.py:30")
