"""Which checkpoint is loaded if some are damaged, and what happens to these."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.small_run import Events
from tests.store import filled
from torchtitan_lite import faults
from torchtitan_lite.checkpoint.reading.source import LoadSource, Sources, Wanted
from torchtitan_lite.checkpoint.resume.fallback import Candidates
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import (
    AllCheckpointsDamaged,
    CheckpointDamaged,
    CheckpointUnreadable,
    CheckpointUnsafe,
    FolderUnusable,
)
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.rollbacks import Rollback
from torchtitan_lite.store.store import CheckpointStore

PEERS = Peers(timedelta(seconds=60))
DATA = "__0_0.distcp"
RUN = Lineage("run1")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Return a store with steps 2, 4 and 6."""
    store = CheckpointStore(tmp_path / "checkpoint")
    for step in (2, 4, 6):
        commit(store, step)
    return store


def commit(store: CheckpointStore, step: int, lineage: Lineage = RUN) -> Path:
    return filled.commit(store, step, lineage=lineage).path


class Load:
    """Accepts a source, unless `found` has an error for its step."""

    def __init__(self, found: Mapping[int, Exception] | None = None) -> None:
        self._found = found or {}
        self.tried: list[int] = []

    def __call__(self, source: LoadSource) -> None:
        self.tried.append(source.step)
        if source.step in self._found:
            raise self._found[source.step]


def damaged(store: CheckpointStore, *steps: int, keys: int = 0) -> dict[int, Exception]:
    names = [f"key{number}" for number in range(keys)]
    return {step: CheckpointDamaged(str(store.root / f"step-{step}"), f"bits of {step}", names) for step in steps}


def candidates(store: CheckpointStore, wanted: int = -1, **config: Any) -> tuple[Candidates, Events]:
    events = Events()
    return Candidates(store, Wanted(wanted, Checkpoint(**config)), PEERS, events.emit), events


def take(found: Candidates, load: Callable[[LoadSource], object]) -> LoadSource | None:
    """Load candidates with `load`, until one is undamaged, and return that one."""
    for source in found:
        with found.trying(source):
            load(source)
    return found.taken


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir())


def cut(path: Path) -> None:
    path.write_bytes(b"dat")


def unseal(folder: Path) -> None:
    (folder / layout.MANIFEST).write_bytes(b"{")


def test_the_latest_is_taken_and_nothing_is_changed(store: CheckpointStore) -> None:
    load = Load()
    found, events = candidates(store)
    source = take(found, load)
    assert source is not None
    assert (source.step, load.tried, events.recorded, found.damaged) == (6, [6], [], {})
    assert names(store) == ["step-2", "step-4", "step-6"]


class LaterInMemory(Sources):
    """Has step 8, which continues from the latest one on disk, and nothing of what the folder records."""

    def preferred(self, chosen: LoadSource | None, *args: Any, **options: Any) -> LoadSource | None:
        return chosen and dataclasses.replace(chosen, step=8, rollbacks=())


def test_what_memory_has_comes_with_the_rollbacks_of_its_run_that_the_folder_records(store: CheckpointStore) -> None:
    common = {"step": 5, "reason": "loss is nan", "skipped": 5, "last": 4, "target": 4}
    own = Rollback(run_id="run1", left=Lineage("run0"), **common)  # type: ignore[arg-type]  # the fields of `common`
    of_another = Rollback(run_id="run8", left=Lineage("run7"), **common)  # type: ignore[arg-type]  # as above
    store.rollbacks.write([own, of_another])
    found = Candidates(store, Wanted(-1, Checkpoint()), PEERS, Events().emit, sources=LaterInMemory())
    source = take(found, Load())
    assert source is not None
    assert (source.step, source.rollbacks) == (8, (own,))


def test_without_candidates_nothing_is_loaded(tmp_path: Path) -> None:
    load = Load()
    found, events = candidates(CheckpointStore(tmp_path / "none"))
    assert take(found, load) is None
    assert found.first() is None
    assert (load.tried, events.recorded) == ([], [])


