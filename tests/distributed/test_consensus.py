"""Exchanges between ranks: flags a step later, decisions and errors at once."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from tests.ranks import on_two_ranks
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.distributed.step_consensus import StepConsensus, StepFlags
from torchtitan_lite.errors import CheckpointNotFound, CorpusChanged, PeerLost

TIMEOUT = timedelta(seconds=30)
NOTHING = StepFlags()


class Stubborn(Exception):
    """Cannot be unpickled: its constructor takes other arguments."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}, because {why}")


def local_error() -> Exception:
    class Local(Exception):
        """Cannot be pickled at all."""

    return Local("no module has my class")


def refuse(error: Exception) -> Callable[[], int]:
    def choose() -> int:
        raise error

    return choose


@on_two_ranks
def test_a_flag_of_one_rank_reaches_both_at_the_next_step_and_no_later_one(rank: int) -> None:
    consensus = StepConsensus(TIMEOUT)
    assert consensus.receive() == NOTHING
    consensus.send(StepFlags(save_due=rank == 1))
    assert consensus.receive() == StepFlags(save_due=True)
    consensus.send(NOTHING)
    assert consensus.receive() == NOTHING


@on_two_ranks
def test_flags_of_both_ranks_are_ored_and_the_highest_signal_wins(rank: int) -> None:
    consensus = StepConsensus(TIMEOUT)
    consensus.send(StepFlags(save_due=True, signal=10) if rank == 0 else StepFlags(save_failed=True, signal=15))
    assert consensus.receive() == StepFlags(save_due=True, save_failed=True, signal=15)


@on_two_ranks
def test_a_rank_that_has_gone_is_a_lost_peer_for_who_waits_for_its_flags(rank: int) -> None:
    consensus = StepConsensus(TIMEOUT)
    consensus.send(NOTHING)
    consensus.receive()
    if rank == 0:
        consensus.send(NOTHING)
        with pytest.raises(PeerLost, match="lost its connection to another rank"):
            consensus.receive()
    consensus.close()


@on_two_ranks
def test_sending_waits_for_no_rank(rank: int, tmp_path: Path) -> None:
    consensus = StepConsensus(TIMEOUT)
    consensus.send(NOTHING)  # The first one creates the group, on both ranks.
    consensus.receive()
    if rank == 0:
        os.mkfifo(tmp_path / "after the send")
        Peers(TIMEOUT).raise_together(None)
        consensus.send(StepFlags(signal=15))
        (tmp_path / "after the send").write_text("rank 1 may send")
    else:
        Peers(TIMEOUT).raise_together(None)
        (tmp_path / "after the send").read_text()
        consensus.send(NOTHING)
    assert consensus.receive().signal == 15


@on_two_ranks
def test_a_drained_exchange_is_over_and_forgotten(rank: int) -> None:
    consensus = StepConsensus(TIMEOUT)
    consensus.receive()
    consensus.send(StepFlags(signal=15))
    consensus.receive()
    assert consensus.receive() == NOTHING


@on_two_ranks
def test_the_coordinator_decides_for_all(rank: int) -> None:
    called = []

    def choose() -> dict[str, int]:
        called.append(rank)
        return {"step": rank}

    assert Peers(TIMEOUT).on_coordinator(choose) == {"step": 0}
    assert called == ([0] if rank == 0 else [])


@on_two_ranks
def test_an_error_of_the_coordinator_is_raised_on_all_ranks_and_reported_once(rank: int) -> None:
    with pytest.raises(CheckpointNotFound, match="step 700 is not in there") as raised:
        Peers(TIMEOUT).on_coordinator(refuse(CheckpointNotFound("there", 700, [200, 400])))
    assert (raised.value.folder, raised.value.step, raised.value.available) == ("there", 700, (200, 400))
    assert raised.value.reported_elsewhere == (rank == 1)


@on_two_ranks
def test_of_several_errors_that_of_the_lowest_rank_is_raised_on_all(rank: int) -> None:
    with pytest.raises(CorpusChanged) as raised:
        Peers(TIMEOUT).raise_together(CorpusChanged([f"rank {rank}"]))
    assert raised.value.changes == ("rank 0",)
    assert raised.value.reported_elsewhere == (rank == 1)


@on_two_ranks
def test_an_error_of_one_rank_is_raised_on_all(rank: int) -> None:
    peers = Peers(TIMEOUT)
    peers.raise_together(None)
    with pytest.raises(CorpusChanged) as raised:
        peers.raise_together(CorpusChanged(["files"]) if rank == 1 else None)
    assert raised.value.reported_elsewhere == (rank == 1) and raised.value.origin_rank == 1


@on_two_ranks
def test_an_error_that_pickle_cannot_carry_still_reaches_all(rank: int) -> None:
    peers = Peers(TIMEOUT)
    for error in (Stubborn("no", "so"), local_error()):
        with pytest.raises(Exception, match=str(error)) as raised:
            peers.raise_together(error if rank == 1 else None)
        assert (raised.value is error) == (rank == 1)
        with pytest.raises(Exception, match=str(error)) as raised:
            peers.on_coordinator(refuse(error))
        assert (raised.value is error) == (rank == 0)


def test_one_process_without_a_group_agrees_with_itself() -> None:
    consensus, peers = StepConsensus(TIMEOUT), Peers(TIMEOUT)
    consensus.send(StepFlags(save_due=True))
    assert consensus.receive() == StepFlags(save_due=True)
    assert (peers.rank, peers.world_size, peers.is_coordinator, peers.saves.group) == (0, 1, True, None)
    assert peers.on_coordinator(lambda: 5) == 5
    with pytest.raises(CorpusChanged) as raised:
        peers.raise_together(CorpusChanged(["files"]))
    assert not raised.value.reported_elsewhere


@on_two_ranks
def test_names_on_all_ranks_are_found_without_sending_them(rank: int) -> None:
    mine = {"shared", "also shared", f"of rank {rank}"}
    known = ["none", "also shared", "of rank 0", "of rank 1", "shared"]
    assert Peers(TIMEOUT).on_all_ranks(mine, known) == ["also shared", "shared"]
    assert Peers(TIMEOUT).on_all_ranks(set(), known) == []


def test_names_of_the_only_rank_are_on_all_ranks() -> None:
    assert Peers(TIMEOUT).on_all_ranks({"b", "c"}, ["a", "b", "c"]) == ["b", "c"]
