"""Ranks that each have a part of the model, as the stages of a pipeline: one report for all of them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch

from tests.ranks import Ranks
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.checkpoint.format.key_report import KeyReport
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.distributed.peers import Peers

NAMES = ("first", "second", "of_no_rank")


def save(folder: Path) -> Path:
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(2)) for name in NAMES})
    with CheckpointManager.for_loop(model=model, folder=str(folder)) as manager:
        manager.load()
        manager.save(1, now=True)
    return folder / "step-1"


def report(rank: int, step: Path, parts: list[dict[str, int]]) -> KeyReport:
    """Return the report of a rank whose model has parameters of these sizes."""
    model = {name: torch.zeros(size) for name, size in parts[rank].items()}
    return StoredCheckpoint(step, Peers(timedelta(seconds=60))).report(model, {})


def test_a_key_is_unexpected_if_no_rank_has_it(two_ranks: Ranks, tmp_path: Path) -> None:
    step = save(tmp_path)
    for found in two_ranks.run(report, step=step, parts=[{"first": 2}, {"second": 2}]):
        assert found == KeyReport(unexpected=["of_no_rank"])
    for found in two_ranks.run(report, step=step, parts=[dict.fromkeys(NAMES, 2), {"second": 2}]):
        assert not found


def test_what_differs_on_one_rank_is_in_the_report_of_all(two_ranks: Ranks, tmp_path: Path) -> None:
    parts = [{"first": 2, "missing": 2}, {"second": 3, "of_no_rank": 2}]
    for found in two_ranks.run(report, step=save(tmp_path), parts=parts):
        assert (found.missing, found.unexpected) == (["missing"], [])
        assert found.mismatched == {"second": "shape [2] in the checkpoint, [3] expected"}
