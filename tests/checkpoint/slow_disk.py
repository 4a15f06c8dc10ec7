"""A disk that writes once a test allows it."""

from __future__ import annotations

import threading
from datetime import timedelta

from torchtitan_lite.checkpoint.saving.content import write_in_place
from torchtitan_lite.checkpoint.saving.savers import ThreadSaver
from torchtitan_lite.checkpoint.saving.target import SaveTarget
from torchtitan_lite.checkpoint.staging.stager import Copying, StagedCopy, build_stager
from torchtitan_lite.disk.block_writer import NewFile
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.distributed.peers import Peers


class SlowDisk:
    """Writes once the test allows it."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.stager = build_stager()
        self.saver = ThreadSaver(Peers(timedelta(seconds=60)), copying=Copying(self.stager), write=self._write)

    def _write(self, new: NewFile, staged: StagedCopy, target: SaveTarget) -> FileRecord:
        assert self.may_write.wait(60)
        return write_in_place(new, staged, target)
