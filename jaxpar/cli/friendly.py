"""A user's mistake ends with one message and status 2, never with a traceback; Ctrl-C with status 130."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from jaxpar.errors import JaxparError


@contextmanager
def friendly_errors() -> Iterator[None]:
    try:
        yield
    except JaxparError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(130) from None
