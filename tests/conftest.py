"""Settings for all tests: hypothesis has no deadlines, variables of a launcher are removed, no keeper is started."""

import gc
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import keepers
from tests.disks import small_disk, wait_for_no_server
from tests.examples import THOROUGH
from tests.keepers import memory_tier as memory_tier  # fixtures of every test
from tests.ranks import alone as alone
from tests.ranks import four_processes as four_processes
from tests.ranks import four_ranks as four_ranks
from tests.ranks import two_ranks as two_ranks
from tests.records import record as record
from torchtitan_lite import faults
from torchtitan_lite.collection import freeze_imported

# No deadline: it would assert a time, which fails on a shared machine. CI always draws the same examples.
settings.register_profile("ours", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.register_profile(THOROUGH, settings.get_profile("ours"))
settings.load_profile("ours")

for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)
# No job of a test leaves a keeper behind, unless the test is about it: the fixture `memory_tier`.
keepers.turn_off()
wait_for_no_server()
# A shell that starts the tests in the background has them ignore Ctrl-C, and with them every program that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first: each process runs one file at a time, so a long last one would delay the end."""
    num_tests = Counter(item.path for item in items)
    kinds: dict[Path, int] = {}
    for item in items:
        kinds[item.path] = min(_kind(item), kinds.get(item.path, _kind(item)))
    items.sort(key=lambda item: (kinds[item.path], -num_tests[item.path], item.path))


def _kind(item: pytest.Item) -> int:
    """Return 0 for a test that starts jobs or is slow, 1 for one that needs ranks, 2 for others."""
    if item.path.parent.name in ("e2e", "resharding") or item.get_closest_marker("slow"):
        return 0
    return 1 if {"two_ranks", "four_ranks"} & set(getattr(item, "fixturenames", ())) else 2


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_collect() -> None:
    """Exclude what was imported so far from collections: a load collects twice, which took most of a small test."""
    gc.collect()
    freeze_imported()


@pytest.fixture(autouse=True)
def transformers_logs_errors_only() -> None:
    """Undo what a test before this one did to the log of transformers: its handler has that test's stderr, closed."""
    if "transformers" in sys.modules:
        sys.modules["transformers"].logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def no_faults_stay() -> Iterator[None]:
    yield
    faults.install("", rank=0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB, which is less than a checkpoint of a job needs."""
    with small_disk(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder in memory, if the system has one: for tests that make thousands of folders and do not sync."""
    in_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=in_memory if os.access(in_memory, os.W_OK) else None) as folder:
        yield Path(folder)
