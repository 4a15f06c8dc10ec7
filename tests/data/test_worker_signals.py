"""Workers of a data loader survive the preemption signals, which make the ranks save and leave."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.resumed_loaders import OF_TORCHDATA
from tests.descriptors import num_open
from tests.forked import run_code
from tests.processes import wait_until
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.data.adapters import StatefulDataLoaderAdapter

pytestmark = OF_TORCHDATA

SIGNALS = [signal.Signals[name] for name in Checkpoint.preemption_signals]


@pytest.fixture(autouse=True)
def signals_have_their_default_handlers() -> Iterator[None]:
    """Restore the default handlers: a test run that a shell starts in the background ignores SIGINT."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS if number != signal.SIGINT}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, action in before.items():
        signal.signal(number, action)


class Workers(torch.utils.data.Dataset[int]):
    """64 samples, each the pid of the process that made it."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return os.getpid()


class WritesIgnoredSignals:
    """A `worker_init_fn` that writes the names of the ignored signals to a file of each worker in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, worker: int) -> None:
        ignored = [number.name for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
        (self.folder / str(worker)).write_text(" ".join(ignored))


def loader(**options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Workers(), batch_size=2, **options)


def test_signalled_workers_continue_to_the_last_batch() -> None:
    batches = iter(StatefulDataLoaderAdapter(loader(num_workers=2), rank=0, num_ranks=1))
    workers = {*next(batches).tolist(), *next(batches).tolist()}
    assert len(workers - {os.getpid()}) == 2
    for pid in workers:
        for number in SIGNALS:
            os.kill(pid, number)
    rest = [pid for batch in batches for pid in batch.tolist()]
    assert len(rest) == 60 and set(rest) == workers


def test_workers_ignore_only_the_preemption_signals(tmp_path: Path) -> None:
    given = loader(num_workers=1, worker_init_fn=WritesIgnoredSignals(tmp_path))
    list(StatefulDataLoaderAdapter(given, rank=0, num_ranks=1, preemption_signals=["SIGUSR1"]))
    assert (tmp_path / "0").read_text() == "SIGUSR1"


def test_the_loaders_own_init_function_is_called_after_signals_are_ignored(tmp_path: Path) -> None:
    given = loader(num_workers=2, worker_init_fn=WritesIgnoredSignals(tmp_path))
    list(StatefulDataLoaderAdapter(given, rank=0, num_ranks=1))
    ignored = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert ignored == dict.fromkeys("01", "SIGTERM SIGUSR1 SIGINT")


def test_workers_end_with_their_loader() -> None:
    given = loader(num_workers=2, persistent_workers=True)
    batches = iter(StatefulDataLoaderAdapter(given, rank=0, num_ranks=1))
    workers = {*next(batches).tolist(), *next(batches).tolist()}
    del batches, given
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_workers_end_with_a_loader_that_a_collection_of_garbage_ends() -> None:
    given = loader(num_workers=2)
    batches = iter(StatefulDataLoaderAdapter(given, rank=0, num_ranks=1))
    workers = {*next(batches).tolist(), *next(batches).tolist()}
    cycle: list[Any] = [batches]
    cycle.append(cycle)
    del batches, given, cycle
    gc.collect()
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_loaders_that_are_gone_leave_no_descriptors_open() -> None:
    def use() -> None:
        adapter = StatefulDataLoaderAdapter(loader(num_workers=2), rank=0, num_ranks=1)
        for _ in range(2):
            next(iter(adapter))

    use()
    gc.collect()
    before = num_open()
    for _ in range(3):
        use()
    gc.collect()

    def are_closed() -> bool:
        multiprocessing.active_children()  # Joins those that have ended; one that is still ending has a descriptor.
        return num_open() <= before

    wait_until(are_closed)


def test_the_init_function_can_be_pickled_for_a_spawned_worker(tmp_path: Path) -> None:
    given = loader(num_workers=2, worker_init_fn=WritesIgnoredSignals(tmp_path))
    StatefulDataLoaderAdapter(given, rank=0, num_ranks=1, preemption_signals=[])
    pickle.loads(pickle.dumps(given.worker_init_fn))(7)
    assert (tmp_path / "7").exists()


def test_this_process_handles_signals_as_before() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    list(StatefulDataLoaderAdapter(loader(num_workers=0), rank=0, num_ranks=1))
    assert [signal.getsignal(number) for number in SIGNALS] == before


LEFT_IN_THE_MIDDLE = """
import sys, warnings
warnings.simplefilter("ignore")
from tests.data.test_worker_signals import loader
from torchtitan_lite.data.adapters import StatefulDataLoaderAdapter

adapter = StatefulDataLoaderAdapter(loader(num_workers=2), rank=0, num_ranks=1)
batches = iter(adapter)
print(*{*next(batches).tolist(), *next(batches).tolist()}, flush=True)
sys.kept = batches  # keeps the iterator until the exit, as a main script does
"""

# As a sweep does it, whose objects of one run refer to one another.
COLLECTED_IN_A_THREAD = (
    LEFT_IN_THE_MIDDLE.replace("sys.kept = batches", "cycle = [batches]; cycle.append(cycle)")
    + """
import gc, threading
del adapter, batches, cycle
thread = threading.Thread(target=gc.collect)
thread.start()
thread.join()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("code", [LEFT_IN_THE_MIDDLE, COLLECTED_IN_A_THREAD])
def test_a_process_that_leaves_its_loop_in_the_middle_of_an_epoch_ends_with_its_workers(
    code: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    process = run_code(code, log, dict(os.environ))
    try:
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
    for pid in map(int, log.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


class WithoutState(torch.utils.data.IterableDataset[int]):
    """Fails before the first batch: torchdata reads the state of a dataset when its worker begins."""

    def __iter__(self) -> Iterator[int]:
        yield from range(8)

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state today")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_workers_that_fail_before_their_first_batch_are_ended() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    before = multiprocessing.active_children()
    adapter = StatefulDataLoaderAdapter(StatefulDataLoader(WithoutState(), num_workers=2), rank=0, num_ranks=1)
    with pytest.raises(ValueError, match="no state today") as kept:  # Its traceback keeps the iterator.
        iter(adapter)
    assert set(multiprocessing.active_children()) <= set(before) and kept
