"""Which process runs which tests: some take what computes, and the others, next to them, what mostly waits.

A test that waits for a lease, a hang or a lost host needs no processor meanwhile. What each test took when it was last
recorded stands in durations.txt, which `scripts/test_times.py --record` writes: seconds, and processor seconds. A unit
is a file without its long cases, or one long case, for which the fixtures of its file are set up again. One that
computed for less than a third of its time waits. The longest come first. A test that was never recorded is taken to be
short and to compute. For pytest-xdist, as `-n auto`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from scripts.test_times import DURATIONS, ROOT

NUM_COMPUTING = 3
"""Processes for what computes, on two processors: it also waits, for a disk or another rank, a fifth of its time."""
NUM_WAITING, NUM_WAITING_FAST = 2, 1
"""Processes for what waits, in a run of all tests, and of the fast ones: each collects the tests, too."""
WAITING_SECONDS = 1.0
"""A shorter unit is not worth a place among those that wait."""


class Durations:
    """What each unit took: a long case by its id, the other cases of a file together by its path."""

    def __init__(self, text: str) -> None:
        lines = (line.split(maxsplit=2) for line in text.splitlines())
        self._took = {unit: (float(seconds), float(computed)) for seconds, computed, unit in lines}

    @property
    def files_with_waiting(self) -> frozenset[str]:
        """The paths of files that have a unit that waits."""
        return frozenset(file_of(unit) for unit in self._took if self.waits(unit))

    def unit_of(self, test: str) -> str:
        """Return the unit of the test with id `test`."""
        return test if test in self._took else file_of(test)

    def seconds(self, unit: str) -> float:
        """Return how long `unit` took, 0.0 if it was never recorded."""
        return self._took.get(unit, (0.0, 0.0))[0]

    def waits(self, unit: str) -> bool:
        """Return whether `unit` left the processors to others for more than two thirds of its time."""
        seconds, computed = self._took.get(unit, (0.0, 0.0))
        return seconds >= WAITING_SECONDS and computed < seconds / 3


def file_of(test: str) -> str:
    """Return the path of the file of the test with id `test`."""
    return test.partition("::")[0]


RECORDED = Durations(DURATIONS.read_text() if DURATIONS.exists() else "")


def is_for_waiting(worker: str) -> bool:
    """Return whether the process that xdist calls `worker`, such as gw3, takes only what waits."""
    return int(worker.removeprefix("gw")) >= NUM_COMPUTING


class Slots(LoadScopeScheduling):
    """Hands the units out. A process for what waits collected only the files that have such a unit."""

    def __init__(self, config: pytest.Config, log: Any, durations: Durations) -> None:
        config.option.loadscopereorder = False  # the collection has the longest first
        super().__init__(config, log)
        self._durations = durations

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        self.registered_collections[node] = list(collection)

    def schedule(self) -> None:
        # The base class takes the first one for the tests of the run: it must be that of a process with all of them.
        self.registered_collections = dict(
            sorted(self.registered_collections.items(), key=lambda each: is_for_waiting(each[0].gateway.id))
        )
        super().schedule()

    def _check_nodes_have_same_collection(self) -> bool:
        every, *others = self.registered_collections.values()
        assert all(set(every) >= set(part) for part in others), "a process collected what no other one has"
        return True

    def _split_scope(self, nodeid: str) -> str:
        return self._durations.unit_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        # The sort is stable: of each kind, the longest stay first.
        ordered = sorted(self.workqueue, key=self._durations.waits)
        if is_for_waiting(node.gateway.id):
            ordered = [unit for unit in ordered if self._durations.waits(unit)]
        if not ordered:
            node.shutdown()
            return
        self.workqueue.move_to_end(ordered[0], last=False)
        super()._assign_work_unit(node)


class Collection:
    """In a process for what waits, its part of the tests."""

    def __init__(self, worker: str) -> None:
        self._files = RECORDED.files_with_waiting if is_for_waiting(worker) else None

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Skip a file that has nothing for this process."""
        if self._files is None or collection_path.suffix != ".py":
            return None
        return collection_path.relative_to(ROOT).as_posix() not in self._files or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest units first: a long last one would delay the end."""
    items.sort(key=lambda item: (-RECORDED.seconds(RECORDED.unit_of(item.nodeid)), file_of(item.nodeid)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes run the tests; a run of some files needs none that wait."""
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        return NUM_COMPUTING
    return NUM_COMPUTING + (NUM_WAITING_FAST if "not slow" in config.option.markexpr else NUM_WAITING)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Slots:
    return Slots(config, log, RECORDED)
