"""Hundreds of hostile folders: each is refused or skipped, its file named, without a hang or much memory."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.reading.memory import MIB
from tests.checkpoint.untrusted.hostile_folders import CASES, DATA, MANIFEST, METADATA, PLAIN_CASES, WARMING, probe
from tests.forked import Forked

MOST_BYTES = 64 * MIB
DEADLINE_SECONDS = 540.0
FILES = (DATA, METADATA, MANIFEST)

STRANGE = ("step = 2 (6)", *(f"many: {what}" for what in ("abandons of one step", "as many abandons as fit")))
STRANGE += ("many: as many lists as fit",)
"""Cases that are strange but harmless: a run may load them, in bounded time and memory."""

QUICK = (
    *(f"{name} as {what}" for name in FILES for what in ("pipe", "link to zeros", "link to itself")),
    *("many: abandons of one step", "many: as many chunks as fit", "file '\\ud800'", "config = 5 (1)", "path []"),
    *("pickle: as many empty dicts as fit", "findings as a pipe", "findings as a link"),
)


def probed(names: Sequence[str], start_run: StartRun, tmp_path: Path) -> list[dict[str, Any]]:
    """Return the outcome of each case, from a forked process.

    A process that hangs is killed; the last line of the report then names the case.
    """
    run = start_run(tmp_path / "template", interval=2).finished(4)
    report = tmp_path / "report"
    process = Forked(probe, names, str(run.root), str(tmp_path / "probes"), str(report))
    try:
        process.wait(DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    last = {(line["name"], line["way"]): line for line in map(json.loads, report.read_text().splitlines())}
    return list(last.values())


def is_harmless(name: str, outcome: str) -> bool:
    """Return whether the case was refused, or was found damaged, with the file named."""
    if name in STRANGE and outcome in ("loaded", "loaded 4", "skipped"):
        return True
    names_a_file = any(file in outcome for file in FILES) or " is missing" in outcome
    return outcome.startswith(("fell back: ", "refused: ")) and names_a_file


def assert_harmless(outcomes: Sequence[dict[str, Any]]) -> None:
    sound = [each["outcome"] for each in outcomes if each["name"] == WARMING]
    assert sound == ["loaded 4", "loaded"]
    met = [each for each in outcomes if each["name"] != WARMING]
    harmful = [each for each in met if not is_harmless(each["name"], each["outcome"])]
    assert [f"{each['name']}, {each['way']}: {each['outcome']}" for each in harmful] == []
    large = [f"{each['name']}, {each['way']}: {each['peak']} bytes" for each in met if each["peak"] > MOST_BYTES]
    assert large == []


@pytest.mark.slow
def test_some_of_each_class_are_refused_or_skipped(start_run: StartRun, tmp_path: Path) -> None:
    outcomes = probed(QUICK, start_run, tmp_path)
    assert_harmless(outcomes)
    assert len({each["name"] for each in outcomes}) == 1 + len(QUICK)


@pytest.mark.promise(
    "A hostile checkpoint is refused or skipped and its file is named, at once and within 64 MiB of memory.",
    section="hostile",
)
@pytest.mark.exhaustive  # Some six hundred loads, a minute.
def test_all_are_refused_or_skipped(start_run: StartRun, tmp_path: Path) -> None:
    names = [name for name in (*CASES, *PLAIN_CASES) if name != WARMING]
    outcomes = probed(names, start_run, tmp_path)
    assert_harmless(outcomes)
    assert len(names) >= 200
    assert len({each["name"] for each in outcomes}) == 1 + len(names)
