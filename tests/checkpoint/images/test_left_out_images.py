"""An image that cannot be loaded: the log and the event say why, and name no folder that is not on the disk."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest

from tests.checkpoint.small_run import Events
from tests.logged import logged_warnings
from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.images.belonging import ImageKey
from torchtitan_lite.checkpoint.images.image_source import ImageSource
from torchtitan_lite.checkpoint.images.image_sources import ImageSources
from torchtitan_lite.checkpoint.images.tier import build_tier
from torchtitan_lite.checkpoint.resume.fallback import Candidates
from torchtitan_lite.checkpoint.resume.source import LoadSource
from torchtitan_lite.checkpoint.schedule.interval import BEGINNING
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointDamaged, CheckpointError, CheckpointUnreadable, CheckpointUnsafe
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.store import CheckpointStore


@pytest.mark.parametrize("kind", [CheckpointDamaged, CheckpointUnreadable, CheckpointUnsafe])
def test_an_image_is_left_out_with_what_was_found(tmp_path: Path, kind: type[CheckpointError]) -> None:
    peers, events = Peers(timedelta(seconds=60)), Events()
    key = ImageKey(3, "s", 1)
    source = ImageSource(
        tmp_path / "step-3",
        3,
        model_only=False,
        lineage=Lineage("r"),
        key=key,
        manifest=b"",
        is_spread=False,
        is_last_resort=False,
        is_copy=False,
        durable=BEGINNING,
    )
    offered: list[LoadSource | None] = [source, None]

    class Offering(ImageSources):
        def preferred(self, chosen: LoadSource | None, *_: object, **__: object) -> LoadSource | None:
            return offered.pop(0)

    images = Offering(
        build_tier(tmp_path, 600.0, None, 0), RunContext(Checkpoint(), peers, time.monotonic, events.emit)
    )

    def load(source: LoadSource) -> None:
        raise kind(str(source.path), "its bytes are wrong")

    candidates = Candidates(CheckpointStore(tmp_path), -1, Checkpoint(), peers, events.emit, sources=images)
    candidates.choose = lambda *_, **__: None
    with logged_warnings() as warned:
        assert candidates.take(load) is None
    assert images._held.left_out == {key}
    assert warned == ["The image of step 3 in memory is not loaded: its bytes are wrong. Trying what is next"]
    assert events.figures("image_skipped") == {"finding": "its bytes are wrong"}
