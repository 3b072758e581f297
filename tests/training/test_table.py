"""The table of where parameters lie."""

import jax

from jaxpar.training.table import bytes_per_device, read_sharding_table, sharding_table
from tests.training.tiny import make_run


def test_every_parameter_stands_in_it_with_its_split_and_its_bytes():
    """Otherwise one could not see before a run what is replicated by mistake."""
    run = make_run("data=4", zero=3)
    lines = {line.split("  ")[0]: line for line in sharding_table(run).splitlines()}
    assert run.structure.params.keys() <= lines.keys()
    # 31 x 16 float32: the embed dim divides over four devices.
    assert lines["embedding"].split() == ["embedding", "[vocab,", "embed]", *["[31,", "16]"] * 2, "1:", "data", "496"]
    assert (
        "[layer, embed, mlp]" in lines["blocks.mlp.up.kernel"] and "[1, 1, 1, 16, 16]" in lines["blocks.mlp.up.kernel"]
    )


def test_the_table_is_read_back_by_columns():
    """Otherwise a page that shows it would put a cell under another column's name."""
    run = make_run("data=4", zero=3)
    head, rows, foot = read_sharding_table(sharding_table(run))
    cells = {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[1:]}
    assert cells.keys() == run.structure.params.keys()
    assert (cells["embedding"]["split"], cells["embedding"]["bytes/device"]) == ("1: data", "496")
    assert cells["blocks.mlp.up.kernel"]["logical names"] == "[layer, embed, mlp]"
    assert "4 devices" in head and foot.startswith("parameters: ") and len(foot.splitlines()) == 2


def test_the_bytes_are_those_that_a_device_really_holds():
    """Otherwise the table would promise memory that is not there."""
    run = make_run("data=4", zero=3)
    state = run.init()
    device = run.mesh.devices.flat[1]
    held = sum(
        shard.data.nbytes
        for x in jax.tree.leaves(state.params)
        for shard in x.addressable_shards
        if shard.device == device
    )
    assert bytes_per_device(run.abstract_state.params) == held
