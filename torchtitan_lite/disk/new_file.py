"""A file that is about to be written: the handle that a store gives to whoever has the bytes.

It is a value, so it travels to the writer process, which writes the file there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torchtitan_lite.disk.block_writer import FileSource, write_blocks
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.durable import DISK, Durable


class NewFile(Protocol):
    """One file, not yet written; its string is its address, for messages. Pickled, it is written by another process."""

    def write(self, source: FileSource) -> FileRecord:
        """Write the contents of `source`, durably; return the record of the file. Any thread.

        Raises OSError with the address in it; the file is useless then.
        """
        ...


LOOK_SECONDS = 60.0
"""As long as NFS may remember by default which files a folder has (acdirmax)."""


@dataclass(frozen=True)
class NewFileOnDisk:
    """A new file at `path`, in a folder that exists; its name is durable once the folder is synced.

    Another host may have made the folder: this one looks for it for up to `look_seconds`.
    """

    path: Path
    look_seconds: float = 0.0
    durable: Durable = field(default=DISK, compare=False, repr=False)

    def write(self, source: FileSource) -> FileRecord:
        return write_blocks(self.path, source, look_seconds=self.look_seconds, durable=self.durable)

    def __str__(self) -> str:
        return str(self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process writes with the disk that it has.
        return NewFileOnDisk, (self.path, self.look_seconds)
