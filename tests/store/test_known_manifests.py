"""Each manifest of a folder is read once, and an unreadable one stops nothing."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.store import filled
from tests.store.looks import parsed_from_now_on
from torchtitan_lite import faults
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnreadable, SaveFailed
from torchtitan_lite.events import ignore
from torchtitan_lite.store import known_manifests, layout
from torchtitan_lite.store.described import DESCRIPTION_BYTES
from torchtitan_lite.store.housekeeping import Housekeeping
from torchtitan_lite.store.lineage import MAX_ABANDONED, Lineage
from torchtitan_lite.store.manifest import CheckpointInfo, Manifest
from torchtitan_lite.store.retention import KeepLatest
from torchtitan_lite.store.store import CheckpointStore

DATA = "__0_0.distcp"
KEPT = 120
LATER_NS = 10**9
RUN = Lineage("run1")

_seen: list[tuple[str, str]] | None = None


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _seen is not None and event in ("open", "os.listdir", "os.scandir"):
        _seen.append((event, str(args[0])))


sys.addaudithook(_watch)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    global _seen
    yield
    _seen = None


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Return a store whose clock says that every file was written a while ago."""
    return CheckpointStore(tmp_path / "checkpoint", now_ns=lambda: time.time_ns() + LATER_NS)


def watched() -> list[tuple[str, str]]:
    """The files opened and folders listed from now on."""
    global _seen
    _seen = []
    return _seen


def manifest(step: int, lineage: Lineage = RUN, **fields: Any) -> Manifest:
    files = {DATA: FileRecord(4), layout.METADATA: FileRecord(6)}
    return filled.manifest_of(step, **{"files": files, "lineage": lineage, **fields})


def put(root: Path, made: Manifest, name: str = "") -> Path:
    """Create a folder with this manifest, as if it had been committed."""
    folder = root / (name or layout.step_dir(made.step))
    folder.mkdir(parents=True)
    filled.write(folder)
    (folder / layout.MANIFEST).write_bytes(made.to_json())
    return folder


def save(store: CheckpointStore, step: int, lineage: Lineage = RUN) -> CheckpointInfo:
    return filled.commit(store, step, lineage=lineage)


def steps(store: CheckpointStore) -> list[int]:
    return [info.step for info in store.committed()]


def test_a_commit_opens_no_manifest_that_was_read_before(store: CheckpointStore) -> None:
    for step in range(1, KEPT + 1):
        put(store.root, manifest(step))
    seen = watched()
    save(store, KEPT + 1)
    assert sorted(opened_of(seen)) == sorted(layout.step_dir(step) for step in range(1, KEPT + 1))
    save(store, KEPT + 2)
    seen.clear()
    save(store, KEPT + 3)
    for info in store.committed():
        assert store.check_sizes(info) == []
    assert opened_of(seen) == [], "what this process wrote it knows"


