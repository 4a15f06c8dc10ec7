"""Exchanges go over hosts, and give the same however ranks are on these."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from tests.ranks import Ranks
from torchtitan_lite.distributed import exchange as module
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointNotFound

HOSTS = {"one": [0, 0, 0, 0], "two": [0, 0, 1, 1], "mixed": [0, 1, 1, 0], "uneven": [0, 1, 1, 1], "four": [3, 2, 1, 0]}


def tree_of(rank: int, hosts: list[int]) -> Peers:
    """Return the ranks of these hosts."""
    module.host_id = lambda: f"host {hosts[rank]}"
    return Peers(timedelta(seconds=30))


def exchange(rank: int, hosts: list[int]) -> list[object]:
    peers = tree_of(rank, hosts)
    torch.set_default_device("meta")  # A loop may build its model so.
    try:
        empty = {} if rank == 2 else {"rank": rank, "data": bytes(1 << 20 if rank == 3 else 3)}
        found: list[object] = [peers.gather(empty), peers.gather(None)]
        found.append(peers.scatter_answers(rank, lambda given: [(each, sum(given)) for each in given]))
        found.append(peers.scatter_answers("x" * rank, lambda given: [len("".join(given)) * each for each in given]))
        for raises in (0, 3):
            try:
                peers.gather(peers.together(lambda raises=raises: refuse(rank == raises)))  # type: ignore[misc]
            except CheckpointNotFound as error:
                found.append((str(error), error.origin_rank))
        try:
            peers.scatter_answers(rank, refuse_all)
        except CheckpointNotFound as error:
            found.append(str(error))
        return found
    finally:
        torch.set_default_device(None)
        peers.close()


def refuse(raises: bool) -> int:
    if raises:
        raise CheckpointNotFound("outputs", 7)
    return 5


def refuse_all(given: list[int]) -> list[int]:
    raise CheckpointNotFound("none of them", 5)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_ranks_get_what_all_gave_and_what_one_raised_wherever_they_are(four_ranks: Ranks, hosts: list[int]) -> None:
    for rank, found in enumerate(four_ranks.run(exchange, hosts=hosts)):
        first, nothing, answer, text, *raised, refused = found
        assert first == [{"rank": 0, "data": bytes(3)}, {"rank": 1, "data": bytes(3)}, {}, first[3]]
        assert (first[3]["rank"], len(first[3]["data"])) == (3, 1 << 20)
        assert (nothing, answer, text) == ([None] * 4, (rank, 6), 6 * "x" * rank)
        assert [origin for _, origin in raised] == [0, 3]
        assert "none of them" in refused


def lose(rank: int, hosts: list[int]) -> str:
    peers = Peers(timedelta(seconds=5))
    module.host_id = lambda: f"host {hosts[rank]}"
    peers.gather_number(1)
    if rank == 3:
        return "left"
    try:
        peers.gather(rank)
    except Exception as error:
        return type(error).__name__
    return "nothing raised"


@pytest.mark.slow  # waits for a time-out
def test_a_rank_that_does_not_take_part_is_a_lost_peer_on_the_others(tmp_path: object) -> None:
    ranks = Ranks(4, once=True, grace_seconds=40)
    assert ranks.run(lose, hosts=[0, 0, 1, 1]) == ["PeerLost"] * 3 + ["left"]
