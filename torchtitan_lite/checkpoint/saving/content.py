"""What a rank writes its file from: the live tensors, or a copy of them in the staging arena."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.saving.image import Image
from torchtitan_lite.checkpoint.saving.images import Images
from torchtitan_lite.checkpoint.saving.rank_image import RankImage
from torchtitan_lite.checkpoint.saving.writer import RankContent, Target
from torchtitan_lite.checkpoint.staging.pool import Slot
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
    """Copies images into the arenas of `stager`; `write` writes a file from there, `watch` checks each copy.

    With `images` each copy becomes an image in memory, whether or not its file is written.
    """

    def __init__(self, stager: Stager, write: WriteStaged, watch: StagingWatch, images: Images | None = None) -> None:
        self.stager = stager
        self.images = images
        self._write = write
        self._watch = watch
        self._written: deque[Slot] = deque()
        """Those of saves that are not over, in order. The end of one may be noted after the next one has its copy."""

    def content(self, image: RankImage, target: Target) -> RankContent:
        """Begin to copy `image`, and return content that writes the copy. Main thread.

        With one arena the copy replaces the last one, which must be written by now.
        """
        faults.point("stage", step=target.step)
        began = self.images.now() if self.images is not None else 0.0
        compare = self._watch(image.file, [item.index.fqn for item in image.plan.items])
        seconds = self.images.timeout_seconds if self.images is not None else 0.0
        at_once = self.images is not None and self.images.are_made_at_once
        staged = self.stager.take(image.file, target.step, seconds, digests=at_once)
        self._written.append(staged.slot)
        # Without the image, so that tensors which are copies of the state's own can go as soon as they are staged.
        content = RankContent(
            image.plan,
            image.objects,
            image.file.num_bytes,
            tensors=staged.tensors,
            write=lambda path: self._write(path, staged, target),
            wait=lambda: compare(staged),
        )
        if self.images is None:
            return content
        kept = Image(target.step, target.origin, image.plan, image.objects, staged, began, copy=self.images.num_staged)
        return self._also_kept(content, kept)

    def release(self) -> None:
        """Note that a save is over: no write needs the earliest copy any more. Any thread."""
        with suppress(IndexError):  # That save failed before it had a copy.
            self.stager.pool.release(self._written.popleft())

    def _also_kept(self, content: RankContent, image: Image) -> RankContent:
        """Return `content`, whose copy also becomes an image: before its write, or by it."""
        images = self.images
        assert images is not None

        def wait() -> None:
            content.wait()
            images.note_staged(image)
            if images.are_made_at_once:
                self.stager.pool.add_reader(image.staged.slot)
                images.marker.mark_later(image)

        def write(path: Path) -> FileRecord:
            if images.are_made_at_once:
                return content.write(path)
            try:
                record = content.write(path)
            except Exception:
                images.marker.digest_here(image)
                raise
            images.marker.mark(image, record)
            return record

        return dataclasses.replace(content, wait=wait, write=write)


def write_in_place(path: Path, staged: Staged, target: Target) -> FileRecord:
    """Write the staged image to `path` in this process, durably."""
    return write_blocks(
        path, InPlace(staged.arena.memory, staged.num_bytes, staged.record), durable=target.store.durable
    )
