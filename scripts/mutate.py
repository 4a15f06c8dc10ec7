"""Change the package in small ways, one at a time, and check that a test fails.

    python scripts/mutate.py torchtitan_lite/store --count 200 --seed 10
    python scripts/mutate.py --only torchtitan_lite/store/lease.py:138

A mutant is killed if one of the tests that execute its line fails, hangs or crashes its process. Mutants that no test
can distinguish from the original are listed, with a reason, in mutation/equivalents.toml. The first run, and each run
after a change of the package, first records which test executes which lines, which takes about three times as long as
the tests.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from mutation.equivalents import Equivalents
from mutation.operators import Mutant, mutants_of
from mutation.reach import Reach, Test, test_files
from mutation.tree import LOADED, Run, Tree

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("disk", "store", "checkpoint", "memory", "examining", "converting", "importing", "hugging_face")
ROOMS += ("uploads.py", "json_lines.py")
FOLDERS = tuple(f"torchtitan_lite/{room}" for room in ROOMS)
TESTS = ("tests/disk", "tests/store", "tests/checkpoint", "tests/keeper", "tests/resharding", "tests/e2e")
TESTS += ("tests/test_faults.py",)
FIRST_FILES = 3
"""Test files whose quick tests run before all others."""
GRACE_SECONDS = 5.0
"""CPU seconds that a test may take in addition to its traced time."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one mutant."""

    status: str
    """killed, SURVIVED or equivalent."""
    by: str
    """The test that killed it, or the reason why it is equivalent."""
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each mutant and a summary. Return 1 if a mutant survived, else 0."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that the copies are removed on SIGTERM, too.
    for name in LOADED:
        importlib.import_module(name)
    mutants = list(_chosen(options))
    if options.list:
        print(*mutants, sep="\n")
        return 0
    tree = Tree(options.repository)
    try:
        reach = Reach(tree, options.cache)
        reach.collect(test_files(tree.root, options.tests))
    finally:
        tree.close()
    outcomes = _settled(mutants, options)
    left = [index for index in range(len(mutants)) if index not in outcomes]
    for index, outcome in _in_processes(mutants, left, reach, options):
        outcomes[index] = outcome
        print(f"{mutants[index]}\n    {outcome.status} {outcome.by} in {outcome.seconds:.1f} s", flush=True)
        _write(mutants, outcomes, options)
    if len(outcomes) < len(mutants):
        raise RuntimeError(f"{len(mutants) - len(outcomes)} mutants were not tried: a process ended early, see above")
    return _summary(mutants, outcomes, options)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folders", nargs="*", default=FOLDERS, help="folders to change (those of checkpoints and what is below)"
    )
    parser.add_argument("--count", type=int, default=100, help="mutants drawn in each folder (100); 0: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (0)")
    parser.add_argument(
        "--only", action="append", default=[], help="FILE:LINE; all mutants of that line, without a draw"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants tested at a time (1)")
    parser.add_argument("--slow", action="store_true", help="run the slow tests of the same files on survivors")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="the tests to run")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--json", type=Path, help="file for the outcomes")
    parser.add_argument("--after", type=Path, help="an earlier --json; skip the mutants killed then")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "mutation-reach.json"))
    parser.add_argument("--repository", type=Path, default=ROOT, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _chosen(options: argparse.Namespace) -> Iterator[Mutant]:
    if options.only:
        for place in options.only:
            path, _, line = place.rpartition(":")
            found = mutants_of(path, (options.repository / path).read_text())
            yield from (mutant for mutant in found if mutant.line == int(line))
        return
    for folder in options.folders:
        place = options.repository / folder
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        found = [
            mutant
            for file in files
            for mutant in mutants_of(file.relative_to(options.repository).as_posix(), file.read_text(encoding="utf-8"))
        ]
        for entry in Equivalents().stale(found):
            print(f"equivalents.toml has an entry for no mutant: {entry}")
        # Drawn by content, not by number: after a change of the code only the changed mutants are drawn again.
        drawn = sorted(range(len(found)), key=lambda index: _lot(options.seed, found[index]))[: options.count or None]
        yield from (found[index] for index in sorted(drawn))


def _lot(seed: int, mutant: Mutant) -> bytes:
    what = (mutant.source, mutant.operator, mutant.after, mutant.before)
    return hashlib.sha256("\n".join([str(seed), Path(mutant.path).name, *what]).encode()).digest()


def _settled(mutants: Sequence[Mutant], options: argparse.Namespace) -> dict[int, Outcome]:
    """Return the outcomes of mutants that need no run: listed as equivalent, or killed by an earlier run."""
    killed = {}
    if options.after:
        rows = json.loads(options.after.read_text(encoding="utf-8"))["mutants"]
        killed = {_key(row): row for row in rows if row["status"] == "killed"}
    equivalents, found = Equivalents(), {}
    for index, mutant in enumerate(mutants):
        if (reason := equivalents.reason(mutant)) is not None:
            found[index] = Outcome("equivalent", reason, 0.0)
        elif row := killed.get(_key(_row(mutant))):
            found[index] = Outcome("killed", row["by"], row["seconds"])
    return found


def _in_processes(
    mutants: Sequence[Mutant], left: Sequence[int], reach: Reach, options: argparse.Namespace
) -> Iterator[tuple[int, Outcome]]:
    """Yield number and outcome of the mutants `left`, as they end, from `jobs` processes with a tree each."""
    ours, theirs = os.pipe()
    sys.stdout.flush()
    for job in range(options.jobs):
        if os.fork() == 0:
            os.close(ours)
            try:
                with os.fdopen(theirs, "w", buffering=1) as pipe, closing(Tree(options.repository)) as tree:
                    for index in left[job :: options.jobs]:
                        outcome = _tried(mutants[index], tree, reach.tests_of(mutants[index]), options.slow)
                        pipe.write(json.dumps([index, asdict(outcome)]) + "\n")
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        for line in pipe:
            index, outcome = json.loads(line)
            yield index, Outcome(**outcome)


def _tried(mutant: Mutant, tree: Tree, tests: list[Test], slow: bool) -> Outcome:
    begun = time.monotonic()

    def outcome(status: str, by: str) -> Outcome:
        return Outcome(status, by, round(time.monotonic() - begun, 1))

    with tree.changed(mutant.path, mutant.text()):
        for part in _parts(tests):
            while part:
                run = _run(tree, part, "not slow")
                killer = _killer(run)
                if killer is None:
                    break
                suspect = next((test for test in part if test.nodeid == run.started and test.is_heavy), None)
                # A test that waits for processes may fail on a busy machine, so it has to fail twice.
                if suspect is None or _killer(_run(tree, [suspect], "not slow")) is not None:
                    return outcome("killed", killer)
                part = part[part.index(suspect) + 1 :]
        if slow and tests and (killer := _killer(_run(tree, tests, "slow"))) is not None:
            return outcome("killed", killer)
    return outcome("SURVIVED", f"{len(tests)} tests")


def _parts(tests: Sequence[Test]) -> Iterator[list[Test]]:
    """Split `tests` in two: the first part kills most mutants, and collecting all files takes longer than its tests."""
    files = list(dict.fromkeys(test.file for test in tests))[:FIRST_FILES]
    first = [test for test in tests if test.file in files and not test.is_heavy]
    yield first
    yield [test for test in tests if test not in first]


def _run(tree: Tree, tests: list[Test], mark: str) -> Run:
    seconds = {test.nodeid: test.seconds + test.module_setup for test in tests}
    files = list(dict.fromkeys(test.file for test in tests))
    plugins = [_Chosen([test.nodeid for test in tests])] if mark == "not slow" else []
    limit = (1 if plugins else 60) * GRACE_SECONDS
    return tree.run(["-x", "-m", mark, *files], plugins, lambda test: limit + seconds.get(test, 0.0))


def _killer(run: Run) -> str | None:
    """Return why the run failed; None if every test passed."""
    for test, why in run.failed.items():
        first = next((line for line in why.splitlines() if line.startswith("E ")), "E")
        return f"by {test} ({first[1:].strip()[:80]})"
    if run.hung:
        return f"by {run.started}, which hung"
    return None if run.ended else f"by {run.started}, whose process died"


class _Chosen:
    """A plugin that runs only the tests of `order`, in that order."""

    def __init__(self, order: Sequence[str]) -> None:
        self._places = {test: place for place, test in enumerate(order)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._places), key=lambda item: self._places[item.nodeid]
        )


