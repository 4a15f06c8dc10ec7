"""`upload`: the checkpoints of a folder that another folder lacks, as a run with `upload_folder` uploads them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from torchtitan_lite.cli.named_checkpoint import folder_of_checkpoints, local, refuse_step
from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.config.address import is_address
from torchtitan_lite.config.argument_parser import Option, Positional
from torchtitan_lite.config.checks import not_negative
from torchtitan_lite.errors import CheckpointNotFound
from torchtitan_lite.log import counted, readable_bytes
from torchtitan_lite.store.store import CheckpointStore
from torchtitan_lite.uploading.uploader import State, UploadJob, upload_all


@dataclass(frozen=True)
class Upload:
    """Upload the checkpoints of a folder that another folder lacks.

    Continues what was cut, and removes nothing there. A job may train in FOLDER, unless it uploads to TO itself.
    """

    folder: Annotated[str, Positional("FOLDER")]
    """A folder of checkpoints on disk, or the dump folder of a run."""
    to: Annotated[str, Positional("TO")]
    """An address such as s3://bucket/run, or a folder."""
    max_mb_per_second: Annotated[float, Option("MB")] = 0.0
    """Most megabytes (10^6 bytes) a second; 0: no limit."""

    def run(self, screen: Screen) -> None:
        not_negative("--max-mb-per-second", self.max_mb_per_second)
        local(self.folder, "upload")
        refuse_step(self.folder)
        root = folder_of_checkpoints(self.folder)
        to = self.to if is_address(self.to) else os.fspath(Path(self.to).absolute())
        if not CheckpointStore(root).committed():
            raise CheckpointNotFound(str(root), None, finding="there is no complete checkpoint in it")
        job = UploadJob(str(root), to, "torchtitan-lite upload", max_bytes_per_second=self.max_mb_per_second * 1e6)
        with ExitStack() as stack:
            shown = _Shown(screen, stack)
            count = upload_all(job, shown)
        data = {"folder": str(root), "to": to, "uploaded": count, "bytes": shown.sent_bytes}
        text = f"Uploaded {counted(count, 'checkpoint')} of {root}\nto {to}: {readable_bytes(shown.sent_bytes)}"
        screen.show(data, lambda: text if count else f"{to} has all checkpoints of {root}")


class _Shown:
    """Shows how far each upload is."""

    def __init__(self, screen: Screen, stack: ExitStack) -> None:
        self._stack = stack
        self._screen, self._step, self.sent_bytes = screen, -1, 0
        self._advance: Callable[[int], None] = lambda num_bytes: None

    def __call__(self, state: State) -> None:
        if state.uploading is not None and state.uploading != self._step:
            self._stack.pop_all().close()
            self._step = state.uploading
            progress = self._screen.progress(f"uploading step {state.uploading}", state.missing_bytes)
            self._advance = self._stack.enter_context(progress)
        self._advance(state.sent_bytes - self.sent_bytes)
        self.sent_bytes = state.sent_bytes
