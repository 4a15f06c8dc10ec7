"""A checkpoint saved without `.metadata`: ours all read it, and the file that is added later is that of the save."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from tests.checkpoint.one_file import as_one_file
from tests.checkpoint.sharded_run import sharded_run
from tests.checkpoint.small_run import SmallRun, Tiny, same
from tests.cli.command import CLI, command
from tests.ranks import Ranks, on_two_ranks
from tests.store.crashing import Crash, Cut, contents
from torchtitan_lite.checkpoint.format.metadata_file import metadata_head
from torchtitan_lite.checkpoint.format.tensor_table import TensorTable
from torchtitan_lite.checkpoint.format.torch_contents import DTYPES
from torchtitan_lite.converting.rewriting import add_metadata
from torchtitan_lite.errors import CheckpointNotFound, ConfigError
from torchtitan_lite.examining.verification import look_at, read_through
from torchtitan_lite.memory.images.card import commit_of, rests_in, same_contents
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import Manifest, Table
from torchtitan_lite.store.store import CheckpointStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Odd:
    """A state with objects of which JSON can hold only some."""

    def state_dict(self) -> dict[str, Any]:
        return {"names": ["a", "b"], "odd": {1, 2}, "typed": {1: "one", "x": {}}, "size": torch.Size([3])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


def run_in(folder: Path, **checkpoint: Any) -> SmallRun:
    return SmallRun(folder, interval=2, states={"odd": Odd()}, **checkpoint)


def saved(folder: Path, dcp_metadata: str, **checkpoint: Any) -> Path:
    """Save two steps of a run, and return the folder of the second."""
    run = run_in(folder, dcp_metadata=dcp_metadata, **checkpoint).loaded().finished(4)
    return run.root / "step-4"


@pytest.fixture(scope="module")
def never(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step that was saved without `.metadata`; no test changes it."""
    return saved(tmp_path_factory.mktemp("never"), "never")


@pytest.fixture
def step(never: Path, tmp_path: Path) -> Path:
    """A copy of it, in a folder of checkpoints."""
    return Path(shutil.copytree(never.parent, tmp_path / "run" / "checkpoint")) / "step-4"


def weights_by_dcp(folder: Path) -> dict[str, Any]:
    read = {f"model.{key}": torch.zeros_like(value) for key, value in Tiny().state_dict().items()}
    dcp.load(read, checkpoint_id=folder)
    return read


def manifest_of(folder: Path) -> Manifest:
    found = Manifest.of_folder(folder)
    assert found is not None
    return found


def test_the_manifest_says_that_the_file_was_left_out(never: Path) -> None:
    manifest = manifest_of(never)
    assert sorted(path.name for path in never.iterdir()) == ["__0_0.distcp", "manifest.json"]
    assert manifest.extra["dcp_metadata"] == "left out"
    assert manifest.objects["odd.names"]["value"] == ["a", "b"]
    assert {*manifest.files} == {"__0_0.distcp"}


def test_a_small_state_gets_the_file_with_its_save_as_before_and_dcp_reads_it(tmp_path: Path, never: Path) -> None:
    auto = saved(tmp_path / "auto", "auto")
    manifest = manifest_of(auto)
    assert "dcp_metadata" not in manifest.extra
    assert layout.METADATA in manifest.files
    assert contents(auto)[layout.METADATA] == contents(saved(tmp_path / "always", "always"))[layout.METADATA]
    assert manifest.files["__0_0.distcp"] == manifest_of(never).files["__0_0.distcp"]
    weights_by_dcp(auto)


def test_plain_dcp_cannot_read_it_and_does_after_the_verb(step: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"\.metadata"):
        weights_by_dcp(step)
    before = contents(step)
    assert command("add-metadata", step).code == 0
    assert contents(step).items() >= before.items()
    read = weights_by_dcp(step)
    with run_in(step.parents[1]).loaded() as run:
        assert same(read, {f"model.{key}": value for key, value in run.model.state_dict().items()})
    assert as_one_file(step)["odd"]["odd"] == {1, 2}


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_the_verb_writes_the_bytes_that_the_save_would_have_written(tmp_path: Path, mode: str) -> None:
    always = saved(tmp_path / "always", "always", async_mode=mode, memory_ttl_seconds=0)
    never = saved(tmp_path / "never", "never", async_mode=mode, memory_ttl_seconds=0)
    assert add_metadata(never) == (never / layout.METADATA).stat().st_size
    assert (never / layout.METADATA).read_bytes() == (always / layout.METADATA).read_bytes()


def _save_on_ranks(rank: int, folder: Path, mode: str) -> None:
    for choice in ("always", "never"):
        own = [{"position": rank, "rest": {"odd": {rank}, "name": f"of rank {rank}"}}]
        run = sharded_run(folder / choice, interval=2, dcp_metadata=choice, loader=Own(own[0]), async_mode=mode)
        with run.manager:
            run.train(2, last=False)