def _row(mutant: Mutant) -> dict[str, Any]:
    return {
        "file": mutant.path,
        "line": mutant.line,
        "operator": mutant.operator,
        "source": mutant.source,
        "before": mutant.before,
        "becomes": mutant.after,
        "nth": mutant.nth,
    }


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("file", "source", "operator", "becomes", "nth"))


def _write(mutants: Sequence[Mutant], outcomes: dict[int, Outcome], options: argparse.Namespace) -> None:
    if options.json:
        rows = [{**_row(mutants[index]), **asdict(outcomes[index])} for index in sorted(outcomes)]
        document = {"commit": _commit(options), "seed": options.seed, "count": options.count, "mutants": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _summary(mutants: Sequence[Mutant], outcomes: dict[int, Outcome], options: argparse.Namespace) -> int:
    """Print a line for each folder. Return 1 if a mutant survived, else 0."""
    _write(mutants, outcomes, options)
    by_folder: dict[str, Counter[str]] = {}
    for index, outcome in outcomes.items():
        by_folder.setdefault(str(Path(mutants[index].path).parent), Counter())[outcome.status] += 1
    for folder, counts in sorted(by_folder.items()):
        tried = counts.total() - counts["equivalent"]
        print(
            f"{folder}: {counts.total()} mutants, {counts['equivalent']} equivalent, {counts['killed']} of the other"
            f" {tried} killed ({100 * counts['killed'] / max(1, tried):.1f} %); seed {options.seed}, {_commit(options)}"
        )
    return int(any(counts["SURVIVED"] for counts in by_folder.values()))


def _commit(options: argparse.Namespace) -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=options.repository, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
