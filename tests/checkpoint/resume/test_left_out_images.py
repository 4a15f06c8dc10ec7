"""An image that cannot be loaded: the log and the event say why, and name no folder that is not on the disk."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from tests.checkpoint.small_run import Events
from tests.logged import logged_warnings
from torchtitan_lite.checkpoint.resume.fallback import Candidates
from torchtitan_lite.checkpoint.resume.held_images import HeldImages, Key
from torchtitan_lite.checkpoint.resume.load_source import InMemory, LoadSource
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointDamaged, CheckpointError, CheckpointUnreadable, CheckpointUnsafe
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.store import CheckpointStore


@pytest.mark.parametrize("kind", [CheckpointDamaged, CheckpointUnreadable, CheckpointUnsafe])
def test_an_image_is_left_out_with_what_was_found(tmp_path: Path, kind: type[CheckpointError]) -> None:
    peers, events = Peers(timedelta(seconds=60)), Events()
    images = HeldImages(None, "s", peers)
    memory = InMemory(b"", 3, "s", 1)
    source = LoadSource(tmp_path / "step-3", 3, model_only=False, lineage=Lineage("r"), memory=memory)

    def load(source: LoadSource) -> None:
        raise kind(str(source.path), "its bytes are wrong")

    sources = [source, None]
    candidates = Candidates(CheckpointStore(tmp_path), -1, Checkpoint(), peers, events, images=images)
    candidates.choose = lambda *_, **__: None
    candidates._in_memory = lambda _: sources.pop(0)  # type: ignore[method-assign]
    with logged_warnings() as warned:
        assert candidates.take(load) is None
    assert images.left_out == {Key(3, "s", 1)}
    assert warned == ["The image of step 3 in memory is not loaded: its bytes are wrong. Trying what is next"]
    assert events.figures("image_skipped") == {"finding": "its bytes are wrong"}