def test_a_save_looks_at_few_of_the_checkpoints_that_this_process_knows(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[str] = []

    def identity_of(folder: Path) -> known_manifests.Identity:
        looked_at.append(folder.name)
        return look(folder)

    look = known_manifests.manifest_identity
    monkeypatch.setattr(known_manifests, "manifest_identity", identity_of)
    for step in range(1, 3 * KEPT - 1):
        put(store.root, manifest(step))
    put(store.root, manifest(3 * KEPT - 1, Lineage("run1", abandons=((9999, "another"),))))
    housekeeping = Housekeeping(KeepLatest(2 * KEPT), ignore)
    for step in range(3 * KEPT, 3 * KEPT + 5):
        save(store, step)
        housekeeping.purge(store)
    looked_at.clear()
    save(store, 3 * KEPT + 5)
    housekeeping.purge(store)
    assert len({*looked_at}) <= 12, "the latest ten, the new one, and what goes"
    assert steps(store) == [*range(KEPT + 6, 3 * KEPT + 6)]


def test_what_is_gone_or_has_another_name_is_not_listed_any_more(store: CheckpointStore) -> None:
    for step in range(1, 6):
        save(store, step)
    assert [info.step for info in store.listed()] == [1, 2, 3, 4, 5]
    shutil.rmtree(store.root / "step-2")
    (store.root / "step-4").rename(store.root / "elsewhere")
    save(store, 6)
    assert [info.step for info in store.listed()] == [1, 3, 5, 6]
    (store.root / "elsewhere").rename(store.root / "step-4")
    assert [info.step for info in store.listed()] == [1, 3, 4, 5, 6]


def opened_of(seen: list[tuple[str, str]]) -> list[str]:
    """Return the checkpoints whose manifests were opened, in order."""
    paths = [Path(path) for event, path in seen if event == "open"]
    return [path.parent.name for path in paths if path.name == layout.MANIFEST and "staging" not in path.parent.name]


def test_a_changed_manifest_is_read_again(store: CheckpointStore) -> None:
    for step in (2, 4):
        put(store.root, manifest(step))
    assert steps(store) == [2, 4]
    path = store.root / "step-4" / layout.MANIFEST
    data = path.read_bytes()
    path.write_bytes(data.replace(b"run1", b"run2"))
    assert steps(store) == [2]
    with pytest.raises(CheckpointDamaged, match=r"step-4 is damaged: manifest\.json: its own digest"):
        store.get(4)
    path.write_bytes(data)
    assert steps(store) == [2, 4]
    path.unlink()
    assert (steps(store), store.damaged()) == ([2], {})


def test_a_manifest_changed_within_a_tick_of_the_clock_is_read_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, now_ns=lambda: 0)
    path = put(tmp_path, manifest(4)) / layout.MANIFEST
    data, before = path.read_bytes(), path.stat()
    assert steps(store) == [4]
    path.write_bytes(data.replace(b"run1", b"run2"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert steps(store) == []


@pytest.mark.parametrize("later_ns", [0, LATER_NS], ids=["at once", "later"])
def test_what_another_process_does_to_a_manifest_of_this_one_is_found(
    tmp_path: Path, later_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what was just written, the bytes are compared: it may change without another time of its file."""
    parsed = parsed_from_now_on(monkeypatch)
    store = CheckpointStore(tmp_path / "checkpoint", now_ns=lambda: time.time_ns() + later_ns)
    for step in range(1, 5):
        save(store, step)
    infos = store.committed()
    assert [store.check_sizes(info) for info in infos] == [[]] * 4 and not parsed
    paths = [store.root / layout.step_dir(step) / layout.MANIFEST for step in range(1, 5)]
    data, before = paths[0].read_bytes(), paths[0].stat()
    paths[0].write_bytes(data.replace(b"run1", b"run2"))
    os.utime(paths[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    paths[1].write_bytes(b"short")
    paths[2].unlink()
    again = store.root / "again"
    again.write_bytes(paths[3].read_bytes())
    again.replace(paths[3])
    assert steps(store) == [4] and len(parsed) == 3, "damaged, damaged, gone, another file with the same bytes"
    assert store.damaged().keys() == {1, 2}
    assert ["manifest" in finding for info in infos[:3] for finding in store.check_sizes(info)] == [True] * 3


def test_a_manifest_replaced_by_another_file_is_read_again(store: CheckpointStore) -> None:
    save(store, 4, Lineage("run1"))
    assert [info.run_id for info in store.committed()] == ["run1"]
    save(store, 4, Lineage("run2"))
    assert [info.run_id for info in store.committed()] == ["run2"]


@pytest.mark.promise(
    "An older step whose manifest cannot be read causes one warning; it stops no save and no start, and is "
    "neither removed nor quarantined.",
    section="failure",
)
@pytest.mark.parametrize("code", ["EIO", "EACCES", "ESTALE"])
def test_an_unreadable_step_is_one_warning_and_stops_no_commit(
    store: CheckpointStore, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (2, 4):
        put(store.root, manifest(step))
    faults.install(f"{code}@listing:step=2,times=always", rank=0)
    for step in (6, 8):
        save(store, step)
    store.recover()
    assert steps(store) == [4, 6, 8]
    assert (store.damaged(), list(store.unreadable())) == ({}, [2])
    lines = [line for line in caplog.messages if "neither counts nor removes" in line]
    assert len(lines) == 1
    assert str(store.root / "step-2") in lines[0]
    with pytest.raises(CheckpointUnreadable, match="step-2 could not be read"):
        store.get(2)
    faults.install("", rank=0)
    assert steps(store) == [2, 4, 6, 8]


def test_an_unreadable_step_is_kept_when_it_is_saved_again(store: CheckpointStore) -> None:
    put(store.root, manifest(2))
    faults.install("EIO@listing:path=step-2/manifest.json,times=always", rank=0)
    save(store, 2, Lineage("run2"))
    assert sorted(path.name for path in store.root.iterdir()) == ["step-2", "step-2.foreign"]


@pytest.mark.promise("Names that a manifest lists by the thousand are looked up once.", section="hostile")
@pytest.mark.parametrize("name", ["step-5", ".replaced-step-5-1"])
def test_thousands_of_abandoned_steps_are_looked_for_once(store: CheckpointStore, name: str) -> None:
    put(store.root, manifest(5, Lineage("run0")), name)
    abandons = [
        *((step, "aa") for step in range(10_000)),
        *((5, f"b{number}") for number in range(10_000)),
        (5, "run0"),
    ]
    made = manifest(7, Lineage("run1", abandons=tuple(abandons)))
    assert len(made.to_json()) < DESCRIPTION_BYTES
    put(store.root, made)
    seen = watched()
    store.recover()
    assert len(seen) < 40
    assert sorted(path.name for path in store.root.iterdir()) == ["step-5.abandoned-run0", "step-7"]


def test_a_manifest_that_abandons_too_many_steps_is_damage_and_is_not_written(store: CheckpointStore) -> None:
    abandons = tuple((step, "aa") for step in range(MAX_ABANDONED + 1))
    with pytest.raises(CheckpointDamaged, match=f"lineage: abandons: expected .* {MAX_ABANDONED} at most"):
        Manifest.parse(manifest(7, Lineage("run1", abandons=abandons)).to_json())
    staging = filled.staged(store, 7, bytes(1 << 20))
    made = manifest(7, Lineage("run1", abandons=abandons), files={DATA: FileRecord(1 << 20)})
    with pytest.raises(SaveFailed, match=f"it would abandon {MAX_ABANDONED + 1} checkpoints"):
        store.commit(7, made, place=staging.name)


def test_a_save_fails_if_its_manifest_would_be_refused_as_too_large(store: CheckpointStore) -> None:
    staging = filled.staged(store, 7)
    made = manifest(7, extra={"note": "x" * DESCRIPTION_BYTES}, files={DATA: FileRecord(4)})
    with pytest.raises(SaveFailed, match=r"manifest\.json would have .* bytes"):
        store.commit(7, made, place=staging.name)
    assert steps(store) == []


@pytest.mark.promise(
    "A manifest is not read if it is larger than 512 KiB plus 4 bytes for each byte of data next to it.",
    section="hostile",
)
def test_a_manifest_may_be_as_large_as_the_data_next_to_it_can_need(store: CheckpointStore) -> None:
    made = manifest(7, extra={"note": "x" * DESCRIPTION_BYTES})
    folder = put(store.root, made)
    assert "manifest.json: expected at most" in store.damaged()[7].finding
    os.truncate(folder / DATA, 1 << 20)
    (folder / layout.MANIFEST).touch()
    store = CheckpointStore(store.root)
    assert (steps(store), store.damaged()) == ([7], {})


@pytest.mark.promise("Nothing outside the folder of a hostile checkpoint is read or written.", section="hostile")
@pytest.mark.parametrize("what", ["link", "pipe"])
def test_findings_are_not_written_through_a_link(store: CheckpointStore, tmp_path: Path, what: str) -> None:
    folder = put(store.root, manifest(5))
    (tmp_path / "mine").write_text("precious")
    if what == "link":
        (folder / layout.FINDINGS).symlink_to(tmp_path / "mine")
    else:
        os.mkfifo(folder / layout.FINDINGS)
    aside = store.quarantine(5, ["bits"])
    assert (tmp_path / "mine").read_text() == "precious"
    assert "bits" in (aside / layout.FINDINGS).read_text()
    assert not (aside / layout.FINDINGS).is_symlink()
