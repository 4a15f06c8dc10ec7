"""Makes images of the copies that saves make, and copies between saves: what `saving/` lets a listener do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.images.image import Image
from torchtitan_lite.checkpoint.images.images import Images
from torchtitan_lite.checkpoint.saving.copy_listener import CopyListener, CopyOfSave
from torchtitan_lite.checkpoint.saving.writer import Origin, RankContent
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.new_file import NewFile
from torchtitan_lite.store.manifest import CheckpointInfo


class ImageListener(CopyListener):
    """Makes `images` of copies. Each copy becomes an image whether or not its file is written."""

    def __init__(self, images: Images) -> None:
        self._images = images
        self._began = 0.0

    def sized(self, num_bytes: int) -> None:
        self._images.make_room(num_bytes)

    def numbers(self) -> tuple[int, ...]:
        return self._images.report()

    def agreed(self, step: int, maxima: Sequence[int]) -> None:
        self._images.note_save(step, maxima)
        self._began = self._images.now()

    def copied(self, copy: CopyOfSave, content: RankContent) -> RankContent:
        """Return `content`, whose copy also becomes an image: before its write, or by it."""
        images, target = self._images, copy.target
        image = Image(
            target.step, target.origin, copy.plan, copy.objects, copy.staged, self._began, copy=images.num_staged
        )

        def wait() -> None:
            content.wait()
            images.note_staged(image)
            if images.are_made_at_once:
                # A second reader: the arena must not be overwritten before both the disk write and the image are done.
                images.stager.pool.add_reader(copy.staged.slot)
                images.marker.mark_later(image)

        def write(new: NewFile) -> FileRecord:
            # This copy has its digests, so the save does not hash it again. Without `memory_interval` there is time for
            # a digest during the disk write, which no step waits for, and the copy stays as short as it can be.
            if images.are_made_at_once:
                return content.write(new)
            try:
                record = content.write(new)
            except Exception:
                # The disk failed, not the copy: it is all that a kill leaves then.
                images.marker.digest_here(image)
                raise
            images.marker.mark(image, record)
            return record

        return dataclasses.replace(content, wait=wait, write=write)

    def durable(self, committed: CheckpointInfo | None) -> None:
        self._images.note_durable(committed)

    def not_saved(self, step: int, make_state: Callable[[], State], make_origin: Callable[[], Origin]) -> bool:
        if not self._images.is_due(step):
            return False
        self._images.stage(step, make_state, make_origin())
        return True
