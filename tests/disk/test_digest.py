"""Digests are part of the format: the same bytes have the same digests in every version."""

from __future__ import annotations

import pytest

from torchtitan_lite.disk.digest import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    BlockDigest,
    block_digest,
    digest_blocks,
    num_blocks,
    text_digest,
)

SOME = b"abc"
TWO_BLOCKS = bytes(1 << 20) + SOME


def test_a_block_is_a_mebibyte_and_its_digest_the_eight_bytes_of_xxh3() -> None:
    assert (BLOCK_BYTES, DIGEST_BYTES) == (1_048_576, 8)
    assert block_digest(b"").hex() == "2d06800538d394c2"
    assert block_digest(SOME).hex() == "78af5f94892f3950"
    assert digest_blocks(TWO_BLOCKS) == block_digest(bytes(1 << 20)) + block_digest(SOME)


def test_a_block_that_is_digested_piece_by_piece_has_the_same_digest() -> None:
    digest = BlockDigest()
    for piece in (b"a", b"", b"bc"):
        digest.update(piece)
    assert digest.digest() == block_digest(SOME)


def test_the_digest_of_a_text_is_that_of_its_parts_one_after_another() -> None:
    assert text_digest([b"a", b"bc"]) == text_digest([SOME]) == "06b05ab6733a618578af5f94892f3950"


@pytest.mark.parametrize(("size", "count"), [(0, 0), (1, 1), (1 << 20, 1), ((1 << 20) + 1, 2), (5 << 20, 5)])
def test_the_last_block_of_a_file_may_be_shorter(size: int, count: int) -> None:
    assert num_blocks(size) == count
    assert len(digest_blocks(bytes(size))) == count * DIGEST_BYTES


def test_bytes_are_digested_whatever_the_unit_of_their_memory() -> None:
    view = memoryview(bytearray(TWO_BLOCKS[-8:])).cast("I")
    assert digest_blocks(view) == digest_blocks(bytes(view))
