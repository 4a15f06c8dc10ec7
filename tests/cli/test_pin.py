"""`pin` and `unpin`: one checkpoint stays, also while a job removes others."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Said
from tests.store import filled
from tests.store.crashing import Crash, Cut
from tests.store.filled import contents, fill, names
from torchtitan_lite.cli import pin as pin_module
from torchtitan_lite.cli.app import main
from torchtitan_lite.disk.lock_file import locked
from torchtitan_lite.events import ignore
from torchtitan_lite.store.holder import Holder
from torchtitan_lite.store.housekeeping import Housekeeping
from torchtitan_lite.store.manifest import CheckpointInfo
from torchtitan_lite.store.pins import Pins
from torchtitan_lite.store.retention import KeepLatest
from torchtitan_lite.store.store import CheckpointStore


@pytest.mark.parametrize("spelling", ["{}:2", "{}/step-2", "{}/step-2/"])
def test_a_step_is_pinned_however_it_is_spelt(tmp_path: Path, said: Said, spelling: str) -> None:
    fill(tmp_path, 1, 2, 3)
    assert said("pin", spelling.format(tmp_path)) == (0, f"Pinned step 2 of {tmp_path}\n", "")
    assert Pins(tmp_path).read() == {2}
    assert said("unpin", spelling.format(tmp_path)) == (0, f"Unpinned step 2 of {tmp_path}\n", "")
    assert Pins(tmp_path).read() == set()


@pytest.mark.parametrize("spelling", ["{}", "{}:latest", "{}/checkpoint", "{}/checkpoint:3"])
def test_the_latest_is_pinned_by_its_folder(tmp_path: Path, said: Said, spelling: str) -> None:
    fill(tmp_path / "checkpoint", 1, 3)
    assert said("pin", spelling.format(tmp_path))[0] == 0
    assert Pins(tmp_path / "checkpoint").read() == {3}


def test_a_second_pin_changes_nothing_and_says_so(tmp_path: Path, said: Said) -> None:
    fill(tmp_path, 1)
    said("pin", f"{tmp_path}:1")
    assert said("pin", f"{tmp_path}:1") == (0, f"Step 1 of {tmp_path} was pinned already\n", "")
    said("unpin", f"{tmp_path}:1")
    assert said("unpin", f"{tmp_path}:1") == (0, f"Step 1 of {tmp_path} was not pinned\n", "")


def test_json_has_all_pins(tmp_path: Path, said: Said) -> None:
    fill(tmp_path, 1, 2)
    said("pin", f"{tmp_path}:2")
    code, out, _ = said("pin", f"{tmp_path}:1", "--json")
    assert (code, json.loads(out)) == (0, {"folder": str(tmp_path), "step": 1, "changed": True, "pinned": [1, 2]})
    code, out, _ = said("unpin", f"{tmp_path}:2", "--json")
    assert (code, json.loads(out)) == (0, {"folder": str(tmp_path), "step": 2, "changed": True, "pinned": [1]})


def test_a_step_that_is_gone_can_be_unpinned(tmp_path: Path, said: Said) -> None:
    store = fill(tmp_path, 1, 2)
    said("pin", f"{tmp_path}:1")
    store.empty(store.discard(store.get(1)))
    assert said("unpin", f"{tmp_path}:1")[0] == 0
    assert Pins(tmp_path).read() == set()


def test_a_pinned_checkpoint_is_untouched_inside(tmp_path: Path, said: Said) -> None:
    fill(tmp_path, 1)
    before = contents(tmp_path / "step-1")
    said("pin", f"{tmp_path}:1")
    assert contents(tmp_path / "step-1") == before


def test_a_pin_during_a_job_counts_at_its_next_purge(tmp_path: Path, said: Said) -> None:
    store = fill(tmp_path, 1, 2, 3)
    (tmp_path / "writer.lock").write_bytes(Holder.this_process("trains", 0.0).to_bytes(1, 0.0))
    job = Housekeeping(KeepLatest(1), ignore)
    assert said("pin", f"{tmp_path}:1")[0] == 0
    job.purge(store)
    assert names(tmp_path) == ["pins.json", "step-1", "step-3", "writer.lock"]
    assert said("unpin", f"{tmp_path}:1")[0] == 0
    job.purge(store)
    assert names(tmp_path) == ["pins.json", "step-3", "writer.lock"]


class Slow(CheckpointStore):
    """Removes a checkpoint only after `go` is set; sets `is_removing` before."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_removing, self.go = threading.Event(), threading.Event()
        self._discard, self._retired.discard = self._retired.discard, self.slowly  # type: ignore[method-assign]

    def slowly(self, info: CheckpointInfo) -> list[Path]:
        self.is_removing.set()
        assert self.go.wait(30)
        return self._discard(info)


def test_a_pin_during_a_removal_waits_and_then_says_that_the_step_is_gone(tmp_path: Path, said: Said) -> None:
    fill(tmp_path, 1, 2)
    store = Slow(tmp_path)
    job = threading.Thread(target=lambda: Housekeeping(KeepLatest(1), ignore).purge(store))
    job.start()
    assert store.is_removing.wait(30)
    threading.Timer(0.2, store.go.set).start()
    code, out, err = said("pin", f"{tmp_path}:1")
    job.join()
    assert (code, out, err) == (1, "", f"error: step 1 is not in {tmp_path} (it has 2)\n")
    assert names(tmp_path) == ["step-2"]


