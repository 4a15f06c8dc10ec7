"""`reshard`: the same checkpoint in another number of files, which loads as the old one does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from tests.checkpoint.reading.foreign_folders import of_0_3
from tests.checkpoint.small_run import SmallRun, same
from tests.cli.conftest import Said
from tests.store.filled import flip
from torchtitan_lite.checkpoint.format.structure import encode_structure
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.examining.opened import OpenedCheckpoint, open_checkpoint
from torchtitan_lite.examining.tensor_stream import TensorStream
from torchtitan_lite.log import counted
from torchtitan_lite.store.manifest import Manifest

GOLDEN = Path(__file__).parents[1] / "golden"
STEP = GOLDEN / "format-7" / "two-ranks" / "checkpoint" / "step-7"
COMMAND = "reshard"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def tensors_of(opened: OpenedCheckpoint) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and elements of each tensor."""
    files = opened.manifest.files if opened.manifest is not None else {}
    stream = TensorStream(opened.folder, opened.contents, files)
    return {
        key: (str(tensor.dtype), tensor.shape, b"".join(map(bytes, stream.slices(key))))
        for key, tensor in opened.contents.tensors.items()
    }


@pytest.mark.parametrize("files", [1, 2, 5])
@pytest.mark.parametrize("writers", ["one-process", "two-ranks"])
def test_the_content_of_a_golden_checkpoint_stays(writers: str, files: int, tmp_path: Path, call: Said) -> None:
    step = GOLDEN / "format-7" / writers / "checkpoint" / "step-7"
    code, out, err = call(step, tmp_path / "step-7", "--files", files)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].endswith(f" in {counted(files, 'file')} of tensors")
    before, after = open_checkpoint(step), open_checkpoint(tmp_path / "step-7")
    assert tensors_of(after) == tensors_of(before)
    assert after.contents.objects.keys() == before.contents.objects.keys()
    values = {key: stored.value for key, stored in before.contents.objects.items() if stored.item is None}
    assert {key: after.contents.objects[key].value for key in values} == values
    assert after.contents.paths == before.contents.paths
    structures = [opened.contents.structure for opened in (before, after)]
    assert [each and encode_structure(each) for each in structures[:1]] == [
        each and encode_structure(each) for each in structures[1:]
    ]
    assert before.manifest is not None
    assert after.manifest is not None
    for name in ("step", "kind", "created_at", "world_size", "lineage", "extra"):
        assert getattr(after.manifest, name) == getattr(before.manifest, name), name
    assert after.manifest.files == {
        path.name: FileRecord.of(path.read_bytes())
        for path in (tmp_path / "step-7").iterdir()
        if path.name != "manifest.json"
    }
    assert len([*(tmp_path / "step-7").glob("*.distcp")]) == files


def test_a_run_resumes_from_it(tmp_path: Path, call: Said) -> None:
    with SmallRun(tmp_path / "a").loaded() as run:
        run.train(3)
        expected = run.contents()
    assert call(tmp_path / "a", tmp_path / "b" / "checkpoint" / "step-3", "--files", 4)[0] == 0
    with SmallRun(tmp_path / "b", seed=5).resumed() as resumed:
        found = resumed.contents()
    assert same(found, expected)


def test_a_plain_folder_stays_plain(tmp_path: Path, call: Said) -> None:
    with SmallRun(tmp_path / "a") as run:
        run.step()
        folder = of_0_3(run, tmp_path / "titan")
        model = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    code, out, _ = call(folder, tmp_path / "out", "--files", 3, "--json")
    assert (code, json.loads(out)["files"]) == (0, [*(f"__{rank}_0.distcp" for rank in range(3)), ".metadata"])
    state = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    dcp_load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert same(state, model)


def test_refusals_are_one_sentence_and_leave_nothing(tmp_path: Path, call: Said) -> None:
    damaged = tmp_path / "step-7"
    shutil.copytree(STEP, damaged)
    manifest = Manifest.of_folder(damaged)
    assert manifest is not None
    flip(damaged / "__1_0.distcp", manifest.tensors["model.weight"]["chunks"][1][1])
    for arguments, expected, text in (
        ((STEP, tmp_path / "out", "--files", 0), 2, "--files 0: expected at least 1"),
        ((STEP, tmp_path / "out", "--files", 100_000), 2, "the tensors are too small for 100000 files: ask for at "),
        ((STEP, tmp_path / "step-8", "--files", 2), 2, "is the name of step 8, and the checkpoint is of step 7"),
        ((STEP, damaged, "--files", 2), 2, "expected a new folder, found a checkpoint"),
        ((damaged, tmp_path / "out", "--files", 2), 3, "is damaged: bytes 0 to "),
        (("hdfs://bucket/run:7", tmp_path / "out", "--files", 2), 2, "is not the address of a folder"),
        ((tmp_path / "none", tmp_path / "out", "--files", 2), 1, "does not exist"),
    ):
        code, out, err = call(*arguments)
        assert (code, out, err.count("\n")) == (expected, "", 1), (arguments, err)
        assert text in err
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]
