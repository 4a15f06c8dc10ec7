"""The mark and the card of an image: what one process writes, another one reads after the first was killed."""

import dataclasses
import os
import signal

import pytest
import xxhash

from tests.checkpoint.images.cards import CARD
from torchtitan_lite.checkpoint.staging.mark import (
    _FIELDS,
    _MAGIC,
    _VERSION,
    CARD_BYTES,
    CARD_RATIO,
    PAGE_BYTES,
    Mark,
    UnusableMark,
    _record_at,
    read_mark,
)
from torchtitan_lite.memory.images.card import Card, CardTables
from torchtitan_lite.store.manifest import Table


def test_a_card_is_read_as_it_was_written() -> None:
    found = Card.parse(CARD.to_bytes())
    assert dataclasses.replace(found, tables=CARD.tables) == CARD
    for table, expected in zip(found.tables, CARD.tables, strict=True):
        assert dict(table) == dict(expected)


def test_a_card_of_another_rank_than_the_coordinator_has_no_tables() -> None:
    found = Card.parse(dataclasses.replace(CARD, tables=CardTables(Table()), commits=()).to_bytes())
    assert (found.tables.tensors, found.tables.structure, found.commits) == (None, None, ())


@pytest.mark.parametrize(
    ("changed", "finding"),
    [
        ((b'"rank":1', b'"rank":2'), "expected a rank below 2, found 2"),
        ((b'"step":7', b'"step":-7'), "step: expected at least 0"),
        ((b'"file":"__1', b'"file":"../1'), "is not the name of a file"),
        ((b'"size":3', b'"size":3000000'), "expected the digests of 3 blocks"),
        ((b"\n", b" "), "expected 4 lines"),
        ((b'"start":"a1"', b'"start":1'), "start: expected str"),
    ],
)
def test_a_card_with_a_wrong_field_is_refused_by_name(changed: tuple[bytes, bytes], finding: str) -> None:
    with pytest.raises(ValueError, match=finding):
        Card.parse(CARD.to_bytes().replace(*changed))


def test_a_mark_says_nothing_until_it_is_set_and_after_it_is_cleared() -> None:
    mark = Mark()
    assert read_mark(mark.fd) is None
    mark.set(7, 100, b"card")
    found = read_mark(mark.fd)
    assert found is not None
    assert (found.step, found.num_bytes, found.card) == (7, 100, b"card")
    mark.clear()
    assert read_mark(mark.fd) is None
    mark.set(8, 100, b"")
    again = read_mark(mark.fd)
    assert again is not None
    assert (again.step, again.card) == (8, b"")
    mark.close()
    mark.close()


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (100, 3, 99, 5000), (1, 9000, 2, 9000), (0, 0, 7, 0)])
def test_a_card_takes_the_place_of_another_one_and_the_one_before_stays_as_it_was(sizes: tuple[int, ...]) -> None:
    mark = Mark()
    cards = [bytes([number]) * size for number, size in enumerate(sizes)]
    for number, card in enumerate(cards):
        before = os.pread(mark.fd, 1 << 20, 0)
        mark.set(7, 100, card)
        found = read_mark(mark.fd)
        assert found is not None
        assert found.card == card
        if number:
            # A process that was killed before the last store: the word is the one before.
            os.pwrite(mark.fd, before[PAGE_BYTES - 8 : PAGE_BYTES], PAGE_BYTES - 8)
            killed = read_mark(mark.fd)
            assert killed is not None
            assert killed.card == cards[number - 1]
            mark.set(7, 100, card)
    mark.close()


def test_another_process_never_sees_a_valid_mark_without_an_image_while_its_card_is_replaced() -> None:
    mark = Mark()
    mark.set(7, 100, b"first")
    child = os.fork()
    if child == 0:
        while True:  # Until it is killed, as a job might be, at any moment.
            for card in (b"second", b"third"):
                mark.set(7, 100, card)
    try:
        missing = sum(os.pread(mark.fd, 8, PAGE_BYTES - 8) == bytes(8) for _ in range(200_000))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert missing == 0
    assert read_mark(mark.fd) is not None


def test_a_mark_that_a_killed_process_set_is_read() -> None:
    mark = Mark()
    child = os.fork()
    if child == 0:
        mark.set(9, 10, b"of the child")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    found = read_mark(mark.fd)
    assert found is not None
    assert (found.step, found.card) == (9, b"of the child")


@pytest.mark.parametrize(
    ("at", "finding"),
    [
        (0, "it does not begin as an in-memory snapshot does"),
        (8, "format version"),
        (20, "its valid flag does not match its digest"),
        (33, "digest"),
        (PAGE_BYTES, "its header does not match its digest"),
    ],
)
def test_a_mark_with_a_changed_byte_is_refused(at: int, finding: str) -> None:
    mark = Mark()
    mark.set(7, 100, b"card")
    (byte,) = os.pread(mark.fd, 1, at)
    os.pwrite(mark.fd, bytes([byte ^ 0x40]), at)
    with pytest.raises(UnusableMark, match=finding):
        read_mark(mark.fd)


def test_a_mark_that_was_cut_is_refused() -> None:
    mark = Mark()
    mark.set(7, 100, b"card")
    os.ftruncate(mark.fd, PAGE_BYTES + 1)
    with pytest.raises(UnusableMark, match="header of 4 bytes is missing"):
        read_mark(mark.fd)
    os.ftruncate(mark.fd, 10)
    with pytest.raises(UnusableMark, match="10 bytes"):
        read_mark(mark.fd)


def test_a_card_that_was_never_written_is_not_read() -> None:
    mark = Mark()
    card = bytes(PAGE_BYTES)
    mark.set(7, 1 << 30, card * 20_000)
    os.truncate(mark.fd, PAGE_BYTES + len(card) * 9_999)  # What is cut off here comes back as a hole.
    os.truncate(mark.fd, PAGE_BYTES + len(card) * 20_000)
    with pytest.raises(UnusableMark, match="header of 81920000 bytes is missing"):
        read_mark(mark.fd)
    mark.close()


def test_a_card_that_is_too_long_for_its_image_is_refused_by_writer_and_reader() -> None:
    mark, card = Mark(), bytes(CARD_BYTES + CARD_RATIO)
    mark.set(7, 1, card)
    found = read_mark(mark.fd)
    assert found is not None
    assert len(found.card) == len(card)
    with pytest.raises(ValueError, match=f"its header has {len(card)} bytes, {CARD_BYTES} are allowed for 0 bytes"):
        mark.set(7, 0, card)
    mark.clear()
    mark.set(7, 1, card)
    _claim_other_size(mark, 0, card)
    with pytest.raises(UnusableMark, match="are allowed for 0 bytes"):
        read_mark(mark.fd)
    mark.close()


def _claim_other_size(mark: Mark, num_bytes: int, card: bytes) -> None:
    fields = _FIELDS.pack(_MAGIC, _VERSION, 0, 7, num_bytes, PAGE_BYTES, len(card), xxhash.xxh3_128_digest(card))
    for number in (1, 2):
        os.pwrite(mark.fd, fields + xxhash.xxh3_64_digest(fields), _record_at(number))
