"""Run all cases of the zoo, print their outcomes and write docs/what_resumes.md: `python -m tests.zoo`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.zoo.between import RanksCell, cells_between, find_between, rows_between
from tests.zoo.cells import KINDS, Cell, Group, columns, find, groups, pairs
from tests.zoo.loaders import COLUMNS, LOOPS, Loop, find_loop
from tests.zoo.outcome import DIFFERS, Outcome
from tests.zoo.page import PAGE, render


def main() -> int:
    """Return 1 if a case differs, else 0."""
    with groups() as group:
        cells = {
            kind: {
                entry: {column: _run(cell, group) for column, cell in columns(kind, entry).items()} for entry in entries
            }
            for kind, entries in KINDS.items()
        }
        combined = [_run(Cell(case), group) for case in pairs()]
        loops = {str(loop): {column: _run_loop(loop, at) for column, at in COLUMNS.items()} for loop in LOOPS}
        between = {cell: _run_between(cell, group) for cell in cells_between()}
    PAGE.write_text(render(cells, combined, rows_between(between), loops), encoding="utf-8")
    found = [each for rows in cells.values() for row in rows.values() for each in row.values()]
    found += [*combined, *between.values(), *(each for row in loops.values() for each in row.values())]
    differing = sum(outcome.kind == DIFFERS for outcome in found)
    print(f"{len(found)} cases, {differing} differ; wrote {PAGE.name}")
    return min(differing, 1)


def _run(cell: Cell, group: Group) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        outcome = find(cell, Path(folder), group)
    then = f" -> {cell.loaded_under}" if cell.loaded_under else ""
    print(f"{cell.case}{then}: {outcome}", flush=True)
    return outcome


def _run_loop(loop: Loop, resumed_at: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        outcome = find_loop(loop, resumed_at, Path(folder))
    print(f"{loop}, resumed at step {resumed_at}: {outcome}", flush=True)
    return outcome


def _run_between(cell: RanksCell, group: Group) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        outcome = find_between(cell, Path(folder), group)
    print(f"{cell.trick}, {cell.column}, {cell.world_size} ranks: {outcome}", flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
