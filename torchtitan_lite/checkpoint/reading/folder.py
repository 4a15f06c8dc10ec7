"""A checkpoint's folder, opened for reading.

Everything that is known before a byte of data is read: the manifest, if it is ours; what is in it and
where; how large the files are, and whether they are as large as they were when it was committed. All of
that is checked when it is first asked for, and nothing outside the folder is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.checkpoint.untrusted.safe_metadata import read_metadata
from torchtitan_lite.collection import no_collection
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.plain_file import sizes_of
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnreadable
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import Manifest

Verify = Literal["off", "size", "full"]
"""What is compared with the manifest: nothing; the files' sizes; these and every byte that is read."""


class CheckpointFolder:
    """The checkpoint at `path`, ours or plain DCP's. What cannot be read is `CheckpointUnreadable`."""

    def __init__(self, path: Path, verify: Verify = "full") -> None:
        self.path = path
        self.verify: Verify = verify

    @cached_property
    def manifest(self) -> Manifest | None:
        """Ours; None if it is another's checkpoint. Raises `CheckpointDamaged`, `CheckpointUnsafe`, `FormatTooNew`."""
        path = self.path / layout.MANIFEST
        try:
            with no_collection():
                return Manifest.of_folder(self.path)
        except OSError as error:
            raise CheckpointUnreadable(str(path), _told(error)) from error

    @cached_property
    @no_collection()
    def contents(self) -> Contents:
        """What is in it, checked. Raises `CheckpointDamaged` or `CheckpointUnsafe` if that cannot be so."""
        try:
            contents = self._contents()
            contents.check_names()
            sizes = sizes_of(self.path, contents.files() | set(self._recorded))
        except OSError as error:
            raise CheckpointUnreadable(str(self.path), _told(error)) from error
        if self.verify != "off":
            for name, record in self._recorded.items():
                self._check_size(name, record.size, sizes.get(name))
        contents.check(sizes)
        return contents

    @cached_property
    def records(self) -> Mapping[str, FileRecord]:
        """Of each file, what must be found in it; empty unless all bytes are to be verified."""
        return self._recorded if self.verify == "full" else {}

    @property
    def _recorded(self) -> Mapping[str, FileRecord]:
        return self.manifest.files if self.manifest is not None else {}

    def _contents(self) -> Contents:
        manifest = self.manifest
        if manifest is not None and (manifest.tensors or manifest.objects or manifest.structure):
            return Contents.of_manifest(manifest, str(self.path))
        return read_metadata(self.path)

    def _check_size(self, name: str, expected: int, found: int | None) -> None:
        if found is None:
            raise CheckpointDamaged(str(self.path), f"{name} is missing")
        if found != expected:
            raise CheckpointDamaged(str(self.path), f"{name}: expected {expected} bytes, found {found}")


def _told(error: OSError) -> str:
    return f"{type(error).__name__}: {error}"
