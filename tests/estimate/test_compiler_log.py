"""What XLA logs while it compiles is passed on, but for one message as long as the cluster is large."""

import os

from jaxpar.estimate.compiler_log import filtered


def test_all_but_the_noise_is_passed_on_and_nothing_blocks(capfd):
    """Otherwise a real warning is lost, or a message longer than a pipe holds the compiler up for ever."""
    with filtered():
        os.write(2, b"before\n")
        os.write(2, b"E1 gpu_compiler.cc] XLA:GPU only supports IOTA device assignment. " + b"x" * 200_000 + b"\n")
        os.write(2, b"after")
    os.write(2, b" all\n")
    assert capfd.readouterr().err == "before\nafter all\n"
