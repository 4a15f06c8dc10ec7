"""Which runs have a memory tier, which make images, and which need a process that digests them."""

from __future__ import annotations

import dataclasses
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.images.cards import CARD
from tests.checkpoint.images.image_runs import CopiesOnly
from torchtitan_lite.checkpoint import companions
from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.planning.plan_cache import PlanCache
from torchtitan_lite.checkpoint.saving.target import Origin
from torchtitan_lite.checkpoint.staging.mark import Mark, read_mark
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.events import ignore
from torchtitan_lite.memory.images import run_images
from torchtitan_lite.memory.images.card import Card, Commit
from torchtitan_lite.memory.images.image import renew_card
from torchtitan_lite.memory.images.pool import ImageStager
from torchtitan_lite.memory.images.run_images import FoundImages, KeptImages
from torchtitan_lite.memory.keeper.client import Keeper
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.store import CheckpointStore

PEERS = Peers(timedelta(seconds=60))
ASYNC = {"enable_checkpoint": True, "async_mode": "async"}


def images_of_run(folder: Path, **config: Any) -> FoundImages | None:
    store = CheckpointStore(folder / "checkpoint")
    store.root.mkdir(exist_ok=True)
    options = Checkpoint(**{**ASYNC, **config})
    found = companions.images(store, PlanCache(PEERS), RunContext(options, PEERS, lambda: 0.0, ignore))
    assert all(isinstance(each, FoundImages) for each in found)
    return found[0] if found else None


@pytest.mark.parametrize(
    "config",
    [
        {"enable_checkpoint": False},
        {"load_only": True},
        {"create_seed_checkpoint": True},
        {"dry_run": True},
        {"memory_ttl_seconds": 0.0},
    ],
    ids=str,
)
@pytest.mark.usefixtures("memory_tier")
def test_what_is_no_run_of_its_own_has_no_tier(tmp_path: Path, config: dict[str, Any]) -> None:
    assert images_of_run(tmp_path, **config) is None


def test_a_run_whose_tier_is_off_has_none(tmp_path: Path) -> None:
    assert images_of_run(tmp_path) is None


@pytest.mark.usefixtures("memory_tier")
def test_a_run_that_makes_no_copies_looks_for_images_and_makes_none(tmp_path: Path) -> None:
    found = images_of_run(tmp_path, async_mode="disabled")
    assert found is not None and not found.keeps_copies and found.copying() is None
    origin = Origin(Lineage("r1"), "", {})
    assert found.begin(origin) is origin
    assert found.tier.start and found.tier.folder_id and not found.tier.is_off


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize(
    ("async_mode", "interval", "process"),
    [("async", 0, False), ("async", 2, None), ("async_with_pinned_mem", 0, True), ("async_with_pinned_mem", 2, True)],
)
@pytest.mark.usefixtures("memory_tier")
def test_a_process_digests_where_copies_cannot_or_where_it_writes_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_mode: str, interval: int, process: bool | None, digests: bool
) -> None:
    if not digests:
        monkeypatch.setattr(run_images, "build_image_stager", lambda let_go: ImageStager(CopiesOnly(), let_go=let_go))
    found = images_of_run(tmp_path, async_mode=async_mode, memory_interval=interval)
    assert isinstance(found, KeptImages)
    assert (found.process is not None) == (not digests if process is None else process)
    assert found.are_made_at_once == (interval > 0)
    assert found._owns_process == (async_mode == "async"), "else the saver does"


@pytest.mark.usefixtures("memory_tier")
def test_the_ids_of_a_start_are_in_its_origin_and_a_folder_without_one_turns_the_tier_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = images_of_run(tmp_path)
    assert found is not None
    origin = found.begin(Origin(Lineage("r1"), "", {}))
    assert origin.start == found.tier.start != ""
    assert found.tier.folder_id == CheckpointStore(tmp_path / "checkpoint").folder_id(make=False)
    again = images_of_run(tmp_path)
    assert again is not None and again.begin(Origin(Lineage("r1"), "", {})).start != origin.start
    (tmp_path / "other").mkdir()
    without = images_of_run(tmp_path / "other")
    (tmp_path / "other" / "checkpoint").rmdir()
    origin = Origin(Lineage("r1"), "", {})
    assert without is not None and without.begin(origin) is origin
    assert without.tier.is_off
    assert "No in-memory snapshots: the folder" in caplog.text


@pytest.mark.usefixtures("memory_tier")
def test_a_folder_that_cannot_be_listed_after_a_load_turns_the_tier_off_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the coordinator lists it: an error there would leave the other ranks waiting."""
    found = images_of_run(tmp_path)
    assert found is not None
    found.begin(Origin(Lineage("r1"), "", {}))
    shutil.rmtree(tmp_path / "checkpoint")
    (tmp_path / "checkpoint").write_text("no folder")
    found.loaded(None)
    assert found.tier.is_off and found.tier.commits == ()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"No in-memory snapshots: {tmp_path / 'checkpoint'} cannot be listed: ")


@pytest.mark.usefixtures("memory_tier")
def test_the_images_stay_when_the_process_leaves_and_go_when_the_run_finishes(
    tmp_path: Path, memory_tier: Path
) -> None:
    for is_finished in (False, True):
        found = images_of_run(tmp_path)
        assert found is not None
        found.begin(Origin(Lineage("r1"), "", {}))
        found.loaded(None)
        found.close()
        if is_finished:
            found.finished("r1")
        else:
            found.leave(float)
        keeper = Keeper(tmp_path / "checkpoint", 600.0, runtime=memory_tier)
        described = keeper.describe()
        assert (described is not None and described.living == ()) is not is_finished


def test_a_card_that_is_renewed_knows_another_commit_and_is_as_it_was_otherwise() -> None:
    mark = Mark()
    renew_card(mark, (Commit(6, "e"),), 0)
    assert read_mark(mark.fd) is None, "no image becomes valid by that"
    mark.set(7, 3, CARD.to_bytes())
    before = CARD.to_bytes()
    for commits in ((Commit(4, "c"), Commit(6, "e", 9)), (Commit(6, "e"),), ()):
        renew_card(mark, commits, 0)
        found = read_mark(mark.fd)
        assert found is not None and (found.step, found.num_bytes) == (7, 3)
        expected = dataclasses.replace(Card.parse(before), commits=commits)
        assert found.card == expected.to_bytes()
    mark.set(7, 3, b"none")
    renew_card(mark, (), 0)
    assert read_mark(mark.fd) is None, "a card that cannot be read is given up"
    mark.close()
