"""Objects that are sent alongside an exchange: each as long as it is, and none taken for another."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from tests.ranks import on_two_ranks
from torchtitan_lite.distributed.exchange import SMALL_BYTES, SentApart
from torchtitan_lite.distributed.groups import destroy, gloo_group


def test_the_only_process_gets_its_own() -> None:
    apart = SentApart[str](None)
    assert apart.received(0, apart.send("mine")) == "mine"


@on_two_ranks
def test_the_coordinator_gets_what_each_rank_gave_long_or_short(rank: int) -> None:
    group = gloo_group(timedelta(seconds=30))
    for size in (1, SMALL_BYTES, 3 << 20):
        apart = SentApart[bytes](group)
        sent = apart.send(bytes([rank]) * size)
        assert len(str(sent)) < 5 * SMALL_BYTES, "the exchange carries no long object"
        exchanged = [None, None] if rank == 0 else None
        dist.gather_object(sent, exchanged, dst=0, group=group)
        if exchanged is not None:
            assert [apart.received(each, of) for each, of in enumerate(exchanged)] == [bytes(size), b"\1" * size]
        dist.barrier(group)
    destroy(group)


@on_two_ranks
def test_what_was_not_taken_is_not_taken_for_what_comes_later(rank: int) -> None:
    group = gloo_group(timedelta(seconds=30))
    lost = SentApart[bytes](group)
    lost.send(b"a" * 5000)
    apart = SentApart[bytes](group)
    sent = apart.send(b"b" * 5000)
    exchanged = [None, None] if rank == 0 else None
    dist.gather_object(sent, exchanged, dst=0, group=group)
    if exchanged is not None:
        assert apart.received(1, exchanged[1]) == b"b" * 5000
    dist.barrier(group)
    destroy(group)
