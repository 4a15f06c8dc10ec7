"""Images in memory as a checkpoint to load: the same value on every rank, each of which has descriptors of its own."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lite.checkpoint.images.card import ImageKey
from torchtitan_lite.checkpoint.reading.folder import Verify
from torchtitan_lite.checkpoint.reading.source import LoadSource
from torchtitan_lite.checkpoint.schedule.interval import Tick
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.log import counted


@dataclass(frozen=True, kw_only=True)
class ImageSource(LoadSource):
    """The images of one copy of the state, of all ranks."""

    key: ImageKey
    manifest: bytes
    """As the coordinator put it together."""
    is_spread: bool
    """Whether each rank has only the images of its own host."""
    is_last_resort: bool
    """Whether the disk has no full checkpoint of the run: then all of it is verified before anything is loaded."""
    is_copy: bool = False
    """Whether the disk has the same checkpoint."""
    durable: Tick
    """The latest step of the run that the disk has, with the seconds of training up to it; zeros for none."""

    @property
    def continues_at(self) -> int | None:
        # Where the run counts again, an image is of the new count.
        return None if self.initial and self.model_only else self.step

    @property
    def on_disk(self) -> Tick:
        return self.durable

    @property
    def is_proof(self) -> bool:
        return False

    @property
    def image_of(self) -> int:
        return self.loaded.step

    @property
    def origin(self) -> str:
        return "memory"

    @property
    def remark(self) -> str:
        steps, seconds = self.at_risk
        lacking = f"; the disk lacks {counted(steps, 'step')} ({seconds:.1f} s of training)" if steps else ""
        return f" From memory: the images of the start before{lacking}"

    def verify(self, config: Checkpoint) -> Verify:
        return "full"  # Nothing but its digests shows that an image is complete.
