"""The images of a run that keeps nothing in memory: none of the code of `images/` runs, or is imported."""

from __future__ import annotations

from torchtitan_lite.checkpoint.resume.source import LoadSource, Sources
from torchtitan_lite.checkpoint.saving.content import Copying
from torchtitan_lite.checkpoint.saving.copy_listener import CopyListener
from torchtitan_lite.checkpoint.saving.writer import Origin
from torchtitan_lite.disk.writer_process import WriterProcess


class NoImages:
    """Keeps nothing. The manager calls the same methods of a run that keeps images."""

    keeps_copies = False
    """Whether copies of this start stay in memory for the next one."""

    def __init__(self) -> None:
        self.sources = Sources()
        self.listener = CopyListener()
        self.copying = Copying()
        self.process: WriterProcess | None = None
        """The process that digests, and writes where one does; None if a saver needs one of its own."""

    def begin(self, origin: Origin) -> Origin:
        """Agree on the ids of this start; return `origin` with them. **Collective**, before a load, under the lease."""
        return origin

    def begin_keeping(self) -> None:
        """Start what keeps images, in the background, after a load. Idempotent, any rank."""

    def take_over(self, source: LoadSource | None) -> None:
        """Use the memory that the start before left, after a load of `source`. **Collective**."""

    def drop_after(self, step: int) -> None:
        """Drop the images of later steps than `step`, to which the run rolled back, after `settle`. All ranks."""

    def wait_for_staging(self) -> None:
        """Wait until the state may change. Any rank."""

    def settle(self) -> None:
        """Wait until no image is being made: a load changes the state. Any rank."""

    def finish(self) -> None:
        """Free all images: the run has finished. Any rank."""

    def close(self) -> None:
        """Wait for the digest under way. Idempotent."""

    def leave(self) -> None:
        """Let the images outlive this process, after the saver has been closed. Idempotent."""
