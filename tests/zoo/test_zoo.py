"""Every feature of torch, and every two of them together, resumes exactly or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.checkpoint.state.optimizers_of_torch import optimizers_of_torch
from tests.examples import mostly_slow
from tests.ranks import Ranks
from tests.zoo.apart import POSITIONS
from tests.zoo.between import COLUMNS as COLUMNS_BETWEEN
from tests.zoo.between import COLUMNS_OF_LIBRARIES, cells_between, find_between, find_entry, rows_between
from tests.zoo.cells import KINDS, Cell, Group, columns, find, groups, pairs
from tests.zoo.library_record import RECORD, read, write
from tests.zoo.library_runs import LIBRARIES, names_of
from tests.zoo.loaders import COLUMNS, LOOPS, Loop, find_loop
from tests.zoo.models import ALONE
from tests.zoo.outcome import DIFFERS, EQUAL, REFUSED, WARNED, Outcome
from tests.zoo.page import PAGE, of_libraries, render, with_libraries
from tests.zoo.pairs import covering, pairs_of, with_each_entry
from tests.zoo.run import Case
from tests.zoo.schedules import RECIPES, schedulers_of_torch

SINGLE_ENTRIES = [
    *(Case(scheduler=name) for name in KINDS["scheduler"]),
    *(Case(model=name) for name in KINDS["model"]),
    *(Case(extra=name) for name in KINDS["extra"]),
]
LIKE_ANOTHER = ("HSDP", "TP x FSDP2", "FSDP1 with a mesh", "module.compile")

all_pairs = cache(pairs)


def _mark(wrapper: str, part: str) -> pytest.MarkDecorator:
    return pytest.mark.exhaustive if wrapper in LIKE_ANOTHER or part == "the others" else pytest.mark.slow


@pytest.fixture(scope="module")
def group(two_ranks: Ranks, four_ranks: Ranks) -> Iterator[Group]:
    """Return groups of ranks by their number."""
    with groups() as own:
        shared = {2: two_ranks, 4: four_ranks}
        yield lambda size, resumes: own(size, resumes) if resumes or size == 1 else shared[size]


def test_every_scheduler_of_torch_has_a_recipe() -> None:
    assert not [name for name in schedulers_of_torch() if name not in RECIPES]


@pytest.mark.parametrize("case", mostly_slow(SINGLE_ENTRIES, kept=SINGLE_ENTRIES[::4]), ids=str)
def test_in_one_process_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path, group: Group, case: Case) -> None:
    outcome = find(Cell(case), tmp_path, group)
    assert outcome.kind in ((REFUSED, WARNED) if case.model in ALONE else (EQUAL,)), outcome


def test_the_rows_with_each_entry_leave_out_those_that_add_none() -> None:
    assert with_each_entry([("a", "x"), ("b", "x"), ("a", "x"), ("b", "y"), ("a", "y")]) == [0, 1, 3]


def test_the_rows_have_every_pair_that_fits() -> None:
    kinds = {"a": "01234", "b": "xyz", "c": "pq", "d": "mn"}
    rows = covering(kinds, lambda row: row[:2] != ("0", "x"))
    held = {pair for row in rows for pair in pairs_of(row)}
    every = sum(len(a) * len(b) for i, a in enumerate(kinds.values()) for b in list(kinds.values())[i + 1 :])
    assert len(held) == every - 1
    assert len(rows) < 25


def shape(page: str) -> list[str]:
    """Return the lines of a page without the outcomes of cells, their sentences and all numbers."""
    rows = [
        f"{line.split(' | ')[0]} {line.count(' | ')}" if line.startswith("| ") else re.sub(r"\d+(\.\d+)*", "N", line)
        for line in page.splitlines()
        if not re.match(r"\d+\. ", line)
    ]
    return re.sub(r"\n{2,}", "\n", "\n".join(rows)).partition("## Pairs")[0].splitlines()


def test_the_page_is_the_one_that_its_command_writes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    written_with = re.findall(r"with torch (\S+) on CPUs", page)
    if written_with != [torch.__version__.partition("+")[0]]:
        pytest.skip(f"this torch has other classes than {written_with}, with which the page was written")
    equal = Outcome(EQUAL)
    cells = {k: {entry: dict.fromkeys(columns(k, entry), equal) for entry in entries} for k, entries in KINDS.items()}
    between = rows_between(dict.fromkeys(cells_between(), equal))
    loops = {str(loop): dict.fromkeys(COLUMNS, equal) for loop in LOOPS}
    assert shape(page) == shape(render(cells, [equal], between, loops)), "write the page again: python -m tests.zoo"
    names = [kind.__name__ for kind in optimizers_of_torch()] + schedulers_of_torch()
    assert not [name for name in names if not re.search(rf"^\| {name}\b", page, re.MULTILINE)]


def test_no_cell_of_the_page_differs_and_each_that_is_not_equal_has_a_reason() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert DIFFERS not in page
    assert not re.findall(r"\| (?:refused|warned|not offered by torch) (?!\()", page)


def test_the_page_ends_with_the_record_of_other_libraries_which_has_each_of_them() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.endswith(f"\n\n{of_libraries(read())}"), "write it again: python -m tests.zoo.libraries PACKAGE"
    assert with_libraries(page, read()) == page
    assert {*read()} == {*LIBRARIES}


def test_the_record_of_other_libraries_is_written_as_it_was_read(tmp_path: Path) -> None:
    write(read(), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == RECORD.read_bytes()


def test_no_cell_of_other_libraries_differs_and_each_that_is_not_equal_has_a_reason() -> None:
    for name, package in read().items():
        assert package.torch and package.date and (package.not_run or package.outcomes), name
        for kind, row in package.outcomes.items():
            assert [*row] == [*COLUMNS_OF_LIBRARIES], (name, kind)
            for outcome in row.values():
                assert outcome.kind != DIFFERS and (outcome.kind == EQUAL) == (not outcome.why), (name, kind, outcome)


@pytest.mark.slow
def test_an_optimizer_of_any_module_is_found_built_and_resumed(tmp_path: Path, group: Group) -> None:
    package = "tests.checkpoint.state.low_bits"
    assert names_of(0, package) == ["Momentum8"]
    found = find_entry(package, "Momentum8", tmp_path, group)
    assert [outcome.kind for outcome in found.values()] == [EQUAL] * 4


@pytest.mark.parametrize(
    ("loop", "column", "kind"),
    [
        (Loop(), "in an epoch", WARNED),
        (Loop(), "at its end", EQUAL),
        (Loop(is_early=True), "in an epoch", EQUAL),
        (Loop(has_generator=True), "in an epoch", EQUAL),
        (Loop("shuffled", is_early=True), "in an epoch", WARNED),
    ],
    ids=str,
)
def test_a_seed_that_a_loader_drew_after_the_load_is_warned_of_in_an_epoch_and_only_there(
    tmp_path: Path, loop: Loop, column: str, kind: str
) -> None:
    assert find_loop(loop, COLUMNS[column], tmp_path).kind == kind


@pytest.mark.slow
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_each_loop_over_a_loader_without_a_state_is_equal_in_silence_or_warned_of(
    tmp_path: Path, loop: Loop, column: str
) -> None:
    outcome = find_loop(loop, COLUMNS[column], tmp_path)
    assert outcome.kind != DIFFERS, outcome


# 275 cells on two ranks take two minutes of computing: with --all each trick is in one of the five columns.
@pytest.mark.parametrize(
    ("world_size", "at"),
    [
        pytest.param(2, (0,), marks=pytest.mark.slow, id="2 ranks, one column"),
        pytest.param(2, (1, 2, 3, 4), marks=pytest.mark.exhaustive, id="2 ranks, the other columns"),
        pytest.param(4, range(len(COLUMNS_BETWEEN)), marks=pytest.mark.exhaustive, id="4 ranks"),
    ],
)
def test_what_people_do_between_ranks_is_equal_refused_or_warned_of(
    tmp_path_factory: pytest.TempPathFactory, group: Group, world_size: int, at: Sequence[int]
) -> None:
    every = cells_between((world_size,), positions=range(0, POSITIONS, 19))
    tricks = list(dict.fromkeys(cell.trick for cell in every))
    turned = [(tricks.index(cell.trick) + COLUMNS_BETWEEN.index(cell.column)) % len(COLUMNS_BETWEEN) for cell in every]
    cells = [cell for cell, column in zip(every, turned, strict=True) if column in at]
    found = {cell: find_between(cell, tmp_path_factory.mktemp("cell"), group) for cell in cells}
    assert not [f"{cell}: {outcome}" for cell, outcome in found.items() if outcome.kind == DIFFERS]


# Computing takes four minutes. With --all each entry runs without a wrapper, and a sixth of them with each wrapper, but
# for those that are like another one and cost most: of four ranks, and FSDP1, whose cases need new processes.
@pytest.mark.parametrize(
    ("wrapper", "part"),
    [
        *(
            pytest.param(each, part, marks=_mark(each, part))
            for each in KINDS["wrapper"]
            if each != "FSDP1"  # is always refused, so no pair has it
            for part in (["each entry"] if each == "plain" else ["a sixth", "the others"])
        ),
        pytest.param("plain", "the other pairs", marks=pytest.mark.exhaustive),
    ],
)
def test_any_two_entries_together_resume_exactly_or_are_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, group: Group, wrapper: str, part: str
) -> None:
    every = [case for case in all_pairs() if case.wrapper == wrapper]
    if wrapper == "plain":
        few = [every[number] for number in with_each_entry([tuple(map(str, astuple(case))) for case in every])]
    else:
        few = every[::6]
    cases = few if part in ("each entry", "a sixth") else [case for case in every if case not in few]
    found = {case: find(Cell(case), tmp_path_factory.mktemp("pair"), group) for case in cases}
    assert not [f"{case}: {outcome}" for case, outcome in found.items() if outcome.kind == DIFFERS]


# Each is a save and a load on two groups of ranks. All take a minute on two cores; with --all only the wrappers run.
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind == "wrapper" else pytest.mark.exhaustive) for kind in KINDS],
)
def test_the_state_loaded_on_other_processes_equals_the_saved_state(
    tmp_path_factory: pytest.TempPathFactory, group: Group, kind: str
) -> None:
    cells = [cell for entry in KINDS[kind] for cell in columns(kind, entry).values() if cell.loaded_under]
    found = {cell: find(cell, tmp_path_factory.mktemp("cell"), group) for cell in cells}
    assert not [f"{cell}: {outcome}" for cell, outcome in found.items() if outcome.kind == DIFFERS]
