"""A file that shares its bytes with an earlier one, if it has the same: a second name of that file.

What it would be is digested first and compared with the record of the earlier file; nothing is read from the disk. If
anything differs, or the system makes no such name, the file is written in full, as if there were no earlier one. The
earlier file is never opened for writing: a name that is no good is removed before a file of that name is created.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite import faults
from torchtitan_lite.disk.block_writer import FileSource, has_digests
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.new_file import NewFile, NewFileOnDisk

_REFUSED = (errno.EPERM, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.ENOENT)
"""EPERM also where the system protects files of other owners; ENOENT if the earlier file is gone."""


@dataclass(frozen=True)
class LinkedRecord(FileRecord):
    """The record of a file that was to share the bytes of an earlier one."""

    is_linked: bool = False
    refusal: str = ""
    """Why the system did not let it, although it has the same bytes; empty if they differ, or if it did."""


def shared_or_written(new: NewFile, known: FileRecord, source: FileSource, share: Callable[[], str]) -> LinkedRecord:
    """Have `share` give `new` the bytes of the earlier file if `source` has its digests `known`; else write it in full.

    `share` returns why it could not, the empty string if it did.
    """
    refusal = ""
    if has_digests(source, known):
        refusal = share()
        if not refusal:
            return LinkedRecord(known.size, known.blocks, is_linked=True)
    written = new.write(source)
    return LinkedRecord(written.size, written.blocks, refusal=refusal)


@dataclass(frozen=True)
class LinkedFile:
    """The file `new`, which becomes another name of `earlier` if its contents have the digests in `known`."""

    new: NewFileOnDisk
    earlier: Path
    known: FileRecord

    def write(self, source: FileSource) -> FileRecord:
        """Link `new`, or write it in full, durably; return a `LinkedRecord`. Any thread. Raises as `NewFile.write`."""
        return shared_or_written(self.new, self.known, source, self._link)

    def __str__(self) -> str:
        return str(self.new)

    def _link(self) -> str:
        """Make the name; return why there is none, the empty string if there is."""
        durable, path = self.new.durable, self.new.path
        try:
            faults.point("link", path=path)
            durable.link(self.earlier, path)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            return f"{error.strerror}"
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode) and found.st_size == self.known.size:
            return ""
        # Else writing in full would write into the earlier file.
        durable.remove_file(path)
        return f"{self.earlier} is not the file that was written"
