"""Show where the time of the last test run went.

    ./run_tests.sh --all; python scripts/test_times.py            # folders, the longest tests, the longest set-ups
    ./run_tests.sh --all; python scripts/test_times.py --record   # and keep it: tests/durations.txt, CONTRIBUTING.md

Every test run writes what each test took into the cache of pytest (`tests/times.py`). Seconds are those of the clock,
with set-up and end; processor seconds are those of the test's process and of all that it started. The rest is waiting:
for a lease, a bound, another process, a disk.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / ".pytest_cache" / "d" / "times" / "test_times.jsonl"
DURATIONS = ROOT / "tests" / "durations.txt"
PAGE = ROOT / "CONTRIBUTING.md"
_TABLE = re.compile(r"(<!-- times: .*? -->\n).*?(<!-- end of times -->)", re.DOTALL)
LONGEST = 50
SETUPS = 15
LONG_SECONDS = 20.0
"""A case that takes longer is recorded by itself, a shorter one with its file."""
FOLDERS_IN_TABLE = 12


@dataclass(frozen=True)
class Took:
    """What a test took, in seconds."""

    test: str
    seconds: float
    computed: float
    fixtures: dict[str, float] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return self.test.partition("::")[0]

    @property
    def folder(self) -> str:
        """The folder right below tests/, with the one below it in tests/checkpoint."""
        parts = Path(self.file).parent.parts
        return "/".join(parts[: 3 if parts[1:2] == ("checkpoint",) else 2])


@dataclass
class Sum:
    """What several tests took together, in seconds."""

    tests: int = 0
    seconds: float = 0.0
    computed: float = 0.0

    def add(self, seconds: float, computed: float) -> None:
        self.tests += 1
        self.seconds += seconds
        self.computed += computed

    @property
    def waited(self) -> float:
        return max(0.0, self.seconds - self.computed)


def parse(lines: Iterable[str]) -> list[Took]:
    """Return the tests of a record."""
    return [Took(**json.loads(line)) for line in lines]


def sums(tests: Iterable[Took], by: str) -> dict[str, Sum]:
    """Return the sums by `by`, an attribute of a test, largest first."""
    found: dict[str, Sum] = defaultdict(Sum)
    for test in tests:
        found[getattr(test, by)].add(test.seconds, test.computed)
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def setups(tests: Iterable[Took]) -> dict[str, Sum]:
    """Return how often each fixture was set up, and how long that took together."""
    found: dict[str, Sum] = defaultdict(Sum)
    for test in tests:
        for name, seconds in test.fixtures.items():
            found[name].add(seconds, 0.0)
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def durations(tests: Iterable[Took]) -> str:
    """Return the lines of tests/durations.txt: seconds, processor seconds, and a long case or the rest of a file."""
    found: dict[str, Sum] = defaultdict(Sum)
    for test in tests:
        found[test.test if test.seconds >= LONG_SECONDS else test.file].add(test.seconds, test.computed)
    return "".join(f"{each.seconds:.1f} {each.computed:.1f} {name}\n" for name, each in sorted(found.items()))


def table(tests: Sequence[Took]) -> str:
    """Return the table of CONTRIBUTING.md."""
    folders = sums(tests, "folder")
    others = Sum()
    for each in list(folders.values())[FOLDERS_IN_TABLE:]:
        others = Sum(others.tests + each.tests, others.seconds + each.seconds, others.computed + each.computed)
    rows = {**dict(list(folders.items())[:FOLDERS_IN_TABLE]), "others": others, "all": total(tests)}
    lines = ["| tests in | number | seconds | of them computing | waiting |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {name} | {each.tests:,} | {each.seconds:,.0f} | {each.computed:,.0f} | {each.waited:,.0f} |"
        for name, each in rows.items()
    ]
    return "\n".join(lines) + "\n"


def total(tests: Iterable[Took]) -> Sum:
    """Return what all `tests` took together."""
    found = Sum()
    for test in tests:
        found.add(test.seconds, test.computed)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; with --record, keep what the tests took. Return 1 without a record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--record", action="store_true", help="write tests/durations.txt and the table of CONTRIBUTING.md"
    )
    options = parser.parse_args(arguments)
    if not RECORD.exists():
        print(f"{RECORD} is not there: run ./run_tests.sh --all first, which writes it.", file=sys.stderr)
        return 1
    tests = parse(RECORD.read_text().splitlines())
    print(f"{'tests in':<40}{'number':>8}{'seconds':>10}{'computing':>11}{'waiting':>9}")
    for name, each in [*sums(tests, "folder").items(), ("all", total(tests))]:
        print(f"{name:<40}{each.tests:>8,}{each.seconds:>10,.1f}{each.computed:>11,.1f}{each.waited:>9,.1f}")
    print(f"\nThe {LONGEST} longest tests: seconds, computing")
    for test in sorted(tests, key=lambda test: -test.seconds)[:LONGEST]:
        print(f"{test.seconds:>8.1f}{test.computed:>8.1f}  {test.test}")
    print("\nSet-ups that take the longest: times, seconds together")
    for name, each in list(setups(tests).items())[:SETUPS]:
        print(f"{each.tests:>8,}{each.seconds:>9,.1f}  {name}")
    if options.record:
        DURATIONS.write_text(durations(tests))
        PAGE.write_text(_TABLE.sub(lambda found: found[1] + table(tests) + found[2], PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
