"""What a load takes where images and checkpoints are: which of them, with which lineage, and what is checked before."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.images.cards import CARD, changed
from tests.store import filled
from torchtitan_lite.checkpoint.reading.source import LoadSource, Wanted
from torchtitan_lite.checkpoint.resume.load_source import choose_source
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.memory.images.card import Card, Commit, ImageKey, assembled_manifest, commit_of
from torchtitan_lite.memory.images.held_images import Complete, HeldImages
from torchtitan_lite.memory.images.image_sources import ImageSource, prefer_memory
from torchtitan_lite.memory.images.snapshot_match import ImageFacts
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointKind, Manifest
from torchtitan_lite.store.manifest_fields import START
from torchtitan_lite.store.store import CheckpointStore

FILE = "__0_0.distcp"


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "checkpoint")
    store.root.mkdir()
    store.folder_id(make=True)
    return store


def card(store: CheckpointStore, step: int, **changes: Any) -> Card:
    """Return the card of a run of one rank, made before the first checkpoint of `store`."""
    common = {"rank": 0, "world_size": 1, "step": step, "file": FILE, "commits": (), "lineage": Lineage("r1")}
    return changed(CARD, **{**common, "folder_id": store.folder_id(make=False), **changes})


def images(*cards: Card) -> HeldImages:
    """Return what a look finds, of images with these cards."""
    found = HeldImages(None, "now", Peers(timedelta(seconds=60)))
    for each in sorted(cards, key=lambda each: -each.key.step):
        found.complete.append(Complete(ImageFacts.of_card(each), assembled_manifest([each]), is_spread=False))
    return found


def commit(store: CheckpointStore, of: Card, *, data: bytes = b"abc", full: bool = True) -> Commit:
    """Commit the checkpoint that an image with the card `of` would become."""
    staging = filled.staged(store, of.key.step, data)
    manifest = assembled_manifest([of])
    files = {FILE: FileRecord.of(data), ".metadata": FileRecord.of(b"of dcp")}
    kind = CheckpointKind.FULL if full else CheckpointKind.WEIGHTS_ONLY
    manifest = dataclasses.replace(manifest, files=files, kind=kind)
    found = commit_of(store.commit(of.key.step, manifest, place=staging.name))
    assert found is not None
    return found


def preferred(
    found: HeldImages, store: CheckpointStore, step: int = -1, *, is_exact: bool = False, **config: Any
) -> LoadSource | None:
    wanted = Wanted(step, Checkpoint(**config), is_exact=is_exact)
    return prefer_memory(found, store, choose_source(store, wanted), wanted)


def test_before_the_first_checkpoint_the_latest_image_is_the_last_resort(store: CheckpointStore) -> None:
    source = preferred(images(card(store, 6), card(store, 7)), store)
    assert isinstance(source, ImageSource)
    assert (source.step, source.key.step, source.key.start) == (7, 7, "a1")
    assert source.is_last_resort and not source.is_spread
    assert (source.path.name, source.model_only, source.nbytes) == ("step-7", False, 3)
    assert (source.lineage, source.recorded.topology) == (Lineage("r1"), "2 ranks")
    assert source.recorded.config == {"training": {"steps": 10}}
    manifest = Manifest.parse(source.manifest)
    assert (manifest.step, manifest.kind, manifest.world_size) == (7, CheckpointKind.FULL, 1)
    assert (manifest.created_at, manifest.versions) == (1.5, {"torch": "2.13"})
    assert manifest.structure is not None and dict(manifest.structure) == {"root": {}}


def test_an_image_continues_from_the_checkpoint_that_it_knows(store: CheckpointStore) -> None:
    latest = commit(store, card(store, 5))
    source = preferred(images(card(store, 7, commits=(latest,), lineage=Lineage("r1", parent_step=3))), store)
    assert isinstance(source, ImageSource)
    assert (source.step, source.lineage.parent_step, source.lineage.abandons) == (7, 5, ())
    assert not source.is_last_resort, "the disk has a checkpoint, too"


def test_without_images_or_with_load_only_the_choice_is_that_of_the_disk(store: CheckpointStore) -> None:
    assert preferred(images(), store) is None
    assert preferred(images(card(store, 7)), store, load_only=True) is None
    latest = commit(store, card(store, 5))
    for found, options in ((images(), {}), (images(card(store, 7, commits=(latest,))), {"load_only": True})):
        source = preferred(found, store, **options)
        assert source is not None
        assert (source.step, type(source)) == (5, LoadSource)


def test_a_damaged_image_gives_way_to_the_one_before(store: CheckpointStore) -> None:
    found = images(card(store, 6), card(store, 7))
    found.left_out.add(ImageKey(7, "a1", 0))
    source = preferred(found, store)
    assert source is not None and source.step == 6
    found.left_out.add(ImageKey(6, "a1", 0))
    assert preferred(found, store) is None


@pytest.mark.parametrize("data", [b"abc", b"abd"])
def test_an_image_of_the_step_on_disk_counts_only_if_it_has_the_same_bytes(store: CheckpointStore, data: bytes) -> None:
    of = card(store, 7)
    latest = commit(store, of, data=data)
    source = preferred(images(changed(of, commits=(latest,))), store)
    assert source is not None and source.step == 7
    assert (isinstance(source, ImageSource)) == (data == b"abc")
    if isinstance(source, ImageSource):
        assert source.path == store.root / "step-7" and not source.is_last_resort


def test_of_a_step_whose_manifest_is_unreadable_the_image_does_not_count(store: CheckpointStore) -> None:
    of = card(store, 7)
    latest = commit(store, of)
    latest_wanted = Wanted(-1, Checkpoint())
    chosen = choose_source(store, latest_wanted)
    (store.root / "step-7" / "manifest.json").write_bytes(b"{")
    found = images(changed(of, commits=(latest,)))
    assert prefer_memory(found, store, chosen, latest_wanted) is chosen


def test_weights_alone_on_disk_are_no_later_checkpoint(store: CheckpointStore) -> None:
    commit(store, card(store, 9, start="b2"), full=False)
    source = preferred(images(card(store, 7)), store)
    assert source is not None and source.step == 7


def test_the_start_that_made_the_latest_checkpoint_is_known_from_its_manifest(store: CheckpointStore) -> None:
    commit(store, card(store, 5))
    assert Manifest.of_folder(store.root / "step-5").extra[START] == "a1"  # type: ignore[union-attr]  # it is there
    ours = preferred(images(card(store, 7)), store)
    others = preferred(images(card(store, 7, start="b2")), store)
    assert isinstance(ours, ImageSource)
    assert type(others) is LoadSource


@pytest.mark.parametrize(("wanted", "in_memory"), [(5, False), (7, True)])
def test_a_step_that_is_wanted_exactly_is_that_step(store: CheckpointStore, wanted: int, in_memory: bool) -> None:
    commit(store, card(store, 5))
    latest = commit(store, card(store, 7))
    source = preferred(images(card(store, 7, commits=(latest,))), store, wanted, is_exact=True)
    assert source is not None
    assert (source.step, isinstance(source, ImageSource)) == (wanted, in_memory)
    assert source.lineage.branch_point == wanted


def test_an_image_is_preferred_to_an_initial_path(store: CheckpointStore, tmp_path: Path) -> None:
    other = CheckpointStore(tmp_path / "other")
    commit(other, card(store, 7))
    options = {"initial_load_path": str(other.root / "step-7"), "initial_load_model_only": False}
    source = preferred(images(card(store, 7)), store, **options)
    assert isinstance(source, ImageSource)
    assert source.is_last_resort
    assert (source.path.parent, source.lineage.run_id, source.initial) == (store.root, "r1", False)


COUNTS_AGAIN = {"exclude_from_loading": ("train_state", "lr_scheduler", "dataloader")}


def test_an_image_of_a_run_that_counts_again_is_the_last_resort_and_of_its_own_count(store: CheckpointStore) -> None:
    latest = commit(store, card(store, 5))
    config = {"checkpoint": {"exclude_from_loading": ["train_state"]}}
    again = card(store, 3, commits=(latest,), config=config, start="b2")
    source = preferred(images(again), store, **COUNTS_AGAIN)
    assert isinstance(source, ImageSource)
    assert source.is_last_resort and source.lineage.counts_again
    assert source.continues_at == 3
    assert (source.lineage.run_id, source.lineage.parent_step) == ("r1", 5)


@pytest.mark.parametrize(("is_exact", "in_memory"), [(False, True), (True, False)])
def test_a_branch_continues_from_memory_unless_its_very_first_step_is_wanted(
    store: CheckpointStore, is_exact: bool, in_memory: bool
) -> None:
    latest = commit(store, card(store, 5))
    on_branch = card(store, 7, commits=(latest,), lineage=Lineage("r2", branch_point=5))
    source = preferred(images(on_branch), store, 5, is_exact=is_exact)
    assert source is not None
    assert (isinstance(source, ImageSource)) == in_memory
    assert source.step == (7 if in_memory else 5)


def test_a_look_gives_a_folder_no_id(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "bare")
    store.root.mkdir()
    assert preferred(images(card(store, 7, folder_id="f1")), store) is None
    assert store.folder_id(make=False) == "" and list(store.root.iterdir()) == []
