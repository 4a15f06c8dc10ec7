"""Run the optimizers of other libraries; renew their record and page: `python -m tests.zoo.libraries [PACKAGE ...]`.

Without names it runs those of `LIBRARIES` that are installed; the others keep what the record has. A package that is
named and cannot be imported is recorded as such.
"""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from tests.zoo.between import Group, find_entry
from tests.zoo.cells import groups
from tests.zoo.library_record import Package, read, write
from tests.zoo.library_runs import LIBRARIES, names_of
from tests.zoo.outcome import DIFFERS, Outcome, first_sentence
from tests.zoo.page import PAGE, with_libraries

DEADLINE_SECONDS = 60


def main(names: list[str]) -> int:
    """Return 1 if a case differs, else 0."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Compilers take minutes, and compute the same.
    packages = read()
    for name in names or [name for name in LIBRARIES if _version(name)]:
        with groups(DEADLINE_SECONDS) as group:  # Libraries change torch, so each has processes of its own.
            packages[name] = _run(name, group)
        write(packages)
        PAGE.write_text(with_libraries(PAGE.read_text(encoding="utf-8"), packages), encoding="utf-8")
    found = [each for package in packages.values() for row in package.outcomes.values() for each in row.values()]
    differing = sum(outcome.kind == DIFFERS for outcome in found)
    print(f"{len(found)} cells, {differing} differ; wrote {PAGE.name}")
    return min(differing, 1)


def _run(package: str, group: Group) -> Package:
    about = _version(package), torch.__version__.partition("+")[0], datetime.now(UTC).date().isoformat()
    [report] = group(1, False).reports(names_of, package=package)
    if report.failure:
        return Package(*about, {}, first_sentence(report.failure.strip().splitlines()[-1]))
    return Package(*about, {name: _find(package, name, group) for name in report.value})


def _find(package: str, name: str, group: Group) -> dict[str, Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        found = find_entry(package, name, Path(folder), group)
    for column, outcome in found.items():
        print(f"{package} {name}, {column}: {outcome}", flush=True)
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
