"""Uploads the files of the ranks of one host, of what the process of the coordinator has begun.

Hosts share the folder of checkpoints, and in it the record of the upload under way. An object appears complete or not
at all, so what is there needs no other sign. One thread.
"""

from __future__ import annotations

from pathlib import Path

from torchtitan_lite.bucket.store import open_bucket
from torchtitan_lite.errors import CheckpointDamaged
from torchtitan_lite.events import Emit, UploadFailed, ignore
from torchtitan_lite.store import layout
from torchtitan_lite.uploading import record
from torchtitan_lite.uploading.sending import Sending, committed_files
from torchtitan_lite.uploading.stored_file import Rate
from torchtitan_lite.uploading.uploader import UploadJob


class HostUploader:
    """Uploads the share of `job`, whose address is that of an object store. Its states are those of the coordinator."""

    def __init__(self, job: UploadJob, emit: Emit = ignore) -> None:
        self._root, self._share, self._emit = Path(job.folder), job.share, emit
        self._target = open_bucket(job.address)
        self._sending = Sending(self._target, Rate(job.max_bytes_per_second).wait_for)
        self._done = ""

    @property
    def address(self) -> str:
        """The other folder, as people write it."""
        return self._target.address

    def look(self) -> None:
        """Send what is missing of the upload under way, if there is one. Raises the OSError of the other folder."""
        begun = record.read(self._root, self.address).begun
        if begun is None or begun.place == self._done:
            return
        step, folder = begun.save[0], self._root / layout.step_dir(begun.save[0])
        try:
            manifest, files = committed_files(folder)
            there = self._target.sizes_at(begun.place)
            for name, known in manifest.files.items():
                if self._share.has(name) and there.get(name) != known.size:
                    self._sending.send(folder / name, files[name], begun.place)
        except CheckpointDamaged as damage:
            self._emit(UploadFailed(step, path=self.address, reason=str(damage)))
        except FileNotFoundError:
            if folder.exists():
                raise  # Of the bucket.
        self._done = begun.place
