"""Verification finds any change of a checkpoint, names file and tensor, and takes nothing else for damage."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.checkpoint.reading.foreign_folders import save_plain
from tests.checkpoint.with_manifest import add_manifest, tensors_at
from tests.examples import examples
from tests.store.filled import flip
from torchtitan_lite.checkpoint.untrusted.safe_metadata import read_metadata
from torchtitan_lite.checkpoint.untrusted.stock_item import locate
from torchtitan_lite.disk.block_reader import BlockReader
from torchtitan_lite.disk.digest import BLOCK_BYTES
from torchtitan_lite.errors import CheckpointNotFound, CheckpointUnreadable, FormatTooNew
from torchtitan_lite.examining import file_digests
from torchtitan_lite.examining.file_digests import Finding
from torchtitan_lite.examining.verification import look_at, read_through
from torchtitan_lite.store.manifest import Manifest, seal

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json")


def golden(tmp_path: Path, version: int = 7) -> Path:
    """Return a copy of a checkpoint of two ranks."""
    folder = tmp_path / "step-7"
    shutil.copytree(GOLDEN / f"format-{version}" / "two-ranks" / "checkpoint" / "step-7", folder)
    return folder


def plain(tmp_path: Path) -> Path:
    """Return a checkpoint that plain DCP wrote."""
    torch.manual_seed(0)
    state = {
        "model": {"weight": torch.rand(37, 21), "brief": torch.rand(9).bfloat16(), "turned": torch.rand(4, 6).t()},
        "note": {"text": "x" * 300, "numbers": [1, 2.5]},
        "empty": torch.zeros(0, 3),
    }
    return save_plain(state, tmp_path / "plain")


def findings(folder: Path) -> list[Finding]:
    """Return everything that is wrong with the checkpoint in `folder`."""
    looked = look_at(folder)
    return [*looked.findings, *(read_through(looked).findings if looked.contents is not None else ())]


@pytest.mark.parametrize("ranks", ["one-process", "two-ranks", "with-records"])
@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_a_golden_checkpoint_is_complete(ranks: str, kind: str) -> None:
    looked = look_at(GOLDEN / "format-7" / ranks / kind / "step-7")
    assert looked.findings == looked.unknown == ()
    assert looked.has_digests
    seen: list[int] = []
    assert read_through(looked, seen.append).findings == ()
    assert sum(seen) == looked.nbytes


def test_a_plain_dcp_checkpoint_is_complete(tmp_path: Path) -> None:
    looked = look_at(plain(tmp_path))
    assert looked.findings == looked.unknown == ()
    assert not looked.has_digests
    read = read_through(looked)
    assert read.findings == () and read.num_without_checksum == 0


@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
@settings(max_examples=examples(100))
def test_a_changed_byte_is_found_wherever_it_is(file: str, where: float, change: int) -> None:
    with tempfile.TemporaryDirectory() as base:
        folder = golden(Path(base))
        data = bytearray((folder / file).read_bytes())
        place = int(where * len(data))
        keys = tensors_at(folder, file, place) if file.endswith(".distcp") else set()
        data[place] ^= change
        (folder / file).write_bytes(data)
        found = findings(folder)
        assert [finding.file for finding in found] == [file]
        assert keys <= set(found[0].keys)


def test_only_the_tensors_of_the_damaged_block_are_named(tmp_path: Path) -> None:
    state = {name: torch.rand(BLOCK_BYTES // 2) for name in ("one", "two", "three")}  # two blocks each
    folder = save_plain(state, tmp_path / "c")
    add_manifest(folder)
    [chunk] = look_at(folder).contents.tensors["two"].chunks  # type: ignore[union-attr]
    flip(folder / chunk.file, chunk.at + BLOCK_BYTES)
    [finding] = findings(folder)
    assert finding.keys == ("two",)
    block = (chunk.at + BLOCK_BYTES) // BLOCK_BYTES
    assert f"bytes {block * BLOCK_BYTES} to {(block + 1) * BLOCK_BYTES} " in finding.text


def test_each_damaged_part_of_a_file_is_a_finding(tmp_path: Path) -> None:
    folder = save_plain({"one": torch.rand(2 * BLOCK_BYTES)}, tmp_path / "c")
    add_manifest(folder)
    for block in (1, 2, 5):
        flip(folder / "__0_0.distcp", block * BLOCK_BYTES)
    first, second = findings(folder)
    assert f"bytes {BLOCK_BYTES} to {3 * BLOCK_BYTES} " in first.text
    assert f"bytes {5 * BLOCK_BYTES} to {6 * BLOCK_BYTES} " in second.text


def test_a_file_that_is_damaged_everywhere_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_digests, "SPAN_BLOCKS", 2)
    monkeypatch.setattr(file_digests, "MOST_DAMAGED_BLOCKS", 3)
    folder = save_plain({"one": torch.rand(5 * BLOCK_BYTES)}, tmp_path / "c")
    add_manifest(folder)
    (folder / "__0_0.distcp").write_bytes(bytes((folder / "__0_0.distcp").stat().st_size))
    damaged, rest = findings(folder)
    assert damaged.text.startswith("bytes 0 to ")
    assert "on were not read" in rest.text and rest.keys == ("one",)


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
@pytest.mark.parametrize("how", ["cut", "longer", "emptied", "missing", "a folder", "a link", "a pipe"])
def test_a_file_that_is_not_as_it_was_saved_is_named_with_its_tensors(file: str, how: str, tmp_path: Path) -> None:
    folder = golden(tmp_path)
    path, data = folder / file, (folder / file).read_bytes()
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how == "a link":
        (tmp_path / "other").write_bytes(data)
        path.symlink_to(tmp_path / "other")
    elif how == "a pipe":
        os.mkfifo(path)
    elif how != "missing":
        path.write_bytes({"cut": data[:-100], "longer": data + b"\0", "emptied": b""}[how])
    looked = look_at(folder)
    assert [finding.file for finding in looked.findings] == [file]
    assert file not in looked.sizes
    [finding] = looked.findings
    everything = {
        key for key, entry in Manifest.of_folder(folder).tensors.items() for c in entry["chunks"] if c[0] == file
    }  # type: ignore[union-attr]
    if how not in ("cut", "longer"):
        assert {key for key in everything if looked.contents.tensors[key].nbytes} <= set(finding.keys)  # type: ignore[union-attr]
    assert read_through(looked).findings == (), "the other files are verified, and are intact"


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_a_missing_file_of_a_plain_checkpoint_is_named_or_there_is_no_checkpoint(file: str, tmp_path: Path) -> None:
    folder = plain(tmp_path)
    (folder / file).unlink()
    if file == ".metadata":
        with pytest.raises(CheckpointNotFound, match=r"\.metadata"):
            look_at(folder)
    else:
        [finding] = look_at(folder).findings
        assert finding.file == file and "model.weight" in finding.keys


def test_a_changed_element_of_a_plain_checkpoint_is_found_by_its_checksum(tmp_path: Path) -> None:
    folder = plain(tmp_path)
    contents, chance = read_metadata(folder), random.Random(0)
    data = (folder / "__0_0.distcp").read_bytes()
    for key in ("model.weight", "model.brief", "model.turned"):
        [chunk] = contents.tensors[key].chunks
        assert chunk.item is not None
        item = data[chunk.item.offset :][: chunk.item.length]
        found = locate(lambda at, count, item=item: item[at : at + count], len(item))
        assert found is not None
        for _ in range(5):
            flip(folder / "__0_0.distcp", chunk.item.offset + found.at + chance.randrange(contents.tensors[key].nbytes))
            [finding] = findings(folder)
            assert (finding.file, finding.keys) == ("__0_0.distcp", (key,))
            assert "data/0 in it has another checksum" in finding.text
            (folder / "__0_0.distcp").write_bytes(data)


@pytest.mark.slow
def test_any_change_of_a_plain_checkpoint_is_found_or_harmless(tmp_path: Path) -> None:
    folder = plain(tmp_path)
    data, chance = (folder / "__0_0.distcp").read_bytes(), random.Random(1)
    expected = _loaded(folder)
    num_found = 0
    for _ in range(150):
        flip(folder / "__0_0.distcp", chance.randrange(len(data)))
        found = findings(folder)
        num_found += bool(found)
        assert found or _same(_loaded(folder), expected)
        (folder / "__0_0.distcp").write_bytes(data)
    assert num_found > 50


def _loaded(folder: Path) -> dict[str, Any]:
    state = {"model": {"weight": torch.zeros(37, 21), "brief": torch.zeros(9).bfloat16(), "turned": torch.zeros(6, 4)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    return state["model"]


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(a[key], b[key]) for key in a)


def test_a_plain_checkpoint_of_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path / "c", single_file_per_rank=False, sync_files=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save({f"w{number}": torch.ones(1) for number in range(60)}, storage_writer=writer, no_dist=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 40, hard))
    try:
        assert findings(tmp_path / "c") == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_items_without_a_checksum_are_counted(tmp_path: Path) -> None:
    folder = golden(tmp_path)
    (folder / "manifest.json").unlink()
    read = read_through(look_at(folder))
    assert read.findings == ()
    assert 0 < read.num_without_checksum < read.num_items


def test_a_tensor_that_is_not_covered_is_a_finding_of_its_own(tmp_path: Path) -> None:
    folder = golden(tmp_path)
    _edit(
        folder, b'"model.weight":{"dtype":"float32","shape":[5,3]', b'"model.weight":{"dtype":"float32","shape":[6,3]'
    )
    [finding] = look_at(folder).findings
    assert finding.keys == ("model.weight",)
    assert "its chunks have 15 elements where there are 18" in finding.text


def test_a_manifest_of_another_step_is_damage(tmp_path: Path) -> None:
    folder = golden(tmp_path).rename(tmp_path / "step-8")
    [finding] = look_at(folder).findings
    assert (finding.file, finding.text) == ("manifest.json", "it is the manifest of step 7")


def test_a_name_that_leads_out_of_the_folder_is_damage(tmp_path: Path) -> None:
    folder = golden(tmp_path)
    _edit(folder, b'[["__0_0.distcp",384,[0,0],[3,3]]', b'[["../../x/.0.0",384,[0,0],[3,3]]')
    [finding] = look_at(folder).findings
    assert finding.file == "manifest.json" and "is not the name of a file" in finding.text


def test_a_newer_format_is_no_damage(tmp_path: Path) -> None:
    folder = golden(tmp_path)
    _edit(folder, b'"oldest_reader": 7', b'"oldest_reader": 99')
    with pytest.raises(FormatTooNew):
        look_at(folder)


def test_other_files_in_the_folder_are_reported_and_are_no_damage(tmp_path: Path) -> None:
    folder = golden(tmp_path)
    (folder / "notes.txt").write_text("theirs")
    looked = look_at(folder)
    assert (looked.unknown, looked.findings) == (("notes.txt",), ())


def test_nothing_there_and_a_save_under_way_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="does not exist"):
        look_at(tmp_path / "gone")
    with pytest.raises(CheckpointNotFound, match=r"\.metadata"):
        look_at(tmp_path)
    staging = golden(tmp_path).rename(tmp_path / "step-7.staging")
    with pytest.raises(CheckpointNotFound, match="a save into it is under way"):
        look_at(staging)


def test_a_step_that_is_removed_or_replaced_meanwhile_is_no_damage(tmp_path: Path) -> None:
    looked = look_at(golden(tmp_path))
    (tmp_path / "step-7").rename(tmp_path / ".trash-step-7-1")
    with pytest.raises(CheckpointNotFound, match="it was removed or replaced while it was read"):
        read_through(looked)
    shutil.copytree(GOLDEN / "format-7" / "one-process" / "checkpoint" / "step-7", tmp_path / "step-7")
    with pytest.raises(CheckpointNotFound, match="it was removed or replaced while it was read"):
        read_through(looked)


def test_a_step_whose_files_are_gone_when_they_are_opened_is_no_damage(tmp_path: Path) -> None:
    looked = look_at(golden(tmp_path))

    def remove_first() -> BlockReader:
        shutil.rmtree(looked.path, ignore_errors=True)
        return BlockReader(threads=1)

    with pytest.raises(CheckpointNotFound, match="it was removed or replaced"):
        read_through(looked, make_reader=remove_first)


def test_an_error_of_the_machine_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = look_at(golden(tmp_path))

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointUnreadable, match="EIO"):
        read_through(looked, make_reader=lambda: BlockReader(1, pause=lambda seconds: None))


def test_torch_is_not_imported_and_numpy_only_for_what_has_no_digests(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from torchtitan_lite.examining.verification import *\n"
        "read_through(look_at(Path(sys.argv[1])))\n"
        "sys.exit(len({'torch', 'numpy'} & set(sys.modules)) + 2 * ('torch' in sys.modules))"
    )
    for folder, numpy in ((golden(tmp_path), 0), (plain(tmp_path), 1)):
        assert subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, check=False).returncode == numpy


def _edit(folder: Path, old: bytes, new: bytes) -> None:
    """Replace `old` in the manifest by `new`, and seal it again."""
    text = (folder / "manifest.json").read_bytes()
    assert text.count(old) == 1
    body = text[: text.rindex(b',\n"digest"')]
    (folder / "manifest.json").write_bytes(seal(body.replace(old, new)))
