"""What someone could have left at a keeper in the place of an image, or next to it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from torchtitan_lite.checkpoint.staging import mark
from torchtitan_lite.checkpoint.staging.mark import PAGE_BYTES, Mark, Marked, read_mark
from torchtitan_lite.distributed.environment import runtime_folder
from torchtitan_lite.memory.images.card import Card, Commit
from torchtitan_lite.memory.keeper.client import HeldMemory, Keeper
from torchtitan_lite.memory.keeper.messages import MAX_ENTRIES


@contextmanager
def keeper_of(folder: Path) -> Iterator[tuple[Keeper, list[HeldMemory]]]:
    """Yield the keeper of `folder` and what it holds; the descriptors are closed after the block."""
    keeper = Keeper(folder, 60.0, runtime=runtime_folder())
    held = keeper.held()
    try:
        yield keeper, held
    finally:
        for each in held:
            each.close()


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the valid images at the keeper of `folder`, in order."""
    with keeper_of(folder) as (_, held):
        return sorted(marked.step for each in held if (marked := read_mark(each.mark_fd)) is not None)


def spoil(folder: Path, steps: Collection[int], how: Callable[[HeldMemory, Marked], None]) -> None:
    """Do `how` to the images of `steps` at the keeper of `folder`; there must be one."""
    with keeper_of(folder) as (_, held):
        found = [(each, marked) for each in held if (marked := read_mark(each.mark_fd)) is not None]
        chosen = [(each, marked) for each, marked in found if marked.step in steps]
        assert chosen
        for each, marked in chosen:
            how(each, marked)


def fill(folder: Path) -> None:
    """Have the keeper of `folder` hold as much as it can: no images, some of which say that they are valid."""
    with keeper_of(folder) as (keeper, held):
        for number in range(MAX_ENTRIES - len(held)):
            fds = os.memfd_create("arena"), os.memfd_create("mark")
            os.ftruncate(fds[0], 100)
            os.ftruncate(fds[1], PAGE_BYTES)
            if number % 2:
                os.pwrite(fds[1], b"\1", PAGE_BYTES - 8)
            keeper.keep(f"{number}", fds)
            for fd in fds:
                os.close(fd)


def other_bytes(held: HeldMemory, marked: Marked) -> None:
    """Change a byte of a tensor after the mark was set."""
    (byte,) = os.pread(held.arena_fd, 1, marked.num_bytes // 2)
    os.pwrite(held.arena_fd, bytes([byte ^ 1]), marked.num_bytes // 2)


def other_record(held: HeldMemory, marked: Marked) -> None:
    """Give the card other digests of its file."""

    def change(card: Card) -> Card:
        blocks = bytes([card.record.blocks[0] ^ 1]) + card.record.blocks[1:]
        return dataclasses.replace(card, record=dataclasses.replace(card.record, blocks=blocks))

    _change_card(held, marked, change)


def other_commit(held: HeldMemory, marked: Marked) -> None:
    """Let the card know another manifest of the latest step on disk."""
    _change_card(held, marked, lambda card: dataclasses.replace(card, commits=(Commit(3, "f" * 32),)))


def other_version(held: HeldMemory, marked: Marked) -> None:
    """Give the mark another format version, with the right digest."""
    fields = mark._FIELDS.pack(
        mark._MAGIC, 9, 0, marked.step, marked.num_bytes, PAGE_BYTES, len(marked.card), bytes(16)
    )
    for record in (1, 2):
        os.pwrite(held.mark_fd, fields + xxhash.xxh3_64_digest(fields), mark._record_at(record))


def shorter(held: HeldMemory, marked: Marked) -> None:
    """Cut the arena in the middle of its image."""
    os.ftruncate(held.arena_fd, marked.num_bytes // 2)


def empty(held: HeldMemory, marked: Marked) -> None:
    """Leave nothing of the arena and of the mark."""
    os.ftruncate(held.arena_fd, 0)
    os.ftruncate(held.mark_fd, 10)


HOW = (other_bytes, other_record, other_commit, other_version, shorter, empty)


def _change_card(held: HeldMemory, marked: Marked, change: Callable[[Card], Card]) -> None:
    found = Mark(os.dup(held.mark_fd))
    found.set(marked.step, marked.num_bytes, change(Card.parse(marked.card)).to_bytes())
    found.close()
