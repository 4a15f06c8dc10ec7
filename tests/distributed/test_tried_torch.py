"""A start with a torch that is later than any that was tried says so, in one line of rank 0."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.ranks import Ranks
from torchtitan_lite import __version__
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.distributed import tried_torch
from torchtitan_lite.distributed.tried_torch import LATEST_TRIED, minor_version


def test_the_torch_at_hand_was_tried() -> None:
    assert minor_version(torch.__version__) <= LATEST_TRIED


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.13.0+cpu", (2, 13)), ("2.9.1", (2, 9)), ("2.16.0a0+git1f2e", (2, 16)), ("unknown", (0, 0))],
)
def test_the_minor_version_of_every_build_is_read(version: str, expected: tuple[int, int]) -> None:
    assert minor_version(version) == expected


def test_a_start_with_a_tried_torch_logs_nothing_of_it(tmp_path: Path) -> None:
    assert lines_of_a_start(0, tmp_path, LATEST_TRIED) == []


def test_a_start_with_a_later_torch_is_one_line_of_rank_0(two_ranks: Ranks, tmp_path: Path) -> None:
    line = f"INFO Torch {torch.__version__} is later than any that torchtitan_lite {__version__} was tried with ({{}})"
    found = two_ranks.run(lines_of_a_start, folder=tmp_path, latest=(2, 10))
    assert found == [[line.format("2.11 to 2.10")], []]


def lines_of_a_start(rank: int, folder: Path, latest: tuple[int, int]) -> list[str]:
    """Open a manager as if `latest` were the latest torch that was tried. Return what is logged of torch."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    logger, handler = logging.getLogger("torchtitan_lite"), Keep()
    before = logger.level, tried_torch.LATEST_TRIED
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    tried_torch.LATEST_TRIED = latest
    try:
        with CheckpointManager.for_loop(model=nn.Linear(2, 2), folder=folder, preemption_signals=()) as manager:
            manager.load()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        tried_torch.LATEST_TRIED = before[1]
    return [line for line in lines if "Torch" in line]
