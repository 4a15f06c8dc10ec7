"""Images that a rank lacks on its host and another host has: they come through the process group of the job.

So a host that was replaced gets its part from the replicas at its neighbour, and ranks that are on other hosts than
before get theirs from those.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from torchtitan_lite.checkpoint.staging.mark import Mark, Marked, read_mark
from torchtitan_lite.disk.shared_memory import map_shared
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.log import counted, logger, readable_bytes
from torchtitan_lite.memory.keeper.client import HeldMemory

CHUNK_BYTES = 64 << 20
"""Of one message: what was sent is in the sender's memory until it was received."""


class Move(NamedTuple):
    """Rank `source` sends the image of rank `rank` to it."""

    source: int
    rank: int


class _Announced(NamedTuple):
    """What a rank is about to send."""

    marked: Marked
    arena_bytes: int


def moves(where: Sequence[frozenset[int]]) -> list[Move]:
    """Return who sends what, if `where` has by rank the ranks whose images are on its host. The same on every rank.

    Those that have an image share the work evenly.
    """
    num_sent = [0] * len(where)
    found = []
    for rank, images in enumerate(where):
        having = [source for source, theirs in enumerate(where) if rank in theirs]
        if rank not in images and having:
            source = min(having, key=lambda each: (num_sent[each], each))
            num_sent[source] += 1
            found.append(Move(source, rank))
    return found


def fetched(to_move: Sequence[Move], here: Mapping[int, HeldMemory], peers: Peers) -> HeldMemory | None:
    """Send and receive what `to_move` says; return what this rank received, which the caller owns. **Collective**.

    `here` has the images on this host, by rank. What arrives is not verified: a load does that. Raises OSError on every
    rank where one has no memory.
    """
    if not to_move:
        return None
    began = time.monotonic()
    mine = {move.rank: _announced(here[move.rank]) for move in to_move if move.source == peers.rank}
    announced = {rank: each for of_rank in peers.gather(mine) for rank, each in of_rank.items()}
    own = announced.get(peers.rank)
    # All ranks have theirs before the first byte is sent, or none sends any.
    memory = peers.together(lambda: None if own is None else _staging_memory(own.arena_bytes))
    waits: list[Callable[[], object]] = []
    for move in to_move:
        num_bytes = announced[move.rank].marked.num_bytes
        if move.source == peers.rank:
            view = map_shared(here[move.rank].arena_fd, num_bytes)
            waits += [peers.relay(part, None, move.rank) for part in _memory_chunks(view)]
        elif move.rank == peers.rank and memory is not None:
            for part in _memory_chunks(map_shared(memory, num_bytes)):
                peers.relay(part, move.source, None)
    for wait in waits:
        wait()
    if peers.is_coordinator:
        logger.info(
            "The images of %s (%s) came from the memory of other hosts in %.1f s",
            counted(len(to_move), "rank"),
            readable_bytes(sum(each.marked.num_bytes for each in announced.values())),
            time.monotonic() - began,
        )
    if own is None or memory is None:
        return None
    mark = Mark()
    mark.set(own.marked.step, own.marked.num_bytes, own.marked.card)
    mark_fd = os.dup(mark.fd)
    mark.close()
    return HeldMemory("", memory, mark_fd, is_mapped=False)


def _announced(image: HeldMemory) -> _Announced:
    marked = read_mark(image.mark_fd)
    assert marked is not None, "it was valid when this start looked, and nothing writes into it"
    return _Announced(marked, os.fstat(image.arena_fd).st_size)


def _staging_memory(num_bytes: int) -> int:
    fd = os.memfd_create("torchtitan_lite-staging", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _memory_chunks(view: memoryview) -> list[torch.Tensor]:
    whole = (
        torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return list(torch.split(whole, CHUNK_BYTES))
