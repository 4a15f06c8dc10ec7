"""An image that a start cannot load or refuses: it is named, and no folder that is not on the disk."""

from __future__ import annotations

import gc
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoint.companions import kept
from tests.checkpoint.images.spoiled import steps_in
from tests.checkpoint.small_run import Events
from tests.logged import logged_warnings
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.reading.source import LoadSource, Wanted
from torchtitan_lite.checkpoint.resume.fallback import Candidates
from torchtitan_lite.checkpoint.schedule.interval import BEGINNING
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.distributed.environment import runtime_folder
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointUnreadable,
    CheckpointUnsafe,
)
from torchtitan_lite.memory.images.card import ImageKey
from torchtitan_lite.memory.images.image_sources import ImageSource, ImageSources
from torchtitan_lite.memory.images.tier import Tier
from torchtitan_lite.memory.keeper.client import Keeper
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.store import CheckpointStore

pytestmark = pytest.mark.usefixtures("memory_tier")


def loop(folder: Path, width: int, *, steps: int, load: int = -1, **checkpoint: object) -> int | None:
    """Train a model of `width` to `steps`, with an image of each step from the second; return what it loaded."""
    model = nn.Linear(3, width)
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"interval": 1000, "async_mode": "async", "memory_interval": 1, **checkpoint}
    with CheckpointManager.for_loop(model=model, optimizer=optimizer, folder=folder, **settings) as manager:
        manager.load(load)
        for step in range((manager.loaded_step or 0) + 1, steps + 1):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            manager.save(step)
            found = kept(manager)
            assert found is not None
            found.stager.finish_preparation()
            assert found.marker.wait(60)
        return manager.loaded_step


def test_an_image_of_another_model_is_named_with_the_way_to_leave_it_out(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    loop(folder, 4, steps=3)
    with pytest.raises(CheckpointMismatch) as refusal:
        loop(folder, 5, steps=3)
    text = str(refusal.value)
    assert text.startswith("the in-memory snapshot of step 3 does not fit this run:\n")
    assert "step-3" not in text
    assert "weight: shape [4, 3] in the checkpoint" in text
    assert f"torchtitan-lite memory '{folder}' --end" in text
    assert not refusal.value.reported_elsewhere
    assert steps_in(folder)[-1] == 3, "the image stays for a start that fits"
    assert Keeper(folder, 60.0, runtime=runtime_folder()).end() == ()
    assert loop(folder, 5, steps=2) is None


def test_a_refused_image_that_is_a_copy_of_a_step_on_disk_is_named_as_that_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    loop(folder, 4, steps=2, interval=2)
    with pytest.raises(CheckpointMismatch, match="run/step-2 does not fit") as refusal:
        loop(folder, 5, steps=2)
    assert "--end" not in str(refusal.value)


def test_a_refused_load_leaves_no_descriptor_open(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    loop(folder, 4, steps=3)
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(2):
        with pytest.raises(CheckpointMismatch):
            loop(folder, 5, steps=3)
    gc.collect()
    assert len([*Path("/proc/self/fd").iterdir()]) == before


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

    images = Offering(Tier(Keeper(tmp_path, 600.0), 0), RunContext(Checkpoint(), peers, time.monotonic, events.emit))

    candidates = Candidates(CheckpointStore(tmp_path), Wanted(-1, Checkpoint()), peers, events.emit, sources=images)
    candidates.choose = lambda *_, **__: None
    with logged_warnings() as warned:
        for each in candidates:
            with candidates.trying(each):
                raise kind(str(each.path), "its bytes are wrong")
    assert candidates.taken is None
    assert images._held.left_out == {key}
    assert warned == ["The in-memory snapshot of step 3 is not loaded: its bytes are wrong. Trying the next source"]
    assert events.figures("image_skipped") == {"finding": "its bytes are wrong"}
