"""Ranks of a host pass bytes to each other, and none depends on another one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.descriptors import num_open_of
from tests.descriptors import opened as opened_paths
from torchtitan_lite.distributed.host_exchange import SLOT_BYTES, SLOTS, HostExchange, Ring, opened_rings

PATIENCE = 60.0


def exchanges(count: int, patience: float = PATIENCE) -> list[HostExchange]:
    """Return the exchange of each of `count` ranks, all in this process."""
    rings = [Ring.make() for _ in range(count)]
    numbers = [ring.number for ring in rings]
    found = [opened_rings(ring, numbers, position) for position, ring in enumerate(rings)]
    return [HostExchange(each, position, patience) for position, each in enumerate(found) if each is not None]


@pytest.fixture
def three() -> Iterator[list[HostExchange]]:
    ranks = exchanges(3)
    yield ranks
    for rank in ranks:
        rank.close()


def taken(rank: HostExchange, number: int, key: str) -> bytes | None:
    found = rank.take(number, key)
    return None if found is None else bytes(found)


def test_each_request_is_made_by_one_rank_and_taken_by_the_others(three: list[HostExchange]) -> None:
    num_requests = 5 * 3 * SLOTS  # Each slot is filled several times.
    made: list[list[int]] = [[], [], []]
    wrong: list[int] = []

    def run(position: int) -> None:
        rank = three[position]
        first = rank.reserve(num_requests)
        for number in range(first, first + num_requests):
            data = taken(rank, number, f"request {number}")
            if data is None:
                made[position].append(number)
                rank.offer(number, f"request {number}", memoryview(number.to_bytes(8, "little")))
            elif data != number.to_bytes(8, "little"):
                wrong.append(number)
            rank.release(number)

    threads = [threading.Thread(target=run, args=(position,)) for position in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert made == [[*range(position, num_requests, 3)] for position in range(3)]


def test_another_request_of_the_same_number_is_not_taken(three: list[HostExchange]) -> None:
    three[0].offer(0, "one", memoryview(b"data"))
    assert taken(three[1], 0, "another") is None
    assert taken(three[1], 0, "one") == b"data"


def test_a_request_that_a_later_one_has_overtaken_is_not_offered(three: list[HostExchange]) -> None:
    later = 3 * SLOTS  # In the same slot.
    three[0].offer(later, "later", memoryview(b"later"))
    three[0].offer(0, "slow", memoryview(b"slow"))
    assert taken(three[1], 0, "slow") is None
    assert taken(three[1], later, "later") == b"later"


def test_what_was_taken_stays_as_it_was(three: list[HostExchange]) -> None:
    three[0].offer(0, "first", memoryview(b"first"))
    held = three[1].take(0, "first")
    for rank in three[1:]:
        rank.release(3 * SLOTS)  # Another thread of each is a turn ahead.
    three[0].offer(3 * SLOTS, "later", memoryview(b"later"))
    assert held == b"first"
    assert taken(three[2], 0, "first") is None


def test_many_threads_of_slow_and_fast_requests_take_nothing_wrong(three: list[HostExchange]) -> None:
    num_requests, size = 40 * 3 * SLOTS, 1 << 16
    wrong: list[int] = []

    def run(rank: HostExchange) -> None:
        numbers, lock = iter(range(num_requests)), threading.Lock()
        rank.reserve(num_requests)

        def work() -> None:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                expected = number.to_bytes(8, "little") * (size // 8)
                data = rank.take(number, str(number))
                if data is None:
                    if number % 7 == 0:
                        sum(range(200_000))  # This request takes longer than those after it.
                    rank.offer(number, str(number), memoryview(expected))
                elif data != expected:
                    wrong.append(number)
                rank.release(number)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in three]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert wrong == []


def test_what_is_too_long_for_a_slot_is_made_by_each_rank(three: list[HostExchange]) -> None:
    three[0].offer(0, "one", memoryview(bytes(SLOT_BYTES + 1)))
    assert taken(three[1], 0, "one") is None
    three[1].offer(1, "two", memoryview(bytes(SLOT_BYTES)))
    assert taken(three[0], 1, "two") == bytes(SLOT_BYTES)


def test_only_the_rank_whose_request_it_is_offers_it(three: list[HostExchange]) -> None:
    three[1].offer(0, "one", memoryview(b"wrong"))
    three[0].close()
    assert taken(three[1], 0, "one") is None
    three[:] = three[1:]


def test_a_rank_that_has_left_is_waited_for_by_none(three: list[HostExchange]) -> None:
    three[0].offer(0, "one", memoryview(b"data"))
    three[0].leave()
    three.pop(0).close()
    assert taken(three[0], 0, "one") == b"data"  # It was offered before.
    assert taken(three[0], 3, "two") is None
    for number in range(1, 3 * SLOTS * 3, 3):  # All of rank 1, whose slots rank 0 does not release any more.
        three[0].offer(number, "mine", memoryview(b"x"))
        three[1].release(number)


def test_a_silent_rank_is_waited_for_once() -> None:
    ranks = exchanges(2, patience=0.01)
    assert [taken(ranks[0], number, "silent") for number in (1, 3, 5)] == [None] * 3
    for number in range(0, 4 * SLOTS, 2):  # Rank 1 releases nothing.
        ranks[0].offer(number, "mine", memoryview(b"x"))
    assert taken(ranks[1], 0, "mine") == b"x"
    for rank in ranks:
        rank.close()


def test_memory_that_is_no_ring_is_refused() -> None:
    mine = Ring.make()
    assert opened_rings(mine, [mine.number, mine.number ^ 1], 0) is None
    gone = Ring.make()
    number = gone.number
    gone.close()
    again = Ring.make()
    assert opened_rings(again, [again.number, number], 0) is None


def test_a_file_of_another_process_is_refused_and_nothing_stays_open(tmp_path: Path) -> None:
    mine = Ring.make()
    with (tmp_path / "short").open("w+b") as file:
        number = ((os.getpid() << 20 | file.fileno()) << 20) | 1
        before = opened_paths().count(file.name)
        assert opened_rings(mine, [mine.number, number], 0) is None
        assert opened_paths().count(file.name) == before
        # Also one that looks like a ring of that number.
        file.write((1).to_bytes(8, sys.byteorder))
        file.truncate(2 * SLOTS * SLOT_BYTES)
        mine = Ring.make()
        assert opened_rings(mine, [mine.number, number], 0) is None


def test_nothing_of_an_exchange_stays_open() -> None:
    for rank in exchanges(3):
        rank.close()
    assert num_open_of("torchtitan_lite-exchange") == 0
