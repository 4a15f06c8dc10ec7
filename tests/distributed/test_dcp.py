"""Errors of DCP become errors of this package: the worst one of any rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_lite.distributed import dcp
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnreadable, LeaseLost, SaveFailed

DAMAGED = CheckpointDamaged("step-4", "a byte is wrong")
OTHER_DAMAGE = CheckpointDamaged("step-4", "another byte is wrong")
UNREADABLE = CheckpointUnreadable("step-4", "EIO")
LOST = LeaseLost("checkpoint", "run theirs")


class Ranks(Peers):
    """Ranks of which each has one of `failures`."""

    def __init__(self, *failures: Exception) -> None:
        super().__init__(timedelta(seconds=1))
        self._failures = failures

    def gather_errors(self, error: Exception | None) -> list[Exception | None]:
        return [*self._failures]


def raised_by_a_load(*failures: Exception) -> BaseException:
    """Return the error of a load on rank 0 when rank 0, rank 1, ... have `failures`."""
    with pytest.raises(Exception) as caught:
        dcp.raise_worst(failures[0], Ranks(*failures), "step-4")
    return caught.value


def raised(monkeypatch: pytest.MonkeyPatch, *failures: BaseException) -> BaseException:
    """Return the error of a save when DCP reports `failures`, of rank 0, rank 1, ..."""
    whole = CheckpointException("save", {rank: (error, None) for rank, error in enumerate(failures)})  # type: ignore[misc]  # no traceback

    def fail(*arguments: Any, **settings: Any) -> None:
        raise whole

    monkeypatch.setattr(dcp, "dcp_save", fail)
    with pytest.raises(Exception) as caught:
        dcp.save({}, None, None, None, 4)  # type: ignore[arg-type]  # none is used
    return caught.value


@pytest.mark.parametrize(
    ("failures", "worst"),
    [
        ((DAMAGED,), DAMAGED),
        ((DAMAGED, OTHER_DAMAGE), DAMAGED),
        ((DAMAGED, UNREADABLE), UNREADABLE),
        ((UNREADABLE, DAMAGED), UNREADABLE),
    ],
)
def test_a_load_raises_an_io_error_of_any_rank_before_damage_of_another(
    failures: tuple[Exception, ...], worst: BaseException
) -> None:
    assert raised_by_a_load(*failures) is worst


def test_a_load_that_failed_with_an_unknown_error_on_any_rank_proves_no_damage() -> None:
    error = raised_by_a_load(DAMAGED, MemoryError("no memory"))
    assert isinstance(error, CheckpointUnreadable)
    assert "rank 0: CheckpointDamaged" in str(error) and "rank 1: MemoryError: no memory" in str(error)


def test_a_save_raises_a_lost_folder_before_any_other_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert raised(monkeypatch, OSError("no space"), LOST) is LOST


@pytest.mark.parametrize("ranks", [1, 3, 4, 9])
def test_a_save_names_the_failures_of_three_ranks_and_counts_the_rest(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    error = raised(monkeypatch, *[OSError(f"disk {rank}") for rank in range(ranks)])
    assert isinstance(error, SaveFailed)
    named = [rank for rank in range(ranks) if f"rank {rank}: OSError: disk {rank}" in str(error)]
    assert named == [*range(min(ranks, 3))]
    assert (f"and {ranks - 3} more rank" in str(error)) == (ranks > 3)
    assert dcp.is_group_whole(error)


@pytest.mark.parametrize("call", ["load", "save"])
def test_a_failure_of_dcp_itself_is_one_of_our_errors_and_leaves_the_group_in_doubt(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*arguments: Any, **settings: Any) -> None:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(dcp, f"dcp_{call}", fail)
    with pytest.raises((SaveFailed, CheckpointUnreadable), match="RuntimeError: Connection reset by peer") as caught:
        if call == "load":
            dcp.load({}, None, None, Peers(timedelta(seconds=1)), "step-4")  # type: ignore[arg-type]  # none is used
        else:
            dcp.save({}, None, None, None, 4)  # type: ignore[arg-type]
    assert not dcp.is_group_whole(caught.value)
