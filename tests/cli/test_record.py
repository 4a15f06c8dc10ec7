"""`verify --record`: digests for checkpoints that other libraries wrote, in one more file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from tests.checkpoint.reading.foreign_folders import of_0_3, save_plain
from tests.checkpoint.small_run import SmallRun
from tests.cli.conftest import Said
from tests.cli.folders import GOLDEN
from tests.disks import make_read_only, small_disk
from tests.store.filled import flip
from torchtitan_lite.store.layout import is_unmanaged
from torchtitan_lite.store.store import CheckpointStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
COMMAND = "verify"
RECORD = "torchtitan-lite.digests.json"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Return a folder that `dcp.save` wrote, with a file next to its own."""
    folder = save_plain({"model": {"weight": torch.arange(6.0), "bias": torch.ones(2)}, "step": 3}, tmp_path / "step-3")
    (folder / "meta.pt").write_bytes(b"of another library")
    return folder


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return time and contents of each file in `folder` but the record."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != RECORD)
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


def test_a_record_finds_a_flipped_bit_and_names_file_and_tensor(plain: Path, call: Said) -> None:
    before = files(plain)
    code, out, err = call(plain, "--record")
    assert (code, err) == (0, "")
    assert f"step-3: the digests of 3 files are recorded now, in {plain / RECORD}." in out
    assert files(plain) == before and {path.name for path in plain.iterdir()} - {RECORD} == {
        *(".metadata", "__0_0.distcp", "meta.pt")
    }
    code, out, _ = call(plain)
    assert code == 0 and "step-3: compared with the digests recorded on 20" in out
    flip(plain / "__0_0.distcp", (plain / "__0_0.distcp").read_bytes().index(torch.arange(6.0).numpy().tobytes()))
    code, out, _ = call(plain)
    assert code == 3 and "__0_0.distcp: bytes 0 to " in out and "in it: model.weight, " in out
    assert "If it was saved again since, replace the record with --record --again." in out


def test_a_record_finds_what_torch_save_has_no_checksum_of(plain: Path, call: Said) -> None:
    call(plain, "--record")
    flip(plain / "meta.pt", 2)
    assert call(plain, "--sizes")[0] == 0
    code, out, _ = call(plain)
    assert code == 3 and "meta.pt: bytes 0 to 18 are not what was saved" in out
    (plain / "meta.pt").unlink()
    code, out, _ = call(plain, "--sizes")
    assert code == 3 and "meta.pt: it is missing" in out


def test_dcp_loads_the_folder_and_it_stays_the_other_librarys(plain: Path, call: Said) -> None:
    call(plain, "--record")
    state: dict[str, Any] = {"model": {"weight": torch.zeros(6), "bias": torch.zeros(2)}, "step": 0}
    dcp_load(state, checkpoint_id=str(plain), no_dist=True)
    assert torch.equal(state["model"]["weight"], torch.arange(6.0)) and state["step"] == 3
    assert is_unmanaged(plain) and CheckpointStore(plain.parent).committed() == []


def test_a_record_is_compared_and_replaced_only_with_again(plain: Path, call: Said) -> None:
    call(plain, "--record")
    first = (plain / RECORD).read_bytes()
    code, out, _ = call(plain, "--record")
    assert code == 0 and "compared with the digests recorded" in out and (plain / RECORD).read_bytes() == first
    shutil.copytree(save_plain({"weight": torch.zeros(6)}, plain.parent / "other"), plain, dirs_exist_ok=True)
    assert call(plain, "--record")[0] == 3 and (plain / RECORD).read_bytes() == first
    code, out, _ = call(plain, "--record", "--again")
    assert code == 0 and "are recorded now" in out and (plain / RECORD).read_bytes() != first
    assert call(plain)[0] == 0


def test_a_damaged_checkpoint_is_not_recorded(plain: Path, call: Said) -> None:
    flip(plain / "__0_0.distcp", (plain / "__0_0.distcp").read_bytes().index(torch.arange(6.0).numpy().tobytes()))
    code, out, _ = call(plain, "--record")
    assert code == 3 and "step-3: no record is written, because it is damaged." in out
    assert not (plain / RECORD).exists()


