"""Any topology resumes from any other with the same bits, the same learning rates and the next sample."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.examples import mostly_exhaustive
from tests.ranks import Ranks
from tests.resharding.jobs import GLOBAL_BATCH_SIZE, TOPOLOGIES, load, losses_of_straight_and_resumed, save

Saved = dict[str, tuple[Path, dict[str, str]]]


@pytest.fixture(scope="module")
def saved() -> Saved:
    """Checkpoint and digests of each topology that has saved; `_check_pair` fills it."""
    return {}


RING = list(zip(TOPOLOGIES, [*list(TOPOLOGIES)[1:], next(iter(TOPOLOGIES))], strict=True))
"""Each topology saves once and loads once."""
PAIRS = [
    pytest.param(saver, loader, marks=[] if (saver, loader) in RING else [pytest.mark.exhaustive])
    for saver, loader in itertools.product(TOPOLOGIES, TOPOLOGIES)
]


@pytest.mark.slow
@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_every_topology_resumes_from_every_topology(
    saver: str, loader: str, four_processes: Ranks, saved: Saved, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _check_pair(saver, loader, four_processes, saved, tmp_path_factory.mktemp("pair"))


@pytest.mark.slow
@pytest.mark.parametrize("topology", mostly_exhaustive(TOPOLOGIES, kept=("FSDP 2", "TP 2 x FSDP 2", "PP 2 (1F1B)")))
def test_three_steps_and_three_more_are_six_steps_bit_for_bit_with_dropout(
    topology: str, four_processes: Ranks, tmp_path: Path
) -> None:
    straight, resumed = four_processes.run(losses_of_straight_and_resumed, folder=tmp_path, topology=topology)[0]
    assert len(straight) == 3 and straight == resumed


def _check_pair(saver: str, loader: str, ranks: Ranks, saved: Saved, folder: Path) -> int:
    if saver not in saved:
        digests = ranks.run(save, folder=folder / "saved", topology=saver)[0]
        saved[saver] = folder / "saved" / "checkpoint" / "step-2", digests
    checkpoint, expected = saved[saver]
    loaded: list[dict[str, Any]] = [
        report for report in ranks.run(load, folder=folder / "loaded", saved=checkpoint, topology=loader) if report
    ]
    assert all(report["digests"] == expected and report["step"] == 2 for report in loaded)
    assert all(rates == loaded[0]["rates"][0] for report in loaded for rates in report["rates"])
    taken = {position for report in loaded for position in report["next"]}
    assert taken == set(range(2 * GLOBAL_BATCH_SIZE, 3 * GLOBAL_BATCH_SIZE))
    return len(expected)
