"""Settings for all tests: hypothesis has no deadlines, variables of a launcher are removed, no keeper is started."""

import gc
import os
import random
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import keepers, slots, times
from tests.disks import small_disk, wait_for_no_server
from tests.examples import PARTS
from tests.keepers import memory_tier as memory_tier  # fixtures of every test
from tests.ranks import alone as alone
from tests.ranks import four_processes as four_processes
from tests.ranks import four_ranks as four_ranks
from tests.ranks import two_ranks as two_ranks
from tests.records import record as record
from tests.slots import pytest_collection_modifyitems as pytest_collection_modifyitems  # hooks
from tests.slots import pytest_xdist_auto_num_workers as pytest_xdist_auto_num_workers
from tests.slots import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler
from torchtitan_lite import faults
from torchtitan_lite.collection import freeze_imported

SEED_IN_CI = 1000

# No deadline: it would assert a time, which fails on a shared machine. CI always draws the same examples.
settings.register_profile("ours", deadline=None, print_blob=True, derandomize="CI" in os.environ)
for profile in PARTS:
    settings.register_profile(profile, settings.get_profile("ours"))
settings.load_profile("ours")

for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)
# No job of a test leaves a keeper behind, unless the test is about it: the fixture `memory_tier`.
keepers.turn_off()
wait_for_no_server()
# A shell that starts the tests in the background has them ignore Ctrl-C, and with them every program that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "of the runs that are drawn at random; in CI always the same one, otherwise another one each time"
    parser.addoption("--seed", type=int, default=SEED_IN_CI if "CI" in os.environ else None, help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Draw the seed, record what each test takes, and let each of several processes take its kind of tests."""
    if config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(10**6)
    times.record(config)
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(slots.Collection(config.workerinput["workerid"]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect the tests without Python's collector of garbage, which found none and took a seventh of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is not None and not sys.modules["torch"].cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_report_header(config: pytest.Config) -> str:
    return f"drawn runs: --seed {config.option.seed}"


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
def numbers_drawn_do_not_depend_on_earlier_tests() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)  # torch.manual_seed formats the stack thrice


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