class Own:
    """A state of each rank."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = {f"rank {state['position']}": state}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def _same_metadata(folder: Path) -> Manifest:
    always, never = (folder / choice / "checkpoint" / "step-2" for choice in ("always", "never"))
    add_metadata(never)
    assert (never / layout.METADATA).read_bytes() == (always / layout.METADATA).read_bytes()
    return manifest_of(never)


@pytest.mark.slow
def test_it_does_for_what_two_ranks_wrote(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_save_on_ranks, folder=tmp_path, mode="disabled")
    manifest = _same_metadata(tmp_path)
    assert {entry["item"][0] for entry in manifest.objects.values()} == {"__0_0.distcp", "__1_0.distcp"}


@pytest.mark.slow
@on_two_ranks
def test_two_ranks_resume_from_it(rank: int, tmp_path: Path) -> None:
    for last in (2, 4):
        run = sharded_run(tmp_path, interval=2, dcp_metadata="never")
        with run.manager:
            assert run.manager.load() == (last > 2)
            run.manager.reset()
            run.train(last, last=False)
    straight = sharded_run(tmp_path / "straight", load_only=True)
    straight.train(4, last=False)
    straight.manager.close()
    assert same(run.contents(), straight.contents())


def test_a_resumed_run_continues_as_if_it_was_not_stopped(tmp_path: Path) -> None:
    straight = run_in(tmp_path / "straight").loaded().finished(6)
    saved(tmp_path / "run", "never")
    with run_in(tmp_path / "run", dcp_metadata="never").resumed() as run:
        run.train(6)
        assert same(run.contents(), straight.contents())
    with run_in(
        tmp_path / "new", initial_load_path=str(run.root / "step-6"), initial_load_model_only=False
    ).resumed() as new:
        assert same(new.contents(), straight.contents())


@pytest.mark.parametrize(
    "verb",
    [
        ("ls",),
        ("inspect",),
        ("verify",),
        ("verify", "--sizes"),
        ("convert", "OUT", "--layout", "dcp"),
        ("convert", "OUT", "--layout", "torchtitan"),
        ("reshard", "OUT", "--files", "2"),
        ("export", "OUT/weights.safetensors"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("is_added", [False, True], ids=["without", "added"])
def test_each_verb_works_with_and_without_it(verb: tuple[str, ...], is_added: bool, step: Path, tmp_path: Path) -> None:
    if is_added:
        add_metadata(step)
    out = tmp_path / "made"
    arguments = [each.replace("OUT", str(out / "step-4")) for each in verb[1:]]
    ended = command(verb[0], step.parent if verb[0] == "ls" else step, *arguments)
    assert ended.code == 0, ended.err
    if verb[0] in ("convert", "reshard"):
        assert (out / "step-4" / layout.METADATA).is_file()
    if verb[0] == "reshard":
        assert "dcp_metadata" not in manifest_of(out / "step-4").extra
        assert command("diff", step, out / "step-4").code == 0
        weights_by_dcp(out / "step-4")


def test_it_counts_for_no_size_and_goes_with_the_checkpoint(step: Path) -> None:
    nbytes = manifest_of(step).nbytes
    add_metadata(step)
    listed = {each["name"]: each for each in command("ls", step.parent, "--json").json["checkpoints"]}
    assert listed["step-4"]["bytes"] == nbytes
    assert command("prune", step.parent, "--keep-latest", "1").code == 0
    assert sorted(path.name for path in step.parent.glob("step-*")) == ["step-4"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"."),
        lambda path: path.write_bytes(path.read_bytes().replace(b"first", b"fifth")),
        lambda path: path.write_bytes(b""),
        lambda path: (path.rename(path.with_name("other")), path.symlink_to("other")),
    ],
    ids=["cut", "longer", "changed", "empty", "a link"],
)
def test_a_wrong_one_is_a_finding_of_verify_and_no_load_minds(spoil: Callable[[Path], Any], step: Path) -> None:
    add_metadata(step)
    looked = look_at(step)
    assert looked.findings + read_through(looked).findings == ()
    spoil(step / layout.METADATA)
    looked = look_at(step)
    assert looked.findings == ()
    assert [(each.file, each.keys) for each in read_through(looked).findings] == [(layout.METADATA, ())]
    assert command("verify", step, "--sizes").code == 0
    with run_in(step.parents[1]).resumed() as run:
        assert run.manager.loaded_step == 4
    add_metadata(step)
    assert command("verify", step).code == 0


def test_cut_anywhere_the_checkpoint_is_as_before_and_the_next_call_finishes(step: Path, tmp_path: Path) -> None:
    before = contents(step)
    shutil.copytree(step, tmp_path / "whole")
    add_metadata(tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    for at in range(1, 9):
        folder = Path(shutil.copytree(step, tmp_path / "cut" / "step-4"))
        try:
            add_metadata(folder, Cut(at))
        except Crash:
            after = contents(folder)
            assert {key: after[key] for key in before} == before
            assert after.get(layout.METADATA) in (None, expected[layout.METADATA])
            assert look_at(folder).findings == ()
            add_metadata(folder)
        else:
            break
        assert contents(folder) == expected
        shutil.rmtree(folder)
    assert 4 < at < 8, "each operation was cut once, and then none"


def test_a_full_disk_leaves_nothing_and_names_the_folder(step: Path) -> None:
    class Full(Cut):
        def write_file(self, path: Path, data: bytes) -> None:
            path.write_bytes(data[:100])
            raise OSError(28, "No space left on device", str(path))

    before = contents(step)
    with pytest.raises(OSError, match=f"No space left on device: '{step}/"):
        add_metadata(step, Full())
    assert contents(step) == before


def test_a_job_that_replaces_the_step_meanwhile_keeps_what_it_wrote(step: Path, tmp_path: Path) -> None:
    other = saved(tmp_path / "other", "always")
    expected = contents(other)

    class Replacing(Cut):
        def replace(self, src: Path, dst: Path) -> None:
            step.rename(step.with_name("before"))
            other.rename(step)
            super().replace(src, dst)

    with pytest.raises(CheckpointNotFound, match="was removed or replaced meanwhile"):
        add_metadata(step, Replacing())
    assert contents(step) == expected


def test_of_two_that_add_it_one_is_refused(step: Path) -> None:
    may_end, has_begun = threading.Event(), threading.Event()

    class Slow(Cut):
        def write_file(self, path: Path, data: bytes) -> None:
            has_begun.set()
            may_end.wait()
            super().write_file(path, data)

    thread = threading.Thread(target=add_metadata, args=(step, Slow()))
    thread.start()
    has_begun.wait()
    try:
        with pytest.raises(ConfigError, match="another process is writing"):
            add_metadata(step)
    finally:
        may_end.set()
        thread.join()
    assert command("verify", step).code == 0


def test_a_leftover_of_a_killed_call_that_leads_out_is_not_followed(step: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"kept")
    (step / "..metadata.tmp").symlink_to(outside)
    add_metadata(step)
    assert outside.read_bytes() == b"kept"
    assert sorted(path.name for path in step.iterdir()) == [".metadata", "__0_0.distcp", "manifest.json"]


def test_a_copy_under_another_name_is_listed_and_can_be_named(step: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(step, step.with_name("step-4-good")))
    listed = {each["name"]: each for each in command("ls", step.parent, "--json").json["checkpoints"]}
    assert listed["step-4-good"]["state"] == "foreign"
    assert listed["step-4-good"]["kind"] == "full"
    assert command("verify", copy).code == 0


def test_an_image_of_the_same_step_is_a_copy_of_it(never: Path) -> None:
    manifest = manifest_of(never)
    values = {key: {"value": each["value"]} if "value" in each else each for key, each in manifest.objects.items()}
    assert same_contents(manifest, dataclasses.replace(manifest, objects=Table(values)))


def test_images_know_a_damaged_one_before_and_after_the_file_was_added(step: Path) -> None:
    store = CheckpointStore(step.parent)
    commit = commit_of(store.get(4))
    assert commit is not None
    whole = (step / layout.MANIFEST).read_bytes()
    for is_added in (False, True):
        (step / layout.MANIFEST).write_bytes(b"")
        assert [rest.is_rest_of(commit) for rest in rests_in(store)] == [True], is_added
        (step / layout.MANIFEST).write_bytes(whole)
        add_metadata(step)


def test_verify_does_not_wait_for_a_pipe_in_its_place(step: Path) -> None:
    os.mkfifo(step / layout.METADATA)
    assert [each.file for each in read_through(look_at(step)).findings] == [layout.METADATA]


def test_no_part_of_it_grows_with_the_ranks_times_the_tensors() -> None:
    runs = [[1000, [0, 1], 640, 0, [0, 0], [4, 64]]]
    table = {f"m.{number}": {"dtype": "float32", "shape": [4000, 64], "runs": runs} for number in range(20)}
    tensors = TensorTable.parse(Table.of_text(Table(table).text, ""), DTYPES)
    assert max(map(len, metadata_head(tensors, [], {key: ("m", key[2:]) for key in table}))) < 300_000


@pytest.mark.slow
def test_the_verb_in_another_process_writes_the_same_bytes_of_exported_weights(tmp_path: Path) -> None:
    for choice in ("always", "never"):
        run_in(tmp_path / choice, dcp_metadata=choice, export_folder="exports").loaded().finished(2)
    always, never = (tmp_path / choice / "exports" / "step-2" for choice in ("always", "never"))
    assert subprocess.run([*CLI, "add-metadata", str(never)], check=False, stdout=subprocess.DEVNULL).returncode == 0
    assert (never / layout.METADATA).read_bytes() == (always / layout.METADATA).read_bytes()
