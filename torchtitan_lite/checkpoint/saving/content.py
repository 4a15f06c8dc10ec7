"""What a rank writes its file from: the live tensors, or a copy of them in the staging arena."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.devices.buffer_ring import DeviceRing, Part
from torchtitan_lite.checkpoint.devices.link import CudaLink, Link
from torchtitan_lite.checkpoint.format.file_data import FileData, TensorBytes, row_major_pieces
from torchtitan_lite.checkpoint.planning.rank_file import RankFile
from torchtitan_lite.checkpoint.saving.companion import Companion
from torchtitan_lite.checkpoint.saving.target import RankContent, SaveTarget
from torchtitan_lite.checkpoint.staging.arena import ArenaSlot
from torchtitan_lite.checkpoint.staging.stager import Copying, StagedCopy, StagingWatch
from torchtitan_lite.disk.block_writer import Bounced, InPlace, NewFile
from torchtitan_lite.disk.digest import FileRecord

WriteStaged = Callable[[NewFile, StagedCopy, SaveTarget], FileRecord]
"""Writes a file from a staged copy, durably."""


def live_content(file: RankFile, make_link: Callable[[], Link] = CudaLink) -> RankContent:
    """Return content that writes the live tensors of `file` through small buffers, without a copy.

    The state must not change until the file is written. Waits for the devices of the tensors.
    """
    data = file.data
    _wait_for_devices(data.apart)
    return RankContent(
        file.plan,
        file.objects,
        data.num_bytes,
        tensors=lambda: data.tensors,
        write=lambda new: _write_live(new, data, make_link()),
    )


def _wait_for_devices(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for what this thread queued on devices: the threads that read `tensors` have their own streams."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _write_live(new: NewFile, data: FileData, link: Link) -> FileRecord:
    """Write `data` to `new`; what is on devices comes through a ring."""
    with DeviceRing(link) as ring:
        # Before there are several threads: it makes the stream of each device.
        ring.follow({tensor.device for tensor in data.apart if ring.reaches(tensor)})

        def fill(buffer: memoryview, begin: int, end: int) -> None:
            far: list[Part] = []
            for run in data.fill_in_a_row(buffer, begin, end):
                if ring.reaches(run.tensor):
                    far += _device_parts(run, ring)
                else:
                    run.copy()
            if far:
                ring.follow()  # What is not row-major is made so by this thread.
                ring.fetch(far)

        return new.write(Bounced(data.num_bytes, fill))


def _device_parts(run: TensorBytes, ring: DeviceRing) -> Iterator[Part]:
    """Yield the memory on a device of the bytes of `run`, with the part of its room for each."""
    for piece, at in row_major_pieces(run.tensor, run.begin, run.end):
        first, last = max(run.begin, at), min(run.end, at + piece.nbytes)
        yield ring.place(piece)[first - at : last - at], run.room[first - run.begin : last - run.begin]


class Copies:
    """Copies files as `copying` says; `write` writes a file from the copy, `watch` checks each copy.

    Each of `companions` may use the copies, too.
    """

    def __init__(
        self, copying: Copying, write: WriteStaged, watch: StagingWatch, companions: Sequence[Companion] = ()
    ) -> None:
        self.stager, self._companions = copying.stager, companions
        self._copying = copying
        self._write = write
        self._watch = watch
        self._written: deque[ArenaSlot] = deque()
        """Those of saves that are not over, in order. The end of one may be noted after the next one has its copy."""

    def content(self, file: RankFile, target: SaveTarget) -> RankContent:
        """Begin to copy `file`, and return content that writes the copy. Main thread.

        With one arena the copy replaces the last one, which must be written by now.
        """
        faults.point("stage", step=target.step)
        # Before the copy begins: a change during the copy must be in only one of the two digests.
        compare = self._watch(file.data, [part.key for part in file.plan.parts])
        seconds, digests = self._copying.timeout_seconds, self._copying.digests
        staged = self.stager.take(file.data, target.step, seconds, digests=digests)
        # A queue, because the thread of a save may note its end only after the next save has made its copy.
        self._written.append(staged.slot)
        # Without the file, so that tensors which are copies of the state's own can go as soon as they are staged.
        content = RankContent(
            file.plan,
            file.objects,
            file.data.num_bytes,
            tensors=staged.tensors,
            write=lambda new: self._write(new, staged, target),
            wait=lambda: compare(staged),
        )
        for each in self._companions:
            content = each.copied(target, staged, content)
        return content

    def release(self) -> None:
        """Note that a save is over: no write needs the earliest copy any more. Any thread."""
        with suppress(IndexError):  # That save failed before it had a copy.
            self.stager.pool.release(self._written.popleft())


def write_in_place(new: NewFile, staged: StagedCopy, target: SaveTarget) -> FileRecord:
    """Write the staged copy to `new` in this process, durably."""
    return new.write(InPlace(staged.arena.memory, staged.num_bytes, staged.record))
