"""Verifying and comparing hostile checkpoints: each is a finding or a refusal by name, within bounded memory."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.checkpoint.reading.memory import peak_above_before
from tests.checkpoint.small_run import SmallRun
from tests.checkpoint.untrusted.hostile_folders import CASES, DATA, MANIFEST, METADATA, PLAIN_CASES, WARMING
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.examining.difference import compare_checkpoints
from torchtitan_lite.examining.opened import open_checkpoint
from torchtitan_lite.examining.verification import look_at, read_through

MAKERS = {**CASES, **PLAIN_CASES}
HARMLESS = {f"many: {what}" for what in ("abandons of one step", "as many abandons as fit", "as many lists as fit")}
QUICK = (
    *(f"{name} as {what}" for name in (DATA, METADATA, MANIFEST) for what in ("pipe", "link to zeros")),
    *("many: abandons of one step", "file '\\ud800'", "config = 5 (1)", "path []", "pickle: beyond all numbers"),
)
MOST_BYTES = 64 << 20


def verified(folder: Path) -> str:
    """Return what `verify --full` finds in `folder`, in words."""
    try:
        looked = look_at(folder)
        found = [*looked.findings, *read_through(looked).findings]
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "; ".join(f"{finding.file}: {finding.text}" for finding in found) or "complete"


def examine(names: Sequence[str], base: Path) -> None:
    run = SmallRun(base / "run", interval=2).finished(4)
    sound = open_checkpoint(run.root / "step-2")
    verified(sound.folder)  # Imports and buffers are not the cases'.
    for name in names:
        folder = base / "hostile" / "checkpoint" / "step-4"
        shutil.copytree(run.root, folder.parent)
        MAKERS[name](folder)
        outcome: list[str] = []
        peak = peak_above_before(lambda outcome=outcome, folder=folder: outcome.append(verified(folder)))
        assert peak < MOST_BYTES, name
        assert (outcome[0] == "complete") is (name in HARMLESS), f"{name}: {outcome[0]}"
        with contextlib.suppress(CheckpointError):
            compare_checkpoints(open_checkpoint(folder), sound)
        shutil.rmtree(base / "hostile")


def test_some_of_each_class_are_found_or_refused(tmp_path: Path) -> None:
    examine(QUICK, tmp_path)


@pytest.mark.exhaustive  # Three hundred checkpoints, a minute and a half.
def test_all_are_found_or_refused(tmp_path: Path) -> None:
    examine([name for name in MAKERS if name != WARMING], tmp_path)
