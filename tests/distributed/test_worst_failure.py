"""The worst failure of any rank is raised on all, as an error of this package."""

from __future__ import annotations

from datetime import timedelta

import pytest

from torchtitan_lite.distributed.peers import Peers, together_or_worst
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnreadable

DAMAGED = CheckpointDamaged("step-4", "a byte is wrong")
OTHER_DAMAGE = CheckpointDamaged("step-4", "another byte is wrong")
UNREADABLE = CheckpointUnreadable("step-4", "EIO")


class Ranks(Peers):
    """Ranks of which each has one of `failures`."""

    def __init__(self, *failures: Exception) -> None:
        super().__init__(timedelta(seconds=1))
        self._failures = failures

    def failures(self, error: Exception | None) -> dict[int, Exception]:
        return dict(enumerate(self._failures))


def raised_by_a_load(*failures: Exception) -> BaseException:
    """Return the error of a load on rank 0 when rank 0, rank 1, ... have `failures`."""

    def fail() -> None:
        raise failures[0]

    with pytest.raises(Exception) as caught:
        together_or_worst(fail, Ranks(*failures), "step-4")
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


def test_a_failure_that_is_none_of_ours_becomes_one() -> None:
    def fail() -> None:
        raise RuntimeError("Connection reset by peer")

    with pytest.raises(CheckpointUnreadable, match="RuntimeError: Connection reset by peer"):
        together_or_worst(fail, Peers(timedelta(seconds=1)), "step-4")


def test_an_interrupt_of_the_only_process_stays_one() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        together_or_worst(interrupt, Peers(timedelta(seconds=1)), "step-4")
