"""What ranks of several hosts need is read once, where the network is faster than that each of them reads all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import timedelta
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch

from tests.checkpoint.reading.cold_loads import NUM_BYTES, TIMEOUT, cold_step, load
from tests.ranks import Ranks
from torchtitan_lite.checkpoint.reading import shared_reads
from torchtitan_lite.checkpoint.reading.shared_reads import Relay, RelayedReader, Sharing
from torchtitan_lite.disk.block_reader import BlockReader, DamagedRange
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.read_requests import Piece, PieceTable
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import TorchtitanLiteError

ALWAYS = 1 << 60
MIB = 1 << 20


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A checkpoint of which nothing is in the page cache."""
    return cold_step(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "ranks_of_host"), [("ddp", 2), ("hsdp", 1)])
def test_hosts_read_each_byte_once(four_ranks: Ranks, step: Path, layout: str, ranks_of_host: int) -> None:
    found = four_ranks.run(load, step=step, layout=layout, ranks_of_host=ranks_of_host, tried=ALWAYS)
    assert [error for _, error, _ in found] == [""] * 4
    assert 0.9 * NUM_BYTES < sum(read for read, _, _ in found) < 1.1 * NUM_BYTES


@pytest.mark.slow
def test_each_rank_reads_all_by_itself_if_it_is_to(four_ranks: Ranks, step: Path) -> None:
    options = {"layout": "hsdp", "ranks_of_host": 2, "tried": ALWAYS, "verify": "full_alone"}
    found = four_ranks.run(load, step=step, **options)
    assert all(read > 0.45 * NUM_BYTES for read, _, _ in found)


@pytest.mark.slow
def test_a_rank_that_cannot_read_fails_the_load_on_all_and_none_waits(four_ranks: Ranks, step: Path) -> None:
    options = {"layout": "ddp", "fault": "EIO@read:times=always", "ranks_of_host": 2, "tried": ALWAYS}
    found = four_ranks.run(load, step=step, **options)
    assert all("rank 1" in error or "EIO" in error for _, error, _ in found), found
    assert all(seconds < TIMEOUT.total_seconds() / 2 for _, _, seconds in found)


