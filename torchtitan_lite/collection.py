"""The garbage collector: off for work that allocates many objects and frees none, and blind to what imports left."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Switch cyclic garbage collection off for the block. Any thread; may be nested.

    A table of 20,000 tensors, next to everything that torch has in memory, takes twice as long with it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_imported() -> None:
    """Exclude all objects that there are from collections until the interpreter exits.

    A collection looks at 500,000 objects after the imports of a job, for 0.2 s.
    """
    gc.freeze()
    atexit.unregister(_unfreeze)
    atexit.register(_unfreeze)


def _unfreeze() -> None:
    # The interpreter frees frozen objects too late for nanobind: triton, which torch 2.14 and later use with it, would
    # print its types and functions as leaked. Without triton the exit is faster if they stay frozen.
    if "triton" in sys.modules:
        gc.unfreeze()
