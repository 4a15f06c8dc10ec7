"""Which process runs which test (`tests/slots.py`), from what tests took (`scripts/test_times.py`)."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from scripts.test_times import DURATIONS, ROOT, Took, durations, parse, setups, sums, table
from tests.slots import RECORDED, Durations, Slots, file_of, is_for_waiting
from tests.times import processor_seconds

TESTS = [
    Took("tests/store/test_a.py::test_short", 0.5, 0.5, {"filled": 0.4}),
    Took("tests/store/test_a.py::test_other[1 2]", 1.0, 0.75, {"filled": 0.5}),
    Took("tests/store/test_a.py::test_hangs[of 2 ranks]", 30.0, 2.0),
    Took("tests/checkpoint/saving/test_b.py::test_computes", 25.0, 24.0),
]
DURATIONS_OF_TESTS = Durations(durations(TESTS))


def test_a_long_case_is_a_unit_and_the_others_of_its_file_are_one() -> None:
    units = [DURATIONS_OF_TESTS.unit_of(test.test) for test in TESTS]
    assert units == [TESTS[0].file, TESTS[0].file, TESTS[2].test, TESTS[3].test]
    assert [DURATIONS_OF_TESTS.seconds(unit) for unit in units] == [1.5, 1.5, 30.0, 25.0]


def test_what_computes_for_less_than_a_third_of_its_time_waits() -> None:
    assert [DURATIONS_OF_TESTS.waits(DURATIONS_OF_TESTS.unit_of(test.test)) for test in TESTS] == [
        False,
        False,
        True,
        False,
    ]
    assert DURATIONS_OF_TESTS.files_with_waiting == {"tests/store/test_a.py"}


def test_a_test_that_was_never_recorded_is_a_short_one_of_its_file_that_computes() -> None:
    unit = DURATIONS_OF_TESTS.unit_of("tests/test_new.py::test_new")
    assert (unit, DURATIONS_OF_TESTS.seconds(unit), DURATIONS_OF_TESTS.waits(unit)) == ("tests/test_new.py", 0.0, False)


def test_the_first_three_processes_take_what_computes() -> None:
    assert [is_for_waiting(f"gw{number}") for number in range(5)] == [False, False, False, True, True]


@dataclass
class Process:
    """What xdist knows of a process; `items` are the tests that it was handed, by their numbers in its collection."""

    number: int
    items: list[int] = field(default_factory=list)
    shutting_down: bool = False

    __hash__ = object.__hash__

    @property
    def gateway(self) -> SimpleNamespace:
        return SimpleNamespace(id=f"gw{self.number}")

    def send_runtest_some(self, items: list[int]) -> None:
        self.items += items

    def shutdown(self) -> None:
        self.shutting_down = True


def test_each_test_runs_once_and_what_waits_next_to_what_computes_whoever_collected_first() -> None:
    short = [f"tests/test_{number}.py::test_{case}" for number in range(9) for case in range(5)]
    hangs = [f"tests/test_hangs.py::test_{number}" for number in range(6)]
    every = Durations("".join(f"30 1 {test}\n" for test in hangs))
    options = SimpleNamespace(loadscopereorder=True)
    config = SimpleNamespace(getvalue=lambda name: ["popen"] * 5, option=options)
    slots = Slots(cast(Any, config), None, every)
    processes = [Process(number) for number in (3, 0, 4, 2, 1)]
    for process in processes:
        slots.add_node(cast(Any, process))
    for process in processes:
        slots.add_node_collection(cast(Any, process), hangs if process.number >= 3 else [*short, *hangs])

    slots.schedule()
    ran: dict[int, list[str]] = {}
    while busy := [process for process in processes if process.items]:
        for process in busy:
            item = process.items.pop(0)
            ran.setdefault(process.number, []).append(slots.registered_collections[cast(Any, process)][item])
            slots.mark_test_complete(cast(Any, process), item)

    assert sorted(itertools.chain(*ran.values())) == sorted([*short, *hangs])
    assert {*ran[3], *ran[4]} <= {*hangs} and len(ran[3]) == len(ran[4])
    assert {*ran[0], *ran[1], *ran[2]} >= {*short}


def test_the_recorded_units_are_those_of_files_that_are_there() -> None:
    lines = DURATIONS.read_text().splitlines()
    gone = {file for line in lines if not (ROOT / (file := file_of(line.split(maxsplit=2)[2]))).exists()}
    assert not gone, "run scripts/test_times.py --record"
    assert RECORDED.files_with_waiting


def test_sums_are_by_folder_with_the_rooms_of_checkpoint_apart_and_the_largest_first() -> None:
    found = sums(TESTS, "folder")
    assert list(found) == ["tests/store", "tests/checkpoint/saving"]
    assert (found["tests/store"].tests, found["tests/store"].seconds, found["tests/store"].waited) == (3, 31.5, 28.25)
    assert "| tests/store | 3 | 32 | 3 | 28 |" in table(TESTS).splitlines()


def test_a_set_up_is_counted_each_time() -> None:
    assert (setups(TESTS)["filled"].tests, setups(TESTS)["filled"].seconds) == (2, 0.9)


def test_a_record_has_a_test_a_line() -> None:
    line = {"test": TESTS[0].test, "seconds": 0.5, "computed": 0.5, "fixtures": {"filled": 0.4}}
    assert parse([json.dumps(line)]) == TESTS[:1]


def test_the_time_of_a_process_is_with_that_of_its_children() -> None:
    before = processor_seconds(os.getpid())
    busy = "import time\nwhile time.process_time() < 0.4: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    assert processor_seconds(os.getpid()) - before >= 0.3  # the system cuts each part to hundredths
