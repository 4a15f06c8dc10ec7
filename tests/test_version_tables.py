"""The tables that scripts/test_versions.py prints, and the versions that it knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.version_tables import VERSIONS, Row, counted, minor, ours, table_of_tests, tables_of_round_trips
from torchtitan_lite.distributed.tried_torch import LATEST_TRIED, OLDEST_TRIED, minor_version

ROOT = Path(__file__).parents[1]


def test_the_versions_are_those_of_the_package_and_of_the_constraints() -> None:
    assert (minor_version(VERSIONS[0]), minor_version(VERSIONS[-1])) == (OLDEST_TRIED, LATEST_TRIED)
    assert f'"torch>={minor(VERSIONS[0])}"' in (ROOT / "pyproject.toml").read_text()
    (pinned,) = re.findall(r"^torch==(.*)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert pinned in VERSIONS


def test_the_page_has_a_line_for_every_version() -> None:
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    for version in VERSIONS:
        assert f"\n| {version} |" in page
        assert page.count(f"\n| {minor(version)} |") == 2, "a line of each table of round trips"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("...\n11 passed, 1 skipped in 32.10s\n", "11 passed, 1 skipped"),
        ("=== 1 failed, 11 passed in 37.03s ===\n", "1 failed, 11 passed"),
        ("6612 passed, 3 skipped in 451.80s (0:07:31)\n", "6612 passed, 3 skipped"),
        ("set-up: pip could not install the packages\n", "error: no tests ran"),
    ],
)
def test_the_last_line_of_pytest_is_counted(output: str, expected: str) -> None:
    assert counted(output) == expected


def test_a_version_that_was_not_run_is_untried() -> None:
    lines = table_of_tests([Row("2.13.0", "3.11.7", "fast", "9 passed", "abc")]).splitlines()
    assert lines[2:4] == ["| 2.11.0 |  |  | untried |  |", "| 2.12.1 |  |  | untried |  |"]
    assert lines[4] == "| 2.13.0 | 3.11.7 | fast | 9 passed | abc |"


def test_what_a_tool_cannot_read_is_in_its_cell_and_in_the_list() -> None:
    reads = {"ours, dcp.load": "reads", "torch's, our reader": "reads", "torch's, dcp.load": "reads"}
    fails = reads | {"torch's, dcp.load": "TypeError: six"}
    reports = {"2.13": {"torch-2.13": reads, "torch-2.15": fails}}
    lines = tables_of_round_trips(reports).splitlines()
    assert lines[0] == "| Written by ours with | 2.11 | 2.12 | 2.13 | 2.14 | 2.15 |"
    assert lines[6] == "| 2.15 | untried | untried | yes | untried | untried |"
    assert lines[14] == "| 2.15 | untried | untried | not dcp.load | untried | untried |"
    assert lines[-1] == "- dcp.load: `TypeError: six` (2.15 with 2.13)"
    assert set(ours(reports["2.13"])) == {"reads"}, "torch's own failures are no failure of the script"
