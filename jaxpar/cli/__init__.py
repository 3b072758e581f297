"""The command line."""

from jaxpar.cli.entry import main

__all__ = ["main"]
