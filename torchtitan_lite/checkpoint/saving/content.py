"""What a rank's file is written from: the live tensors, or a copy of them in the staging arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.saving.rank_image import RankImage
from torchtitan_lite.checkpoint.saving.writer import RankContent, Target
from torchtitan_lite.checkpoint.staging.stager import Staged, Stager
from torchtitan_lite.checkpoint.staging.watch import StagingWatch
from torchtitan_lite.disk.block_writer import Bounced, InPlace, write_blocks
from torchtitan_lite.disk.digest import FileRecord

WriteStaged = Callable[[Path, Staged, Target], FileRecord]
"""Writes the file of a staged image to a path, durably."""


def live_content(image: RankImage, target: Target) -> RankContent:
    """Return what writes the live tensors of `image`, through a buffer: nothing is held twice.

    Training must wait until it is written.
    """
    file, durable = image.file, target.store.durable
    _wait_for_devices(file.tensors)
    return RankContent(
        image.plan,
        image.objects,
        file.num_bytes,
        tensors=lambda: file.tensors,
        write=lambda path: write_blocks(path, Bounced(file.num_bytes, file.fill), durable=durable),
    )


def _wait_for_devices(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for what this thread queued on devices: other threads, which read `tensors`, have streams of their own."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


class Copies:
    """Copies images into the arena of `stager`; `write` writes them from there, `watch` checks each copy."""

    def __init__(self, stager: Stager, write: WriteStaged, watch: StagingWatch) -> None:
        self.stager = stager
        self._write = write
        self._watch = watch

    def content(self, image: RankImage, target: Target) -> RankContent:
        """Begin to copy `image`, and return what writes the copy. Main thread; the last copy must be written."""
        faults.point("stage", step=target.step)
        compare = self._watch(image.file, [item.index.fqn for item in image.plan.items])
        staged = self.stager.take(image.file)
        # Without the image, so that tensors which are copies of the state's own can go as soon as they are staged.
        return RankContent(
            image.plan,
            image.objects,
            image.file.num_bytes,
            tensors=staged.tensors,
            write=lambda path: self._write(path, staged, target),
            wait=lambda: compare(staged),
        )


def write_in_place(path: Path, staged: Staged, target: Target) -> FileRecord:
    """Write the file from the arena, in this process."""
    return write_blocks(path, InPlace(staged.arena.memory, staged.num_bytes), durable=target.store.durable)
