"""What ranks decide together, and what fails on some of them, is the same on all."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest

from tests.ranks import on_two_ranks
from torchtitan_lite.distributed.exchange import Exchange, RanksFailed, failures_text
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import PeerLost, SaveFailed


class Odd(Exception):
    """Cannot be pickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"odd {first}")


def refuse(error: BaseException | None) -> str:
    if error is not None:
        raise error
    return "made"


def failures_of(exchange: Exchange, make: Any, choose: Any) -> dict[int, str]:
    """Return the text of each rank's failure, by rank."""
    with pytest.raises(RanksFailed) as caught:
        exchange.decide(make, choose)
    return {rank: f"{type(error).__name__}: {error}" for rank, error in caught.value.failures.items()}


@on_two_ranks
def test_what_the_coordinator_chooses_is_what_every_rank_gets(rank: int) -> None:
    exchange = Peers(timedelta(seconds=60)).saves
    pids = exchange.decide(os.getpid, lambda given: (os.getpid(), *given))
    assert pids[0] == pids[1] and pids[1 + rank] == os.getpid()


@on_two_ranks
def test_what_fails_on_any_rank_is_raised_on_all_and_the_group_serves_on(rank: int) -> None:
    exchange = Peers(timedelta(seconds=60)).saves
    chosen: list[object] = []
    for at, error in ((0, OSError("full")), (1, OSError("full")), (1, KeyboardInterrupt("now"))):
        own = error if rank == at else None
        expected = {at: f"{type(error).__name__}: {error}"}
        assert failures_of(exchange, lambda own=own: refuse(own), chosen.append) == expected
    assert not chosen, "nothing is chosen where a rank failed"
    odd = failures_of(exchange, lambda: refuse(Odd(rank, 2)), chosen.append)
    assert odd[rank] == f"Odd: odd {rank}" and odd[1 - rank] == f"RuntimeError: Odd: odd {1 - rank}"
    assert failures_of(exchange, lambda: "made", lambda _: refuse(OSError("late"))) == {0: "OSError: late"}
    assert exchange.decide(lambda: rank, sum) == 1


@on_two_ranks
def test_a_rank_that_has_gone_is_a_lost_peer_for_who_waits_for_its_answer(rank: int) -> None:
    peers = Peers(timedelta(seconds=60))
    peers.gather(rank)
    if rank == 0:
        with pytest.raises(PeerLost, match="lost its connection to another rank"):
            peers.gather(rank)
    peers.close()


def test_the_only_process_decides_alone_and_gets_its_own_error() -> None:
    exchange = Exchange(None)
    assert exchange.decide(lambda: 3, sum) == 3
    error = OSError("full")
    with pytest.raises(RanksFailed) as caught:
        exchange.decide(lambda: refuse(error), len)
    assert caught.value.failures[0] is error


@pytest.mark.parametrize("ranks", [1, 3, 4, 9])
def test_failures_are_named_for_three_ranks_and_counted_for_the_rest(ranks: int) -> None:
    text = failures_text({rank: OSError(f"disk {rank}") for rank in range(ranks)})
    named = [rank for rank in range(ranks) if f"rank {rank}: OSError: disk {rank}" in text]
    assert named == [*range(min(ranks, 3))]
    assert (f"and {ranks - 3} more rank" in text) == (ranks > 3)


def test_of_a_failed_save_only_the_cause_is_named() -> None:
    assert failures_text({1: SaveFailed(4, "no room")}) == "rank 1: no room"
