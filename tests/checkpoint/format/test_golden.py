"""The checkpoints in tests/golden/: this version reads every version of the format, and its own is pinned."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.checkpoint.format import golden_run
from tests.checkpoint.format.golden_run import BUFFERS, GOLDEN, PARAMETERS, STEP, WRITERS, WRITTEN, GoldenRun, expected
from tests.checkpoint.only_once import load_and_close
from tests.checkpoint.small_run import same
from tests.ranks import Ranks
from tests.store.filled import flip
from torchtitan_lite.cli.app import main
from torchtitan_lite.disk.block_writer import Bounced, write_blocks
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.errors import AllCheckpointsDamaged
from torchtitan_lite.store.format_version import FORMAT_VERSION
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.store import CheckpointStore

FOLDERS = sorted((path for path in GOLDEN.glob("format-*/*")), key=lambda path: (len(path.parts[-2]), path.parts[-2:]))
CURRENT = {writer: GOLDEN / f"format-{version}" / writer for writer, version in WRITTEN.items()}

MIB = 1 << 20
LONG = (bytes(range(251)) * (5 * MIB // 502 + 1))[: 5 * MIB // 2 + 3]
"""Bytes of three blocks: their digests depend on the size of a block and the order of blocks."""
BLOCKS_OF_LONG = "6e0d7ac36b8c10ff389c602a75e16490bdd5fec6935137e1"


def version_of(folder: Path) -> int:
    return int(folder.parent.name.removeprefix("format-"))


def minor(version: str) -> str:
    """Return 2.13 of 2.13.0+cpu."""
    return ".".join(version.split(".")[:2])


def torch_of(golden: Path) -> str:
    """Return the minor version of torch that wrote a folder."""
    manifest = json.loads((golden / "checkpoint" / f"step-{STEP}" / "manifest.json").read_bytes())
    return minor(manifest["versions"]["torch"])


def named(folder: Path) -> str:
    return "/".join(folder.parts[-2:])


writes_as_the_golden_ones = pytest.mark.skipif(
    {*map(torch_of, CURRENT.values())} != {minor(torch.__version__)} or torch.cuda.is_available(),
    reason="another torch has other optimizer settings and pickles, and with a GPU its generator is saved too",
)
each_folder = pytest.mark.parametrize("golden", FOLDERS, ids=named)


def copied(golden: Path, tmp_path: Path) -> Path:
    """Copy `golden` to a folder that a run may change."""
    return Path(shutil.copytree(golden, tmp_path / "run"))


def test_every_version_of_the_format_has_a_folder_by_each_number_of_ranks_that_wrote_it() -> None:
    """scripts/make_golden_checkpoints.py writes those of a new version."""
    assert {named(folder) for folder in FOLDERS} == {named(folder) for folder in CURRENT.values()}
    assert max(WRITTEN.values()) == FORMAT_VERSION


@each_folder
@pytest.mark.parametrize("name", ["checkpoint", "export"])
def test_a_golden_checkpoint_says_which_version_and_how_many_ranks_wrote_it(golden: Path, name: str) -> None:
    [info] = CheckpointStore(golden / name).committed()
    assert CheckpointStore(golden / name).check_sizes(info) == []
    manifest = Manifest.of_folder(info.path)
    assert manifest is not None
    assert (manifest.format_version, manifest.world_size) == (version_of(golden), WRITERS[golden.name])
    assert (manifest.step, manifest.lineage.run_id, info.run_id) == (STEP, "golden", "golden")
    assert manifest.kind.value == {"checkpoint": "full", "export": "weights_only"}[name]


@each_folder
def test_a_full_golden_checkpoint_restores_every_value(golden: Path, tmp_path: Path) -> None:
    run = GoldenRun(copied(golden, tmp_path), FORMAT_VERSION, filled=False)
    load_and_close(run.manager)
    assert run.manager.loaded_step == STEP
    assert run.model.turned.stride() == (1, 3)
    assert_same(run.contents(), expected(version_of(golden)))


@pytest.mark.parametrize("golden", [folder for folder in FOLDERS if folder.name == "one-process"], ids=named)
def test_the_random_generators_of_one_process_continue_where_they_were(golden: Path, tmp_path: Path) -> None:
    GoldenRun(tmp_path / "none", FORMAT_VERSION, filled=True)
    numbers = [random.random(), np.random.random(), torch.rand(()).item()]
    run = GoldenRun(copied(golden, tmp_path), FORMAT_VERSION, filled=False)
    with run.manager:
        run.manager.load()
    assert [random.random(), np.random.random(), torch.rand(()).item()] == numbers


@each_folder
def test_a_new_run_begins_with_golden_weights(golden: Path, tmp_path: Path) -> None:
    weights = str(golden / "export" / f"step-{STEP}")
    run = GoldenRun(tmp_path, FORMAT_VERSION, filled=False, initial_load_path=weights)
    load_and_close(run.manager)
    assert run.manager.loaded_step is None
    assert_same(run.contents()["model"], expected(version_of(golden))["model"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # DCP warns in a single process.
@each_folder
def test_plain_dcp_reads_a_golden_checkpoint(golden: Path, tmp_path: Path) -> None:
    wanted = expected(version_of(golden))
    if golden.name == "without-metadata":
        golden = copied(golden, tmp_path)
        for name in ("checkpoint", "export"):
            assert main(["add-metadata", str(golden / name / f"step-{STEP}")]) == 0
    full: dict[str, Any] = {"model": zeros(), "plain": {"tensor": torch.zeros(3, dtype=torch.int32), "pair": None}}
    dcp_load(full, checkpoint_id=golden / "checkpoint" / f"step-{STEP}", no_dist=True)
    assert_same(full["model"], wanted["model"])
    assert_same(full["plain"], {key: wanted["plain"][key] for key in full["plain"]})
    weights = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in zeros().items()}
    dcp_load(weights, checkpoint_id=golden / "export" / f"step-{STEP}", no_dist=True)
    assert_same({name: tensor.to(wanted["model"][name].dtype) for name, tensor in weights.items()}, wanted["model"])


@each_folder
def test_a_run_continues_from_a_golden_checkpoint_and_saves_next_to_it(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, tmp_path)
    run = GoldenRun(folder, FORMAT_VERSION, filled=False)
    with run.manager:
        run.manager.load()
        run.train_state.step += 1
        assert run.manager.save(STEP + 1, force=True)
    again = GoldenRun(folder, FORMAT_VERSION, filled=False)
    with again.manager:
        again.manager.load()
    assert again.manager.loaded_step == STEP + 1
    assert_same(again.contents(), run.contents())
    first, second = CheckpointStore(folder / "checkpoint").committed()
    assert (first.step, second.step, second.run_id, second.lineage.parent_step) == (STEP, STEP + 1, "golden", STEP)


@pytest.mark.parametrize("golden", FOLDERS, ids=named)
@pytest.mark.parametrize("name", ["checkpoint", "export"])
def test_the_digests_in_a_golden_manifest_are_those_that_the_format_page_describes(golden: Path, name: str) -> None:
    """Compute them with xxhash alone, as docs/checkpoint_format.md describes, not with the package."""
    folder = golden / name / f"step-{STEP}"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    text, _, last = files.pop("manifest.json").rpartition(b',\n"digest": "')
    assert last.decode() == xxhash.xxh3_128_hexdigest(text) + '"\n}\n'
    document = json.loads(text + b"}")
    ranks = range(document["world_size"])
    of_tensors = [files.pop(f"__{rank}_0.distcp", None) for rank in ranks]
    records = [files.pop(f"__{rank}_0.json") for rank in ranks if f"__{rank}_0.json" in files]
    assert document["files_of_ranks"] == {
        "sizes": [data if data is None else len(data) for data in of_tensors],
        "record_sizes": [len(record) for record in records],
        "digests": "".join(page_record(data)["blocks"] for data in records or of_tensors if data is not None),
    }
    for data, record in zip(of_tensors, records, strict=False):
        assert json.loads(record)["blocks"] == page_record(data)["blocks"]
    assert document["files"] == {name: page_record(data) for name, data in files.items()}


@pytest.mark.parametrize("golden", FOLDERS, ids=named)
def test_one_changed_bit_in_a_golden_checkpoint_is_found(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, tmp_path)
    flip(folder / "checkpoint" / f"step-{STEP}" / "__0_0.distcp")
    run = GoldenRun(folder, FORMAT_VERSION, filled=False)
    with run.manager, pytest.raises(AllCheckpointsDamaged, match=r"__0_0\.distcp"):
        run.manager.load()


def test_a_file_of_several_blocks_has_the_digests_that_it_always_had(tmp_path: Path) -> None:
    """The golden files are shorter than a block."""

    def fill(buffer: memoryview, begin: int, end: int) -> None:
        buffer[: end - begin] = LONG[begin:end]

    written = write_blocks(tmp_path / "f", Bounced(len(LONG), fill))
    for record in (FileRecord.of(LONG), written):
        assert record.blocks.hex() == BLOCKS_OF_LONG
    assert page_record(LONG) == {"size": len(LONG), "blocks": BLOCKS_OF_LONG}


@writes_as_the_golden_ones
@pytest.mark.parametrize("writer", ["one-process", "without-metadata"])
def test_what_one_process_writes_is_the_golden_checkpoint_byte_for_byte(tmp_path: Path, writer: str) -> None:
    golden_run.save(tmp_path, writer=writer)
    assert_as_golden(tmp_path, writer)


@writes_as_the_golden_ones
@pytest.mark.parametrize("writer", ["two-ranks", "with-records"])
def test_what_two_ranks_write_is_the_golden_checkpoint_byte_for_byte(
    two_ranks: Ranks, tmp_path: Path, writer: str
) -> None:
    two_ranks.run(save_as_one_of_several_ranks, folder=tmp_path, writer=writer)
    assert_as_golden(tmp_path, writer)


@writes_as_the_golden_ones
@pytest.mark.slow  # five processes for one case
def test_what_five_ranks_write_is_the_golden_checkpoint_byte_for_byte(tmp_path: Path) -> None:
    with closing(Ranks(5)) as five_ranks:
        five_ranks.run(save_as_one_of_several_ranks, folder=tmp_path)
    assert_as_golden(tmp_path, "five-ranks")


def test_tensors_cut_into_four_chunks_or_more_are_stored_in_runs() -> None:
    manifest = Manifest.of_folder(CURRENT["five-ranks"] / "checkpoint" / f"step-{STEP}")
    assert manifest is not None
    entries = {key: entry for key, entry in manifest.tensors.items() if key.startswith("model.")}
    assert {key for key, entry in entries.items() if "runs" in entry} == {"model.weight"}
    first = entries["model.weight"]["runs"][0]
    assert (first[:2], first[3:]) == ([5, [0, 1]], [0, [0, 0], [1, 3]]), "each rank has one row"


def test_two_ranks_read_every_golden_checkpoint(two_ranks: Ranks, tmp_path: Path) -> None:
    folders = [Path(shutil.copytree(golden, tmp_path / named(golden))) for golden in FOLDERS]
    found = two_ranks.run(load_as_one_of_two_ranks, folders=folders)
    assert found == [[STEP] * len(folders)] * 2


def save_as_one_of_several_ranks(rank: int, folder: Path, writer: str = "") -> None:
    golden_run.save(folder, mesh(), writer)


def load_as_one_of_two_ranks(rank: int, folders: list[Path]) -> list[int | None]:
    """Load each of `folders` and compare every value with what it must hold. Returns the loaded steps."""
    steps = []
    for folder in folders:
        run = GoldenRun(folder, FORMAT_VERSION, filled=False, mesh=mesh())
        load_and_close(run.manager)
        assert_same(run.contents(), expected(version_of(folder)))
        steps.append(run.manager.loaded_step)
    return steps


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def assert_as_golden(folder: Path, writer: str) -> None:
    for name in ("checkpoint", "export"):
        written, golden = (path / name / f"step-{STEP}" for path in (folder, CURRENT[writer]))
        golden_run.fix(written)
        assert sorted(path.name for path in written.iterdir()) == sorted(path.name for path in golden.iterdir())
        for path in (*written.glob("*.distcp"), *written.glob("__*.json")):
            assert path.read_bytes() == (golden / path.name).read_bytes(), f"{path} is not as in {golden}"
        if writer != "without-metadata":
            found, wanted = (pickle.loads((path / ".metadata").read_bytes()) for path in (written, golden))
            assert found == wanted
        assert_same(document(written), document(golden))


def document(folder: Path) -> dict[str, Any]:
    """Return the manifest in `folder` without the fields that another release, option or Python may change."""
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    # DCP's metadata is a pickle: its bytes depend on which equal strings are the same object, which means nothing.
    del found["versions"], found["extra"]["config"], found["digest"]
    found["files"].pop(".metadata", None)
    return found


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare keys, then value by value, so that a failure names the key."""
    assert found.keys() == wanted.keys()
    for key in wanted:
        if isinstance(wanted[key], dict) and wanted[key]:
            assert_same(found[key], wanted[key])
        else:
            assert same(found[key], wanted[key]), f"{key}: {found[key]} is not {wanted[key]}"


def page_record(data: bytes) -> dict[str, Any]:
    """Return the record that docs/checkpoint_format.md describes for a file that holds `data`."""
    blocks = b"".join(xxhash.xxh3_64_digest(data[at : at + MIB]) for at in range(0, len(data), MIB))
    return {"size": len(data), "blocks": blocks.hex()}


def zeros() -> dict[str, torch.Tensor]:
    """Return a tensor of zeros for each tensor of the model."""
    kinds = {name: (dtype, shape) for name, (dtype, shape, _) in PARAMETERS.items()} | BUFFERS
    return {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in kinds.items()}
