"""A run whose folder is in an object store: saved, resumed, fallen back and rolled back as on a disk."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from obstore.fsspec import register
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from tests.bucket.proxy import Action, Proxy, Request, answers, where
from tests.bucket.saving import set_aside_in
from tests.bucket.server import Server
from tests.bucket.stored import flip
from tests.checkpoint.small_run import SmallRun, Tiny, job_config, same
from tests.cli.command import command
from tests.examples import mostly_slow
from torchtitan_lite.bucket.bucket_store import BucketStore, open_bucket
from torchtitan_lite.bucket.head import Status
from torchtitan_lite.bucket.objects import connect
from torchtitan_lite.checkpoint import load_model
from torchtitan_lite.checkpoint.run_folders import RunFolders
from torchtitan_lite.config.address import parse_address
from torchtitan_lite.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointUnreadable,
    ConfigError,
    FolderUnusable,
)
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import CheckpointKind

MODES = ("disabled", "async", "async_with_pinned_mem")


@pytest.fixture(params=mostly_slow(MODES, kept=("async_with_pinned_mem",)))
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def straight(tmp_path: Path, steps: int) -> dict[str, Any]:
    """Return the contents of a run on a disk that never stopped."""
    with SmallRun(tmp_path / "straight", interval=100).loaded() as run:
        run.train(steps)
        return run.contents()


def stored(folder: str) -> BucketStore:
    return open_bucket(folder)


def steps(folder: str) -> list[int]:
    return [info.step for info in stored(folder).committed()]


def test_a_restarted_run_is_the_run_that_never_stopped(folder: str, mode: str, tmp_path: Path) -> None:
    with SmallRun(tmp_path, folder=folder, interval=2, async_mode=mode) as first:
        assert not first.manager.load()
        first.train(5, last=False)
    assert steps(folder) == [2, 4]
    with SmallRun(tmp_path, folder=folder, interval=2, async_mode=mode, seed=1).resumed() as second:
        assert second.train_state.step == 4
        second.train(7)
        assert same(second.contents(), straight(tmp_path, 7))
    assert steps(folder) == [2, 4, 6, 7]
    assert not (tmp_path / "s3:").exists()


@pytest.mark.slow
def test_retention_removes_the_objects_of_what_is_not_kept(folder: str, mode: str, tmp_path: Path) -> None:
    with SmallRun(tmp_path, folder=folder, interval=1, async_mode=mode, keep_latest_k=2).loaded() as run:
        run.train(5)
        assert run.manager._housekeeping.wait(60)
    assert steps(folder) == [4, 5]
    found = {each.key.partition("/")[0].partition(".")[0] for each in connect(parse_address(folder)).list("step")}
    assert found == {"step-4", "step-5"}


def test_a_changed_byte_makes_a_load_take_the_step_before_and_the_head_says_so(folder: str, tmp_path: Path) -> None:
    SmallRun(tmp_path, folder=folder, interval=2).loaded().finished(6)
    flip(stored(folder).get(6), layout.data_file(0, 0))
    with SmallRun(tmp_path, folder=folder, interval=2, seed=1).resumed() as second:
        assert second.train_state.step == 4
        second.train(6)
        assert same(second.contents(), straight(tmp_path, 6))
    assert steps(folder) == [2, 4, 6]
    assert [(each.step, each.status) for each in set_aside_in(stored(folder))] == [(6, Status.CORRUPT)]


def test_rolled_back_the_steps_after_it_are_abandoned(folder: str, tmp_path: Path) -> None:
    SmallRun(tmp_path, folder=folder, interval=2).loaded().finished(6)
    for expected in (2, 4):  # The second start continues the branch.
        with SmallRun(tmp_path, folder=folder, interval=2, load_step=2, seed=1).resumed() as branch:
            assert branch.train_state.step == expected
            branch.train(expected + 2)
    assert steps(folder) == [2, 4, 6]
    assert [(each.step, each.status) for each in set_aside_in(stored(folder))] == [
        (4, Status.ABANDONED),
        (6, Status.ABANDONED),
    ]


@pytest.mark.slow
def test_a_run_that_rolls_back_by_itself_has_its_record_in_the_store(folder: str, tmp_path: Path) -> None:
    with SmallRun(tmp_path, folder=folder, interval=1).loaded() as first:
        first.train(5)
        assert first.manager.roll_back(6, "loss is nan") == 5
        assert first.manager.roll_back(6, "loss is nan") == 4
    (one, two) = stored(folder).rollbacks.read()
    assert (one.skipped, one.target, two.skipped, two.target) == (6, 5, 5, 4)
    assert steps(folder) == [1, 2, 3, 4, 5]
    with SmallRun(tmp_path, folder=folder, interval=1, seed=1).resumed() as again:
        assert (again.train_state.step, again.manager.batches_to_skip(5)) == (4, 2)
        again.train(6)
    assert [(each.step, each.status) for each in set_aside_in(stored(folder))] == [(5, Status.ABANDONED)]


@pytest.mark.slow
def test_a_run_ends_with_its_export_in_another_folder_and_a_new_one_begins_from_it(folder: str, tmp_path: Path) -> None:
    exports = f"{folder}-exports"
    settings: dict[str, Any] = {"folder": folder, "export_folder": exports, "export_dtype": "bfloat16", "interval": 9}
    with SmallRun(tmp_path, **settings).loaded() as run:
        run.train(3)
        weights = run.contents()["model"]
    (info,) = stored(exports).committed()
    assert (info.step, info.kind) == (3, CheckpointKind.WEIGHTS_ONLY)
    model = Tiny()
    assert load_model(model, exports) == 3
    assert same(dict(model.state_dict()), {key: _rounded(value) for key, value in weights.items()})
    for number, place in enumerate((f"{folder}/step-3", str(stored(folder).get(3).path))):
        of_run: dict[str, Any] = {"initial_load_path": place, "initial_load_model_only": False}
        with SmallRun(tmp_path / "new", folder=f"{folder}-new-{number}", **of_run).resumed() as new:
            assert new.train_state.step == 3
    with (
        pytest.raises(CheckpointNotFound, match=r"step 4 .*\(it has 3\)"),
        SmallRun(tmp_path / "other", folder=f"{folder}-other", initial_load_path=f"{folder}/step-4") as other,
    ):
        other.manager.load()


def _rounded(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16).to(value.dtype) if value.is_floating_point() else value


@pytest.mark.slow
def test_a_step_that_was_named_and_is_damaged_ends_the_start(folder: str, tmp_path: Path) -> None:
    SmallRun(tmp_path, folder=folder, interval=2).loaded().finished(4)
    flip(stored(folder).get(2), layout.data_file(0, 0))
    with SmallRun(tmp_path, folder=folder, load_step=2) as second, pytest.raises(CheckpointDamaged):
        second.manager.load()
    assert steps(folder) == [2, 4]


@pytest.mark.slow
def test_a_save_that_the_store_refuses_is_a_failed_save_and_the_next_one_is_made(
    proxy: Proxy, folder: str, mode: str, tmp_path: Path
) -> None:
    with SmallRun(tmp_path, folder=folder, interval=1, async_mode=mode, max_failed_saves=3).loaded() as run:
        run.train(1, last=False)
        assert run.manager.wait()
        proxy.again(where(answers(403, "AccessDenied"), path="*.distcp*"))
        run.train(2, last=False)
        run.manager.wait()
        proxy.again()
        run.train(3)
    assert run.events.steps("save_failed") == [2]
    assert "the store refuses it" in run.events.figures("save_failed")["reason"]
    assert steps(folder) == [1, 3]


def test_a_rank_that_may_not_read_is_no_rank_with_another_folder(proxy: Proxy, folder: str, tmp_path: Path) -> None:
    first = RunFolders(job_config(tmp_path, folder=folder), "a1")
    tokens = first.take()
    other_rank = RunFolders(job_config(tmp_path, folder=folder), "a1")
    assert other_rank.unseen(tokens) == []
    assert other_rank.unseen(["another"]) == [0]
    proxy.again(where(answers(403, "InvalidAccessKeyId"), path="*head.json*"))
    with pytest.raises(FolderUnusable, match=r"does not know the access key: see AWS_ACCESS_KEY_ID.*folder"):
        other_rank.unseen(tokens)
    proxy.again()
    first.release()


@pytest.mark.slow
def test_a_store_that_refuses_in_a_load_is_not_taken_for_a_removal(
    proxy: Proxy, folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SmallRun(tmp_path, folder=folder, interval=2).loaded().finished(2)
    # From the first part of a file on it refuses everything.
    refused = where(answers(403, "AccessDenied"))
    is_refusing = threading.Event()

    def from_a_file_on(request: Request) -> Action | None:
        if ".distcp" in request.path:
            is_refusing.set()
        return refused(request) if is_refusing.is_set() else None

    proxy.again(from_a_file_on)
    with SmallRun(tmp_path, folder=folder) as run, pytest.raises(CheckpointUnreadable, match="the store refuses it"):
        run.manager.load()
    proxy.again()
    assert "was removed during the load" not in caplog.text


@pytest.mark.slow
def test_plain_dcp_reads_the_prefix_of_a_checkpoint(folder: str, tmp_path: Path) -> None:
    with SmallRun(tmp_path, folder=folder, interval=2).loaded() as run:
        run.train(2)
        weights = run.contents()["model"]
    register("s3")
    read = {f"model.{key}": torch.zeros_like(value) for key, value in weights.items()}
    dcp.load(read, storage_reader=FsspecReader(str(stored(folder).get(2).path)), no_dist=True)
    assert same(read, {f"model.{key}": value for key, value in weights.items()})


@pytest.mark.slow
def test_without_metadata_it_resumes_and_a_copy_on_a_disk_gets_it(folder: str, mode: str, tmp_path: Path) -> None:
    SmallRun(tmp_path, folder=folder, interval=2, async_mode=mode, dcp_metadata="never").loaded().finished(2)
    place = stored(folder).get(2).path
    assert {each.key.rpartition("/")[2] for each in connect(parse_address(folder)).list(f"{place.name}/")} == {
        layout.data_file(0, 0),
        layout.MANIFEST,
    }
    copy = tmp_path / "step-2"
    assert command("verify", f"{folder}:2").code == 0
    assert command("add-metadata", f"{folder}:2").code == 2
    assert command("convert", f"{folder}:2", copy, "--layout", "ours").code == 0
    assert command("add-metadata", copy).code == 0
    assert command("verify", copy).code == 0
    with SmallRun(tmp_path, folder=folder, interval=2, async_mode=mode, seed=1).resumed() as second:
        second.train(6)
        assert same(second.contents(), straight(tmp_path, 6))


@pytest.mark.promise("No secret is in a file or in the log.", section="bucket")
def test_no_secret_is_in_a_file_or_a_line_of_the_log(
    folder: str, s3: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    SmallRun(tmp_path, folder=folder, interval=2).loaded().finished(4)
    secrets = [s3.environment[name] for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID")]
    objects = connect(parse_address(folder))
    texts = [objects.get(each.key)[0] for each in objects.list("")]
    texts += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) >= 8
    assert not [secret for secret in secrets for text in [*texts, caplog.text.encode()] if secret.encode() in text]


def test_an_import_needs_a_disk_and_says_so_before_it_reads_anything(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an import needs a folder on disk, found "):
        SmallRun(
            tmp_path,
            folder=folder,
            initial_load_in_hf=True,
            initial_load_path="x",
            seams={"import_weights": lambda source, out: []},
        )
