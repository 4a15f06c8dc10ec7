"""The tables of docs/versions.md: what the tests counted with each torch, and which one reads whose checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""The last patch of each supported minor version; requirements.txt has the one that every other set-up uses."""
UNTRIED = "untried"
Report = Mapping[str, Mapping[str, str]]
"""Under one version of torch: for the folder of each version, what each tool made of it."""


@dataclass(frozen=True)
class Row:
    """One line of the table of tests."""

    torch: str
    python: str = ""
    tests: str = ""
    outcome: str = UNTRIED
    commit: str = ""


def counted(output: str) -> str:
    """Return "11 passed, 1 skipped" of the last line of pytest; an error if it did not come that far."""
    found = re.findall(r"(\d+ [a-z]+(?:, \d+ [a-z]+)*) in [\d.]+s", output)
    return found[-1] if found else "error: no tests ran"


def table_of_tests(rows: Sequence[Row]) -> str:
    """Return a line for each of `rows`, and one for each version without any."""
    lines = ["| torch | Python | tests | outcome | commit |", "| --- | --- | --- | --- | --- |"]
    for version in VERSIONS:
        for row in [row for row in rows if row.torch == version] or [Row(version)]:
            lines.append(f"| {row.torch} | {row.python} | {row.tests} | {row.outcome} | {row.commit} |")
    return "\n".join(lines)


def tables_of_round_trips(reports: Mapping[str, Report]) -> str:
    """Return a table of our checkpoints, one of torch's own, and a list of what failed; `reports` by version."""
    kinds = {"ours": "Written by ours", "torch's": "Written by `dcp.save`"}
    lines: list[str] = []
    failures: dict[str, list[str]] = {}
    for kind, title in kinds.items():
        lines += [f"| {title} with | " + " | ".join(map(minor, VERSIONS)) + " |", "| --- |" + " --- |" * len(VERSIONS)]
        for writer in map(minor, VERSIONS):
            cells = []
            for reader in map(minor, VERSIONS):
                found = reports.get(reader, {}).get(f"torch-{writer}", {})
                tools = {tool: outcome for tool, outcome in found.items() if tool.startswith(f"{kind}, ")}
                failed = {tool.partition(", ")[2]: outcome for tool, outcome in tools.items() if outcome != "reads"}
                cells.append(UNTRIED if not tools else "not " + ", ".join(failed) if failed else "yes")
                for tool, outcome in failed.items():
                    failures.setdefault(f"{tool}: `{outcome}`", []).append(f"{writer} with {reader}")
            lines.append(f"| {writer} | {' | '.join(cells)} |")
        lines.append("")
    lines += [f"- {failure} ({', '.join(pairs)})" for failure, pairs in failures.items()]
    return "\n".join(lines).rstrip()


def ours(report: Report) -> list[str]:
    """Return the outcomes that must not be errors: of our checkpoints, and of our reader."""
    return [
        outcome
        for tools in report.values()
        for tool, outcome in tools.items()
        if tool.startswith("ours") or tool.endswith("our reader")
    ]


def minor(version: str) -> str:
    """Return 2.13 of 2.13.0."""
    return ".".join(version.split(".")[:2])
