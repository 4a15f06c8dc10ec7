"""What several ranks of a host need is read from the disk once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.reading.cold_loads import NUM_BYTES, TIMEOUT, cold_step, load
from tests.ranks import Ranks
from torchtitan_lite.checkpoint.reading import shared_reads
from torchtitan_lite.distributed.host_exchange import HostExchange
from torchtitan_lite.distributed.peers import Peers


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A checkpoint of which nothing is in the page cache."""
    return cold_step(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "hsdp"])
def test_the_disk_reads_each_byte_once_for_all_ranks_of_a_host(four_ranks: Ranks, step: Path, layout: str) -> None:
    found = four_ranks.run(load, step=step, layout=layout)
    assert [error for _, error, _ in found] == [""] * 4
    assert 0.9 * NUM_BYTES < sum(read for read, _, _ in found) < 1.1 * NUM_BYTES


@pytest.mark.slow
def test_a_rank_that_cannot_read_fails_the_load_on_all_and_none_waits(four_ranks: Ranks, step: Path) -> None:
    found = four_ranks.run(load, step=step, layout="ddp", fault="EIO@read:times=always")
    assert all("rank 1" in error or "EIO" in error for _, error, _ in found), found
    assert all(seconds < TIMEOUT.total_seconds() / 2 for _, _, seconds in found)


def test_small_reads_ask_nothing_of_other_ranks(four_ranks: Ranks, tmp_path: Path) -> None:
    assert four_ranks.run(small_is_shared, folder=tmp_path) == [False] * 4


def small_is_shared(rank: int, folder: Path) -> bool:
    reads = shared_reads.SharedReads(shared_reads.RankReads(), Peers(TIMEOUT))
    with reads.exchange() as exchange:
        return reads.is_shared() or isinstance(exchange, HostExchange)
