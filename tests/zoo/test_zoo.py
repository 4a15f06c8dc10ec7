"""What torch has comes back as it was, or is refused by name: every entry, and every two of them together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.ranks import Ranks
from tests.zoo.cells import KINDS, Cell, Group, columns, find, groups, pairs
from tests.zoo.outcome import DIFFERS, EQUAL, REFUSED
from tests.zoo.page import PAGE
from tests.zoo.pairs import covering, pairs_of
from tests.zoo.run import Case
from tests.zoo.schedules import RECIPES, schedulers_of_torch
from tests.zoo.wrappers import FSDP2, WRAPPERS

ALONE = [
    *(Case(scheduler=name) for name in KINDS["scheduler"]),
    *(Case(model=name) for name in KINDS["model"]),
    *(Case(extra=name) for name in KINDS["extra"]),
]


all_pairs = cache(pairs)


@pytest.fixture(scope="module")
def group(two_ranks: Ranks, four_ranks: Ranks) -> Iterator[Group]:
    """Ranks by their number."""
    with groups() as own:
        yield lambda size: {2: two_ranks, 4: four_ranks}.get(size) or own(size)


def test_every_scheduler_of_torch_has_a_recipe() -> None:
    assert not [name for name in schedulers_of_torch() if name not in RECIPES]


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_in_one_process_it_goes_on_as_if_it_had_never_stopped(tmp_path: Path, group: Group, case: Case) -> None:
    outcome = find(Cell(case), tmp_path, group)
    assert outcome.kind == EQUAL, outcome


def test_the_rows_hold_every_pair_that_fits() -> None:
    kinds = {"a": "01234", "b": "xyz", "c": "pq", "d": "mn"}
    rows = covering(kinds, lambda row: row[:2] != ("0", "x"))
    held = {pair for row in rows for pair in pairs_of(row)}
    every = sum(len(a) * len(b) for i, a in enumerate(kinds.values()) for b in list(kinds.values())[i + 1 :])
    assert len(held) == every - 1
    assert len(rows) < 25


def test_the_page_has_every_entry_and_none_that_differs() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert DIFFERS not in page
    tables = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL))
    shown = [re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[2:] for table in tables.values()]
    assert shown == list(map(list, KINDS.values())), "write the page again: python -m tests.zoo"


@pytest.mark.parametrize("wrapper", ["FSDP1", FSDP2])
def test_the_page_says_what_two_ranks_find(tmp_path: Path, group: Group, wrapper: str) -> None:
    outcome = find(Cell(Case(wrapper=wrapper)), tmp_path, group)
    assert outcome.kind == (REFUSED if wrapper == "FSDP1" else EQUAL)
    assert outcome.why in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow  # Some 350 cases: SECONDS on two cores.
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_any_two_entries_go_on_together_or_are_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, group: Group, wrapper: str
) -> None:
    cases = [case for case in all_pairs() if case.wrapper == wrapper]
    found = {case: find(Cell(case), tmp_path_factory.mktemp("pair"), group) for case in cases}
    assert not [f"{case}: {outcome}" for case, outcome in found.items() if outcome.kind == DIFFERS]


@pytest.mark.slow  # Each is a save and a load on two groups of ranks: SECONDS in all on two cores.
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_loaded_on_other_processes_is_what_was_saved(
    tmp_path_factory: pytest.TempPathFactory, group: Group, kind: str
) -> None:
    cells = [cell for entry in KINDS[kind] for cell in columns(kind, entry).values() if cell.loaded_under]
    found = {cell: find(cell, tmp_path_factory.mktemp("cell"), group) for cell in cells}
    assert not [f"{cell}: {outcome}" for cell, outcome in found.items() if outcome.kind == DIFFERS]


def test_the_page_was_written_with_this_torch_or_another() -> None:
    assert re.search(r"with torch \d+\.\d+\.\d+ on CPUs", PAGE.read_text(encoding="utf-8"))