def test_a_record_elsewhere_is_written_once_and_then_compared(plain: Path, tmp_path: Path, call: Said) -> None:
    record = tmp_path / "records" / "step-3.json"
    code, _, err = call(plain, "--record-to", record)
    assert code == 1 and f"{record.parent} cannot be used for checkpoints: no record can be written there (it" in err
    record.parent.mkdir()
    assert call(plain, "--record-to", record)[0] == 0 and not (plain / RECORD).exists()
    flip(plain / "meta.pt", 2)
    assert call(plain)[0] == 0, "nothing in the folder says what it was"
    code, out, _ = call(plain, "--record-to", record, "--json")
    [checkpoint] = json.loads(out)["checkpoints"]
    assert (code, checkpoint["findings"][0]["file"], checkpoint["compared_with"]) == (3, "meta.pt", "digests")
    assert checkpoint["record"]["written"] is None and checkpoint["record"]["compared_with_that_of"] > 0


@pytest.mark.parametrize("place", ["notes.txt", "step-3/notes.txt"])
def test_a_record_never_takes_the_place_of_another_file(place: str, plain: Path, tmp_path: Path, call: Said) -> None:
    (tmp_path / place).write_text("mine")
    code, out, err = call(plain, "--record-to", tmp_path / place, "--again")
    assert (code, out) == (2, "") and err.startswith(f"error: --record-to {tmp_path / place}")
    assert (tmp_path / place).read_text() == "mine"


def test_a_folder_that_cannot_be_written_names_the_way_out(plain: Path, call: Said) -> None:
    # Root may write into any folder: what stands here is what an error of the disk would leave.
    (plain / f".{RECORD}.tmp").mkdir()
    code, out, err = call(plain, "--record")
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert err.startswith(f"error: {plain} cannot be used for checkpoints: no record can be written there (")
    assert err.endswith("): write it elsewhere with --record-to FILE\n")


def test_a_read_only_disk_is_refused_before_it_is_read(tmp_path: Path, call: Said) -> None:
    with small_disk(tmp_path / "disk") as disk:
        folder = save_plain({"weight": torch.ones(3)}, disk / "step-3")
        make_read_only(disk)
        code, out, err = call(folder, "--record")
        assert (code, out) == (1, "") and "(it is read-only): write it elsewhere with --record-to FILE" in err
        assert call(folder, "--record-to", tmp_path / "record.json")[0] == 0


def test_a_damaged_record_is_named_and_written_again(plain: Path, call: Said) -> None:
    call(plain, "--record")
    flip(plain / RECORD, 60)
    code, out, _ = call(plain)
    assert code == 3 and f"{RECORD}: " in out
    assert call(plain, "--record", "--again")[0] == 0 and call(plain)[0] == 0


def test_each_checkpoint_of_another_library_in_a_folder_is_recorded(tmp_path: Path, call: Said) -> None:
    root = tmp_path / "checkpoint"
    with SmallRun(tmp_path) as run:
        run.train(1, last=False)
        of_0_3(run, root / "step-8")
    shutil.copytree(GOLDEN, root / "step-7")
    before = files(root / "step-7")
    assert call(root, "--record")[0] == 0
    assert (root / "step-8" / RECORD).exists() and not (root / "step-7" / RECORD).exists()
    assert files(root / "step-7") == before
    code, out, err = call(root / "step-7", "--record")
    assert (code, out) == (2, "") and "has digests in its manifest.json" in err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--again"], "--again replaces a record: it needs --record"),
        (["--sizes", "--record"], "--sizes reads no byte"),
        (["--record", "--record-to", "x"], "give one of them"),
    ],
)
def test_options_that_do_not_fit_together(options: list[str], text: str, plain: Path, call: Said) -> None:
    code, out, err = call(plain, *options)
    assert (code, out) == (2, "") and text in err
    assert not (plain / RECORD).exists()