@pytest.mark.slow
def test_damage_is_found_by_all_and_named(four_ranks: Ranks, step: Path) -> None:
    with (step / "__0_0.distcp").open("r+b") as file:
        file.seek(NUM_BYTES // 2)
        file.write(b"damage")
    found = four_ranks.run(load, step=step, layout="ddp", ranks_of_host=2, tried=ALWAYS)
    assert all("twice" in error and "weight" in error for _, error, _ in found), found


@pytest.mark.slow  # waits for time-outs
def test_a_rank_that_is_killed_is_noticed_by_all_others_in_time(step: Path) -> None:
    ranks = Ranks(4, grace_seconds=60)
    options = {
        "timeout": timedelta(seconds=5),
        "layout": "ddp",
        "fault": "kill@read:after=4",
        "ranks_of_host": 2,
        "tried": ALWAYS,
    }
    first, second, third, fourth = ranks.reports(load, step=step, **options)
    assert "exit code -9" in second.failure
    for report in (first, third, fourth):
        assert "PeerLost" in report.failure, report.failure


CONTENTS = {name: random.Random(name).randbytes(size) for name, size in (("a", 23 * MIB + 5), ("b", 7), ("c", 9 * MIB))}


def records(folder: Path) -> dict[Path, FileRecord]:
    for name, data in CONTENTS.items():
        (folder / name).write_bytes(data)
    return {folder / name: FileRecord.of(data) for name, data in CONTENTS.items()}


class Wrong(BlockReader):
    """Reads other bytes than the disk has, as a network could make of them."""

    def read(
        self, path: Path, record: FileRecord | None, pieces: Sequence[Piece], table: PieceTable | None = None
    ) -> None:
        super().read(path, record, pieces, table)
        for piece in pieces:
            if len(piece.into) >= MIB:
                piece.into[17] ^= 1


class Failing(BlockReader):
    """Cannot read the last file."""

    def read(
        self, path: Path, record: FileRecord | None, pieces: Sequence[Piece], table: PieceTable | None = None
    ) -> None:
        if path.name == "c":
            raise DamagedRange(path, 0, 1, "it is not there")
        super().read(path, record, pieces, table)


class Counting(BlockReader):
    """Counts what is read."""

    num_bytes = 0

    def read(
        self, path: Path, record: FileRecord | None, pieces: Sequence[Piece], table: PieceTable | None = None
    ) -> None:
        super().read(path, record, pieces, table)
        self.num_bytes += sum(len(piece.into) for piece in pieces)


def pieces_of(path: Path, number: int) -> tuple[list[Piece], list[tuple[int, memoryview]]]:
    """Return pieces of the file, the same on all ranks, and where each begins."""
    drawn = random.Random(f"{path.name} {number}")
    size = len(CONTENTS[path.name])
    cuts = sorted({0, size, *(drawn.randrange(size + 1) for _ in range(drawn.randrange(40)))})
    pieces = [Piece(begin, memoryview(bytearray(end - begin))) for begin, end in pairwise(cuts) if drawn.random() < 0.8]
    return pieces, [(piece.at, piece.into) for piece in pieces]


def read_all(
    rank: int,
    folder: Path,
    own: dict[int, type[BlockReader]],
    number: int,
    leaves: int | None = None,
    slow: bool = False,
) -> tuple[int, list[str]]:
    """Return how much this rank read by itself, and what failed; every other byte is compared."""
    known = {folder / name: FileRecord.of(data) for name, data in CONTENTS.items()}
    reader = own.get(rank, Counting)()
    ticks = count(step=1000 if slow else 0)
    shared_reads.TRIED_BYTES, shared_reads.LEAST_BYTES = MIB, 0
    relay = Relay(Peers(timedelta(seconds=60)), [2, 0, 3, 1])
    together = RelayedReader(reader, reader, relay, lambda: float(next(ticks)))
    errors = []
    torch.set_default_device("meta")
    for path in sorted(known):
        if rank == leaves and path.name == "b":
            break
        pieces, expected = pieces_of(path, number)
        try:
            together.read(path, known[path], pieces)
        except (DamagedRange, TorchtitanLiteError) as error:
            errors.append(str(error))
            break
        for begin, found in () if isinstance(reader, Wrong) else expected:
            assert found == CONTENTS[path.name][begin : begin + len(found)], (path, begin)
    together.leave()
    torch.set_default_device(None)
    return getattr(reader, "num_bytes", 0), errors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
def test_any_pieces_of_several_files_come_as_they_are(four_ranks: Ranks, folder: Path, number: int) -> None:
    found = four_ranks.run(read_all, folder=folder, own={}, number=number)
    assert [errors for _, errors in found] == [[]] * 4
    total = sum(map(len, CONTENTS.values()))
    assert sum(num_bytes for num_bytes, _ in found) <= total
    assert max(num_bytes for num_bytes, _ in found) < 0.5 * total


@pytest.mark.slow
def test_wrong_bytes_of_another_rank_are_read_again(four_ranks: Ranks, folder: Path) -> None:
    assert [errors for _, errors in four_ranks.run(read_all, folder=folder, own={1: Wrong}, number=0)] == [[]] * 4


def test_the_others_read_what_a_failing_rank_does_not(four_ranks: Ranks, folder: Path) -> None:
    found = four_ranks.run(read_all, folder=folder, own={3: Failing}, number=0)
    assert [errors for _, errors in found[:3]] == [[]] * 3
    assert "it is not there" in found[3][1][0]


def test_the_others_continue_without_a_rank_that_failed_elsewhere(four_ranks: Ranks, folder: Path) -> None:
    assert [errors for _, errors in four_ranks.run(read_all, folder=folder, own={}, number=0, leaves=2)] == [[]] * 4


def read_into_memory_that_takes_nothing(rank: int, folder: Path) -> str:
    """Return what failed on this rank; that of rank 2 cannot be written."""
    shared_reads.TRIED_BYTES, shared_reads.LEAST_BYTES = MIB, 0
    reader, path, data = Counting(), folder / "a", CONTENTS["a"]
    peers = Peers(timedelta(seconds=60))
    together = RelayedReader(reader, reader, Relay(peers, [0, 1, 2, 3]))
    found = bytearray(len(data))
    into = memoryview(bytes(len(data))) if rank == 2 else memoryview(found)
    failure = ""
    try:
        together.read(path, FileRecord.of(data), [Piece(0, into)])
    except (TypeError, ValueError) as error:
        failure = type(error).__name__
    together.leave()
    peers.raise_together(None)  # As a load does: a rank that leaves before takes what it has to pass on with it.
    assert failure or found == data
    return failure


def test_what_fails_while_a_part_is_put_in_its_place_is_raised_on_its_rank_only(
    four_ranks: Ranks, folder: Path
) -> None:
    found = four_ranks.run(read_into_memory_that_takes_nothing, folder=folder)
    assert found[2] and not any((*found[:2], found[3]))


@pytest.mark.slow
def test_each_rank_reads_for_itself_once_that_is_faster(four_ranks: Ranks, folder: Path) -> None:
    found = four_ranks.run(read_all, folder=folder, own={}, number=0, slow=True)
    together = four_ranks.run(read_all, folder=folder, own={}, number=0)
    assert sum(num_bytes for num_bytes, _ in found) > 2 * sum(num_bytes for num_bytes, _ in together)


def read_slowly(rank: int, folder: Path, breaks: bool = False) -> int:
    """Return how much a rank with a slow disk reads of a file; if it `breaks`, one has no memory for messages.

    By the clock only reads of the disk take time.
    """
    path, data = folder / "d", random.Random("d").randbytes(97 * MIB)
    if rank == 0:
        path.write_bytes(data)
    peers, reader = Peers(timedelta(seconds=60)), Counting()
    peers.raise_together(None)
    shared_reads.TRIED_BYTES, shared_reads.LEAST_BYTES = 32 * MIB, MIB
    make = shared_reads.request_memory
    if breaks and rank == 2:
        shared_reads.request_memory = no_memory
    try:
        together = RelayedReader(reader, reader, Relay(peers, [0, 1, 2, 3]), lambda: reader.num_bytes / 5e7)
    finally:
        shared_reads.request_memory = make
    found = bytearray(len(data))
    together.read(path, FileRecord.of(data), [Piece(0, memoryview(found))])
    together.leave()
    assert found == data
    return reader.num_bytes


def no_memory(num_bytes: int) -> memoryview:
    raise MemoryError(num_bytes)


@pytest.mark.slow
def test_a_slow_disk_is_read_once(four_ranks: Ranks, tmp_path: Path) -> None:
    found = four_ranks.run(read_slowly, folder=tmp_path)
    assert max(found) <= 28 * MIB


@pytest.mark.slow
def test_all_read_for_themselves_if_one_has_no_memory_to_take_part(four_ranks: Ranks, tmp_path: Path) -> None:
    found = four_ranks.run(read_slowly, folder=tmp_path, breaks=True)
    assert found == [97 * MIB] * 4


@pytest.mark.parametrize(
    ("reads", "hosts", "on_host", "over_hosts", "is_anywhere"),
    [
        ([7, 7, 7, 7], [1, 1, 1, 1], [0, 1, 2, 3], [], True),
        ([7, 8, 7, 8], [1, 1, 1, 1], [0, 2], [], True),
        ([7, 8, 9, 6], [1, 1, 1, 1], [0], [], False),
        ([7, 7, 7, 7], [2, 1, 2, 1], [0, 2], [1, 3, 0, 2], True),
        ([7, 8, 7, 8], [1, 1, 2, 2], [0], [0, 2], False),
        ([7, 8, 9, 8], [1, 2, 2, 2], [0], [], True),
    ],
)
def test_who_reads_together(
    reads: list[int], hosts: list[int], on_host: list[int], over_hosts: list[int], is_anywhere: bool
) -> None:
    found = Sharing.of(0, reads, hosts)
    assert ([*found.on_host], [*found.over_hosts], found.is_anywhere) == (on_host, over_hosts, is_anywhere)
