"""Which checkpoint a run starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.store import filled
from torchtitan_lite.checkpoint.reading.source import LoadSource, RunFacts, Wanted
from torchtitan_lite.checkpoint.resume.load_source import choose_source, latest_step, new_run
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.errors import CheckpointMismatch, CheckpointNotFound
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointKind
from torchtitan_lite.store.store import CheckpointStore


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoint")


def commit(
    store: CheckpointStore, step: int, kind: CheckpointKind = CheckpointKind.FULL, *, ranks_differ: bool = False
) -> Path:
    extra = {"ranks_differ": ["w on rank 1"]} if ranks_differ else {}
    return filled.commit(store, step, kind=kind, lineage=Lineage("run1"), extra=extra).path


def plain_dcp(folder: Path) -> Path:
    folder.mkdir(parents=True)
    filled.write(folder)
    return folder


def chosen(store: CheckpointStore, step: int = -1, **config: Any) -> LoadSource | None:
    return choose_source(store, Wanted(step, Checkpoint(**config)))


def test_nothing_there_is_a_fresh_start(store: CheckpointStore) -> None:
    assert chosen(store) is None


def test_the_latest_full_checkpoint_is_taken(store: CheckpointStore) -> None:
    for step in (9, 10, 2):
        commit(store, step)
    commit(store, 20, CheckpointKind.WEIGHTS_ONLY)
    source = chosen(store)
    assert source is not None
    assert (source.path.name, source.step, source.model_only, source.initial) == ("step-10", 10, False, False)
    assert source.nbytes == 10


def test_a_step_whose_ranks_differed_is_skipped_unless_it_is_named_or_there_is_no_other(store: CheckpointStore) -> None:
    commit(store, 2, ranks_differ=True)
    source = chosen(store)
    assert source is not None and (source.step, source.recorded.ranks_differ, source.skipped) == (2, True, ())
    for step, ranks_differ in ((1, False), (3, True), (4, True)):
        commit(store, step, ranks_differ=ranks_differ)
    source = chosen(store)
    assert source is not None and (source.step, source.recorded.ranks_differ, source.skipped) == (1, False, (2, 3, 4))
    assert source.is_proof
    assert latest_step(store, Checkpoint()) == 1
    named = chosen(store, 4)
    assert named is not None and (named.step, named.recorded.ranks_differ, named.is_proof) == (4, True, False)


def test_a_weights_only_checkpoint_is_a_fresh_start(store: CheckpointStore) -> None:
    commit(store, 20, CheckpointKind.WEIGHTS_ONLY)
    assert chosen(store) is None


def test_a_named_step_is_taken(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        commit(store, step)
    source = chosen(store, 2)
    assert source is not None
    assert source.step == 2


def test_a_step_that_is_not_there_is_refused_with_those_that_are(store: CheckpointStore) -> None:
    for step in (200, 400):
        commit(store, step)
    with pytest.raises(CheckpointNotFound, match=r"step 7 .*it has 200, 400") as refusal:
        chosen(store, 7, initial_load_path="nowhere")
    assert refusal.value.available == (200, 400)


def test_a_weights_only_step_is_refused_if_it_is_named(store: CheckpointStore) -> None:
    commit(store, 20, CheckpointKind.WEIGHTS_ONLY)
    with pytest.raises(CheckpointMismatch, match=r"weights only.*--checkpoint\.initial_load_path"):
        chosen(store, 20)


def test_step_0_gives_initial_weights(store: CheckpointStore) -> None:
    commit(store, 0)
    for source in (chosen(store), chosen(store, 0)):
        assert source is not None
        assert (source.step, source.model_only, source.initial) == (0, True, False)


def test_a_folder_without_manifest_is_skipped_and_taken_if_it_is_named(store: CheckpointStore) -> None:
    commit(store, 3)
    plain_dcp(store.root / "step-7")
    source = chosen(store)
    assert source is not None
    assert source.step == 3
    asked_for = chosen(store, 7)
    assert asked_for is not None
    assert (asked_for.path, asked_for.step, asked_for.model_only) == (store.root / "step-7", 7, False)


@pytest.mark.promise(
    "A folder or file with another name is never removed, and is loaded only if you name it.",
    section="kept",
)
def test_foreign_names_are_never_chosen(store: CheckpointStore, tmp_path: Path) -> None:
    for name in ("foo", "step-abc", "step-99.tmp", "step-098", "my-step-97"):
        plain_dcp(store.root / name)
    (store.root / "step-50").mkdir()
    (store.root / "step-60").symlink_to(tmp_path / "nowhere")
    (store.root / "step-61").symlink_to(plain_dcp(tmp_path / "elsewhere"))
    (store.root / "step-70").write_text("a file")
    assert chosen(store) is None
    commit(store, 1)
    source = chosen(store)
    assert source is not None
    assert source.step == 1


def test_the_initial_path_counts_while_the_run_has_no_checkpoint_of_its_own(
    store: CheckpointStore, tmp_path: Path
) -> None:
    path = plain_dcp(tmp_path / "elsewhere")
    for model_only in (True, False):
        source = chosen(store, initial_load_path=str(path), initial_load_model_only=model_only)
        assert source is not None
        assert (source.path, source.step, source.model_only, source.initial) == (path, 0, model_only, True)
    commit(store, 1)
    source = chosen(store, initial_load_path=str(path))
    assert source is not None
    assert source.step == 1


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_an_initial_path_without_a_checkpoint_is_refused(store: CheckpointStore, tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointNotFound, match="holds no checkpoint"):
        chosen(store, initial_load_path=str(tmp_path / name))


def test_an_initial_path_is_not_looked_at_on_a_restart(store: CheckpointStore) -> None:
    commit(store, 1)
    assert chosen(store, initial_load_path="nowhere") is not None


def of_branch(store: CheckpointStore, step: int, lineage: Lineage) -> None:
    filled.commit(store, step, lineage=lineage)


def test_a_run_that_falls_back_behind_the_branch_which_abandoned_it_is_a_new_one(store: CheckpointStore) -> None:
    """Else new saves of the old run would count as steps that the branch has abandoned."""
    commit(store, 2)
    commit(store, 4)
    branch = Lineage("branch", parent_step=2, branch_point=2, abandons=((4, "run1"),))
    of_branch(store, 3, branch)
    of_branch(store, 5, Lineage("branch", parent_step=3, branch_point=2))
    source = choose_source(store, Wanted(-1, Checkpoint()), skipped=(3, 5))
    assert source is not None
    assert source.step == 2
    assert source.lineage.run_id not in ("run1", "branch")
    assert source.lineage == Lineage(source.lineage.run_id, parent_step=2, ancestors=((2, "run1"),))


def test_a_run_that_falls_back_within_the_branch_stays_the_same_run(store: CheckpointStore) -> None:
    commit(store, 2)
    commit(store, 4)
    of_branch(store, 3, Lineage("branch", parent_step=2, branch_point=2, abandons=((4, "run1"),)))
    of_branch(store, 5, Lineage("branch", parent_step=3, branch_point=2))
    source = choose_source(store, Wanted(-1, Checkpoint()), skipped=(5,))
    assert source is not None
    assert (source.step, source.lineage) == (3, Lineage("branch", parent_step=3, branch_point=2))


def test_a_run_that_falls_back_where_nothing_was_abandoned_stays_the_same_run(store: CheckpointStore) -> None:
    commit(store, 2)
    commit(store, 4)
    source = choose_source(store, Wanted(-1, Checkpoint()), skipped=(4,))
    assert source is not None
    assert (source.step, source.lineage) == (2, Lineage("run1", parent_step=2))


def test_a_named_step_begins_a_branch_and_is_not_replaced(store: CheckpointStore) -> None:
    commit(store, 2)
    commit(store, 4)
    plain_dcp(store.root / "step-3")
    for step in (2, 3):
        source = chosen(store, step)
        assert source is not None
        assert source.lineage.run_id != "run1"
        left = ((2, "run1"),) if step == 2 else ()
        assert source.lineage == Lineage(source.lineage.run_id, parent_step=step, branch_point=step, ancestors=left)
        assert (source.is_explicit, source.initial, source.model_only) == (True, False, False)
    latest = chosen(store)
    assert latest is not None
    assert (latest.is_explicit, latest.lineage) == (False, Lineage("run1", parent_step=4))


def test_the_step_where_a_branch_began_gives_its_latest_step_unless_new_branch_is_set(
    store: CheckpointStore,
) -> None:
    commit(store, 2)
    commit(store, 4)
    of_branch(store, 3, Lineage("branch", parent_step=2, branch_point=2, abandons=((4, "run1"),)))
    again, other, fresh = chosen(store, 2), chosen(store, 3), chosen(store, 2, new_branch=True)
    assert again is not None and other is not None and fresh is not None
    assert (again.step, again.lineage.run_id, again.is_explicit) == (3, "branch", False)
    assert (other.step, other.lineage.branch_point, other.is_explicit) == (3, 3, True)
    assert (fresh.step, fresh.lineage.branch_point, fresh.is_explicit) == (2, 2, True)
    assert len({"run1", "branch", other.lineage.run_id, fresh.lineage.run_id}) == 4


def with_origin(store: CheckpointStore, step: int) -> Path:
    """Commit a step whose manifest records its run."""
    extra = {"topology": "2 ranks", "config": {"training": {"steps": 9}}, "tensor_digests": {"model.w": "ab"}}
    return filled.commit(store, step, world_size=2, lineage=Lineage("run1"), extra=extra).path


def test_a_source_describes_the_run_that_saved_it(store: CheckpointStore, tmp_path: Path) -> None:
    path = with_origin(store, 5)
    elsewhere = CheckpointStore(tmp_path / "elsewhere")
    sources = [
        chosen(store),
        chosen(store, 5),
        chosen(elsewhere, initial_load_path=str(path), initial_load_model_only=False),
    ]
    for source in sources:
        assert source is not None
        assert (source.recorded.topology, source.recorded.config) == ("2 ranks", {"training": {"steps": 9}})
        assert source.recorded.tensor_digests == {"model.w": "ab"}
    unknown = chosen(elsewhere, initial_load_path=str(plain_dcp(tmp_path / "plain")))
    assert unknown is not None
    assert (unknown.recorded, unknown.nbytes) == (RunFacts(), 0)


@pytest.mark.parametrize(("model_only", "step"), [(True, 0), (False, 5)])
def test_another_runs_checkpoint_is_resumed_from_its_step_unless_only_its_model_is_loaded(
    store: CheckpointStore, tmp_path: Path, model_only: bool, step: int
) -> None:
    path = with_origin(CheckpointStore(tmp_path / "another"), 5)
    source = chosen(store, initial_load_path=str(path), initial_load_model_only=model_only)
    assert source is not None
    assert (source.path, source.step, source.model_only) == (path, step, model_only)
    assert (source.initial, source.is_explicit) == (True, True)
    assert source.lineage == Lineage(source.lineage.run_id)
    assert source.lineage.run_id != "run1"


def test_every_new_run_has_a_unique_id_that_a_folder_name_may_hold() -> None:
    ids = {new_run().run_id for _ in range(50)}
    assert len(ids) == 50
    assert all(run_id.isalnum() for run_id in ids)
