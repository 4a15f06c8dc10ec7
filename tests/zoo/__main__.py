"""Try the whole zoo, print what came of it, and write docs/what_resumes.md: `python -m tests.zoo`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.zoo.cells import KINDS, Cell, Group, columns, find, groups, pairs
from tests.zoo.outcome import DIFFERS, Outcome
from tests.zoo.page import PAGE, render


def main() -> int:
    """Return how many cases differ."""
    with groups() as group:
        cells = {
            kind: {
                entry: {column: _tried(cell, group) for column, cell in columns(kind, entry).items()}
                for entry in entries
            }
            for kind, entries in KINDS.items()
        }
        combined = [_tried(Cell(case), group) for case in pairs()]
    PAGE.write_text(render(cells, combined), encoding="utf-8")
    found = [each for rows in cells.values() for row in rows.values() for each in row.values()] + combined
    differing = sum(outcome.kind == DIFFERS for outcome in found)
    print(f"{len(found)} cases, {differing} differ; {PAGE.name} is written")
    return min(differing, 1)


def _tried(cell: Cell, group: Group) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        outcome = find(cell, Path(folder), group)
    then = f" -> {cell.loaded_under}" if cell.loaded_under else ""
    print(f"{cell.case}{then}: {outcome}", flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
