"""The second folder of a run that has none: none of the code of `uploads` runs, or is imported."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from torchtitan_lite.checkpoint.resume.source import Sources
from torchtitan_lite.events import Emit


class NoUploads:
    """Uploads nothing. The manager calls the same methods of a run that does."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        """What there is to load besides the checkpoints on disk."""

    def protected(self) -> AbstractSet[int]:
        """Return the steps on disk that no rule removes for now. **Coordinator only**, any thread."""
        return frozenset()

    def heard_by(self, emit: Emit) -> Emit:
        """Return what passes events on to `emit`, and learns of commits."""
        return emit

    def has_checkpoint(self) -> bool:
        """Return whether the second folder has a full checkpoint. **Coordinator only**."""
        return False

    def start(self, run_id: str) -> None:
        """Start what uploads, for `run_id`, unless that is done: on the coordinator. Any rank, main thread."""

    def close(self, seconds_left: Callable[[], float]) -> None:
        """Wait for the uploads, while there are `seconds_left` and there is progress, and end what uploads. Any rank.

        Says what is missing then. Raises `UploadRefused` if nothing can be uploaded any more.
        """