def test_each_damaged_one_is_reported_and_quarantined_once_another_was_loaded(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    load = Load(damaged(store, 4, 6, keys=3))
    found, events = candidates(store)
    source = take(found, load)
    assert source is not None
    assert (source.step, load.tried) == (2, [6, 4, 2])
    assert names(store) == ["step-2", "step-4.corrupt", "step-6.corrupt"]
    keys = ["key0", "key1", "key2"]
    assert events.recorded == [
        ("fallback", 2, {"damaged_step": 6, "finding": "bits of 6", "keys": keys}),
        ("fallback", 2, {"damaged_step": 4, "finding": "bits of 4", "keys": keys}),
        ("quarantined", 4, {"path": str(store.root / "step-4.corrupt")}),
        ("quarantined", 6, {"path": str(store.root / "step-6.corrupt")}),
    ]
    for step in (4, 6):
        assert caplog.text.count(f"bits of {step}") == 1
        assert f"Step {step} is damaged: bits of {step} (in it: key0, key1, key2). Trying an older one" in caplog.text
        assert f"Fell back from step {step} to step 2\n" in caplog.text
    findings = json.loads((store.root / "step-6.corrupt" / layout.FINDINGS).read_text())
    assert findings["step"] == 6
    assert "bits of 6" in findings["findings"][0]


def test_an_event_names_a_hundred_keys_at_most(store: CheckpointStore) -> None:
    for count, named in ((100, 100), (101, 100)):
        found, events = candidates(store, load_only=True)
        take(found, Load(damaged(store, 6, keys=count)))
        assert events.figures("fallback")["keys"] == [f"key{number}" for number in range(named)]


def test_one_whose_files_have_another_size_is_not_even_tried(store: CheckpointStore) -> None:
    cut(store.root / "step-6" / DATA)
    load = Load()
    found, events = candidates(store)
    assert found.first() is not None
    assert (found.damaged.keys(), names(store)) == ({6}, ["step-2", "step-4", "step-6"])
    assert take(found, load) is not None
    assert load.tried == [4]
    assert DATA in events.figures("fallback")["finding"]
    assert names(store) == ["step-2", "step-4", "step-6.corrupt"]


def test_sizes_are_not_checked_if_nothing_is_verified(store: CheckpointStore) -> None:
    cut(store.root / "step-6" / DATA)
    load = Load()
    found, _ = candidates(store, verify_on_load="off")
    assert take(found, load) is not None
    assert load.tried == [6]


def test_a_named_step_is_not_replaced_by_another_and_stays(store: CheckpointStore) -> None:
    for load, spoil in ((Load(damaged(store, 4)), lambda: None), (Load(), lambda: cut(store.root / "step-4" / DATA))):
        spoil()
        found, events = candidates(store, wanted=4)
        with pytest.raises(CheckpointDamaged, match="step-4"):
            take(found, load)
        assert [event for event, *_ in events.recorded] == ["load_failed"]
        assert events.steps("load_failed") == [4]
        assert names(store) == ["step-2", "step-4", "step-6"]


def test_damaged_steps_next_to_a_named_one_are_left_alone(store: CheckpointStore) -> None:
    unseal(store.root / "step-6")
    found, events = candidates(store, wanted=2)
    source = take(found, Load())
    assert source is not None
    assert (source.step, events.recorded, names(store)) == (2, [], ["step-2", "step-4", "step-6"])


def test_a_damaged_manifest_is_reported_if_it_is_later_than_the_loaded_step(store: CheckpointStore) -> None:
    for step in (2, 6):
        unseal(store.root / f"step-{step}")
    found, events = candidates(store)
    source = take(found, Load())
    assert source is not None
    assert (source.step, events.steps("quarantined")) == (4, [6])
    assert names(store) == ["step-2", "step-4", "step-6.corrupt"]


@pytest.mark.parametrize("spoil", [lambda folder: cut(folder / DATA), unseal], ids=["sizes", "manifests"])
def test_where_all_are_damaged_each_is_named_and_stays(store: CheckpointStore, spoil: Callable[[Path], None]) -> None:
    for step in (2, 4, 6):
        spoil(store.root / f"step-{step}")
    load = Load()
    found, events = candidates(store)
    with pytest.raises(AllCheckpointsDamaged) as raised:
        take(found, load)
    assert sorted(raised.value.findings) == [2, 4, 6]
    assert (load.tried, events.recorded, names(store)) == ([], [], ["step-2", "step-4", "step-6"])


def test_another_runs_checkpoint_does_not_hide_that_all_of_the_runs_own_are_damaged(
    store: CheckpointStore, tmp_path: Path
) -> None:
    beginning = str(commit(CheckpointStore(tmp_path / "another"), 9))
    found, _ = candidates(store, initial_load_path=beginning)
    with pytest.raises(AllCheckpointsDamaged):
        take(found, Load(damaged(store, 2, 4, 6)))
    for step in (2, 4, 6):
        unseal(store.root / f"step-{step}")
    found, _ = candidates(store, initial_load_path=beginning)
    with pytest.raises(AllCheckpointsDamaged):
        take(found, Load())
    assert names(store) == ["step-2", "step-4", "step-6"]


def test_another_runs_checkpoint_that_is_damaged_is_not_replaced_and_stays(tmp_path: Path) -> None:
    another = CheckpointStore(tmp_path / "another")
    path = commit(another, 9)
    cut(path / DATA)
    empty = CheckpointStore(tmp_path / "checkpoint")
    load = Load({0: CheckpointDamaged(str(path), "it is cut")})
    found, events = candidates(empty, initial_load_path=str(path))
    with pytest.raises(CheckpointDamaged, match="it is cut"):
        take(found, load)
    assert events.recorded == [("load_failed", 0, {"path": str(path), "finding": "it is cut"})]
    assert (load.tried, names(another)) == ([0], ["step-9"])


def test_a_run_that_only_loads_reports_damage_and_renames_nothing(store: CheckpointStore) -> None:
    found, events = candidates(store, load_only=True)
    source = take(found, Load(damaged(store, 6)))
    assert source is not None
    assert (source.step, events.steps("fallback"), events.steps("quarantined")) == (4, [4], [])
    assert names(store) == ["step-2", "step-4", "step-6"]


def test_an_error_of_the_machine_ends_the_load_and_is_no_damage(store: CheckpointStore) -> None:
    found, events = candidates(store)
    failures = damaged(store, 6) | {4: CheckpointUnreadable("step-4", "EIO")}
    with pytest.raises(CheckpointUnreadable):
        take(found, Load(failures))
    assert events.recorded == [("load_failed", 4, {"path": "step-4", "finding": "EIO"})]
    assert names(store) == ["step-2", "step-4", "step-6"]


def test_what_was_found_damaged_before_is_not_tried_again(store: CheckpointStore) -> None:
    found, _ = candidates(store, load_only=True)
    load = Load(damaged(store, 6))
    take(found, load)
    first = found.first()
    assert first is not None
    assert first.step == 4
    take(found, load)
    assert load.tried == [6, 4, 4]


def test_a_named_step_with_a_damaged_manifest_is_an_event_that_names_the_file(
    store: CheckpointStore,
) -> None:
    unseal(store.root / "step-4")
    found, events = candidates(store, wanted=4)
    with pytest.raises(CheckpointDamaged, match=r"step-4 is damaged: manifest\.json: "):
        take(found, Load())
    [(event, step, figures)] = events.recorded
    assert (event, step, figures["path"]) == ("load_failed", 4, str(store.root / "step-4"))
    assert figures["finding"].startswith("manifest.json: ")


def test_damage_on_a_continued_branch_is_reported_and_quarantined(store: CheckpointStore) -> None:
    for step in (6, 8):
        commit(store, step, Lineage("branch", 4, 4, ((6, "run1"),)))
    unseal(store.root / "step-8")
    found, events = candidates(store, wanted=4)
    source = take(found, Load())
    assert source is not None
    assert (source.step, events.steps("fallback"), events.steps("quarantined")) == (6, [6], [8])


def test_a_pipe_in_a_checkpoint_is_damage_that_names_the_file(store: CheckpointStore) -> None:
    for path, finding in ((store.root / "step-6" / DATA, f"{DATA}: a pipe"), (store.root / "step-6", "a pipe")):
        found, events = candidates(store, load_only=True)
        source = take(found, Load({6: CheckpointUnsafe(str(path), "a pipe")}))
        assert source is not None
        assert (source.step, events.figures("fallback")["finding"]) == (4, finding)


@pytest.mark.parametrize("verify", ["full", "off"])
def test_a_step_that_is_removed_while_it_is_read_is_chosen_again(
    store: CheckpointStore, verify: str, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def load(source: LoadSource) -> None:
        tried.append(source.step)
        if len(tried) == 1:
            commit(CheckpointStore(store.root), 8)
            shutil.rmtree(source.path)
            raise CheckpointUnreadable(str(source.path), "FileNotFoundError")

    found, events = candidates(store, load_only=True, verify_on_load=verify)
    source = take(found, load)
    assert source is not None
    assert (source.step, tried, events.recorded, found.damaged) == (8, [6, 8], [], {})
    assert "Step 6 was removed during the load: choosing again" in caplog.text


@pytest.mark.promise(
    "A reader (`checkpoint.load_only`) whose step is removed or replaced while it reads chooses again.",
    section="loaded",
)
def test_a_step_that_was_replaced_during_the_load_is_read_again(store: CheckpointStore) -> None:
    tried = []

    def load(source: LoadSource) -> None:
        tried.append(source.step)
        if len(tried) == 1:
            commit(CheckpointStore(store.root), 6)
            raise CheckpointDamaged(str(source.path), "half of it is another")

    found, events = candidates(store, load_only=True)
    assert take(found, load) is not None
    assert (tried, events.recorded) == ([6, 6], [])


def unreadable(step: int) -> str:
    return f"EIO@listing:step={step},times=always"


@pytest.fixture
def machine_fails() -> Callable[[int], None]:
    """Make the manifest of a step unreadable."""
    return lambda step: faults.install(unreadable(step), rank=0)


def test_an_older_step_that_the_system_does_not_give_is_a_warning(
    store: CheckpointStore, machine_fails: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    machine_fails(2)
    found, events = candidates(store)
    source = take(found, Load(damaged(store, 6)))
    assert source is not None
    assert (source.step, events.steps("quarantined")) == (4, [6])
    assert names(store) == ["step-2", "step-4", "step-6.corrupt"]
    warnings = [line for line in caplog.messages if "neither counts nor removes" in line]
    assert len(warnings) == 1
    assert "step-2" in warnings[0] and "Input/output error" in warnings[0]


@pytest.mark.promise(
    "If the manifest of the latest step cannot be read, the start ends with `CheckpointUnreadable`.",
    section="loaded",
)
def test_a_newer_step_that_the_system_does_not_give_ends_the_start(
    store: CheckpointStore, machine_fails: Callable[[int], None]
) -> None:
    machine_fails(6)
    found, events = candidates(store)
    with pytest.raises(CheckpointUnreadable, match=r"step-6 could not be read: .*Input/output error"):
        take(found, Load())
    assert events.steps("load_failed") == [6]
    assert take(candidates(store, wanted=4)[0], Load()) is not None
    assert names(store) == ["step-2", "step-4", "step-6"]


def make_unlistable(folder: Path) -> None:
    folder.rename(folder.with_name("away"))
    folder.write_text("in its place")


def test_a_folder_that_the_system_does_not_list_is_named(store: CheckpointStore) -> None:
    def load(_: LoadSource) -> None:
        make_unlistable(store.root)
        raise CheckpointDamaged(str(store.root / "step-6"), "a digest")

    for look in (lambda: take(candidates(store)[0], load), candidates(store)[0].first):
        with pytest.raises(FolderUnusable, match=r"checkpoint cannot be used for .*: \[Errno 20\] .*Make it a folder"):
            look()


def test_a_folder_that_the_system_does_not_list_after_the_load_is_named(store: CheckpointStore) -> None:
    def load(source: LoadSource) -> None:
        if source.step == 6:
            raise CheckpointDamaged(str(source.path), "a digest")
        make_unlistable(store.root)

    with pytest.raises(FolderUnusable, match="checkpoint cannot be used for checkpoints"):
        take(candidates(store)[0], load)