def test_where_there_are_no_locks_a_step_that_is_gone_after_the_pin_is_an_error(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 1, 2)

    class Late(CheckpointStore):
        """Looks once before a job removes step 1, and then after it."""

        looks = 0

        def get(self, step: int) -> CheckpointInfo:
            Late.looks += 1
            if Late.looks == 2:
                self.empty(self._retired.discard(super().get(step)))
            return super().get(step)

    monkeypatch.setattr(pin_module, "open_store", lambda root: Late(Path(root)))
    code, _, err = said("pin", f"{tmp_path}:1")
    assert (code, err) == (1, f"error: step 1 of {tmp_path} was removed while it was being pinned\n")
    assert Pins(tmp_path).read() == set()


def test_two_pins_at_once_both_count(tmp_path: Path) -> None:
    fill(tmp_path, *range(8))
    children = []
    for step in range(8):
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os._exit(main(["pin", f"{tmp_path}:{step}"]))
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    assert Pins(tmp_path).read() == {*range(8)}


def test_another_process_that_keeps_the_lock_is_an_error(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 1)
    monkeypatch.setattr("torchtitan_lite.store.pins._A_PERSON_WAITS_SECONDS", 0.05)
    with locked(tmp_path, 0.05):
        code, out, err = said("pin", f"{tmp_path}:1")
    assert (code, out, err) == (1, "", f"error: {tmp_path}: another process has locked it for 0.05 s\n")


@pytest.mark.parametrize(
    ("put", "spelling", "code", "message"),
    [
        (lambda root: None, "{}:1", 1, "does not exist"),
        (lambda root: root.mkdir(), "{}", 1, "there is no complete checkpoint in it"),
        (lambda root: root.mkdir(), "{}:1", 1, "step 1 is not in {} (it has no checkpoint)"),
        (filled.foreign, "{}:5", 1, "step 5 is not in {} (it has no checkpoint)"),
        (filled.half_written, "{}:30", 1, "step 30 is not in {} (it has no checkpoint)"),
        (filled.of_torchtitan, "{}:10", 1, "{}/step-10 has no manifest, so no rule removes it and it needs no pin"),
        (filled.of_torchtitan, "{}/step-20", 1, "{}/step-20 has no manifest"),
        (filled.of_a_newer_version, "{}:10", 1, "has format version 99"),
        (lambda root: fill(root, 1), "{}:2", 1, "step 2 is not in {} (it has 1)"),
        (lambda root: fill(root, 1), "{}/step-1/manifest.json", 1, "it is not a folder"),
        (lambda root: fill(root, 1), "hdfs://bucket/run:1", 2, "'hdfs://bucket/run' is not the address of a folder"),
    ],
)
def test_what_cannot_be_pinned_is_one_sentence(
    tmp_path: Path, said: Said, put: Callable[[Path], object], spelling: str, code: int, message: str
) -> None:
    root = tmp_path / "there"
    put(root)
    found, out, err = said("pin", spelling.format(root))
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert err.startswith("error: ") and message.format(root) in err
    assert not (root / "pins.json").exists()


def test_a_damaged_step_is_not_pinned(tmp_path: Path, said: Said) -> None:
    fill(tmp_path, 1, 2)
    filled.damage(tmp_path, 1, "manifest.json")
    code, _, err = said("pin", f"{tmp_path}:1")
    assert code == 3 and f"{tmp_path}/step-1 is damaged" in err
    assert names(tmp_path) == ["step-1", "step-2"]


def test_a_checkpoint_under_another_name_needs_no_pin(tmp_path: Path, said: Said) -> None:
    fill(tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / "step-1-good")
    code, _, err = said("pin", tmp_path / "step-1-good")
    assert code == 1 and "has not the name of a step, so no rule removes it" in err


def test_a_malformed_file_is_named_and_kept(tmp_path: Path, said: Said) -> None:
    fill(tmp_path, 1)
    (tmp_path / "pins.json").write_bytes(b"[1]")
    for verb in ("pin", "unpin"):
        code, out, err = said(verb, f"{tmp_path}:1")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert f"{tmp_path}/pins.json does not say which steps are pinned" in err
    assert (tmp_path / "pins.json").read_bytes() == b"[1]"


@pytest.mark.promise("A kill of `prune`, `pin` or `bring-back` at any operation loses nothing.", section="kept")
def test_a_pin_that_is_cut_anywhere_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for at in range(1, 100):
        root = tmp_path / str(at)
        fill(root, 1, 2)
        main(["pin", f"{root}:1"])
        before = contents(root / "step-1") | contents(root / "step-2")
        disk = Cut(at)
        with monkeypatch.context() as patched:
            patched.setattr("torchtitan_lite.store.store.Pins", lambda root, disk=disk: Pins(root, disk))
            try:
                main(["pin", f"{root}:2"])
            except Crash:
                assert Pins(root).read() in ({1}, {1, 2})
            else:
                assert at > 4, "no operation was cut"
                return
        assert contents(root / "step-1") | contents(root / "step-2") == before
        assert main(["pin", f"{root}:2"]) == 0
        assert Pins(root).read() == {1, 2}
    raise AssertionError("more operations than expected")
