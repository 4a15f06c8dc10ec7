"""Garbage collection is off where it costs, and back on afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from torchtitan_lite.collection import no_collection

EXIT = """
import atexit, gc, sys
{imports}
from torchtitan_lite.collection import freeze_imported
atexit.register(lambda: print(gc.get_freeze_count() > 0))  # Is called after what is registered later.
freeze_imported()
"""


def test_there_is_no_collection_in_the_block_and_its_end_restores_what_was() -> None:
    assert gc.isenabled()
    with no_collection():
        assert not gc.isenabled()
        with no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize(("imports", "stays_frozen"), [("", True), ("sys.modules['triton'] = sys", False)])
def test_what_imports_left_is_unfrozen_at_exit_only_for_triton(imports: str, stays_frozen: bool) -> None:
    code = [sys.executable, "-c", EXIT.format(imports=imports)]
    assert subprocess.run(code, capture_output=True, text=True, check=True).stdout == f"{stays_frozen}\n"
