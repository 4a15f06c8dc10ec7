"""What a rank writes its file from: the live tensors, or a copy of them in the staging arena."""

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
    """Return content that writes the live tensors of `image` through a small buffer, without a copy.

    The state must not change until the file is written. Waits for the devices of the tensors.
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
    """Wait for what this thread queued on devices: the threads that read `tensors` have their own streams."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


class Copies:
    """Copies images into the arena of `stager`; `write` writes a file from there, `watch` checks each copy."""

    def __init__(self, stager: Stager, write: WriteStaged, watch: StagingWatch) -> None:
        self.stager = stager
        self._write = write
        self._watch = watch

    def content(self, image: RankImage, target: Target) -> RankContent:
        """Begin to copy `image`, and return content that writes the copy. Main thread.

        The copy replaces the last one, which must be written by now.
        """
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
    """Write the staged image to `path` in this process, durably."""
    return write_blocks(path, InPlace(staged.arena.memory, staged.num_bytes), durable=target.store.durable)
