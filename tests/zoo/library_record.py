"""The record of other libraries, `libraries.json`: versions and date of each package, each outcome with its reason.

The page renders it, so what is on the page needs no library to be installed, and a package that is run again replaces
its own part alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.zoo.outcome import Outcome

RECORD = Path(__file__).with_name("libraries.json")


@dataclass(frozen=True)
class Package:
    """What was found for one package: an outcome for each class and column, or why it was not run."""

    version: str
    torch: str
    date: str
    outcomes: Mapping[str, Mapping[str, Outcome]]
    not_run: str = ""


def read(path: Path = RECORD) -> dict[str, Package]:
    """Return the record, by package."""
    return {name: _package(fields) for name, fields in json.loads(path.read_text(encoding="utf-8")).items()}


def write(packages: Mapping[str, Package], path: Path = RECORD) -> None:
    """Write the record, with a line for each class."""
    lines = [f"{json.dumps(name)}: {{\n{_fields(packages[name])}\n }}" for name in sorted(packages, key=str.lower)]
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")


def _fields(package: Package) -> str:
    fields = {"version": package.version, "torch": package.torch, "date": package.date, "not run": package.not_run}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items() if value]
    rows = [
        f"   {json.dumps(name)}: {json.dumps({column: str(each) for column, each in row.items()}, ensure_ascii=False)}"
        for name, row in package.outcomes.items()
    ]
    return ",\n".join([*lines, '  "outcomes": {\n' + ",\n".join(rows) + "\n  }"] if rows else lines)


def _package(fields: dict[str, object]) -> Package:
    rows = fields.get("outcomes", {})
    assert isinstance(rows, dict)
    outcomes = {name: {column: Outcome.of_text(text) for column, text in row.items()} for name, row in rows.items()}
    version, torch, date, not_run = (str(fields.get(key, "")) for key in ("version", "torch", "date", "not run"))
    return Package(version, torch, date, outcomes, not_run)
