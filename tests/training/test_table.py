"""The table of where parameters lie."""

import jax

from jaxpar.training.table import bytes_per_device, sharding_table
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
