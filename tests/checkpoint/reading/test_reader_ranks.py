"""Two ranks read a checkpoint, each its part: an error on one of them is raised on both."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.checkpoint.with_manifest import add_manifest
from tests.ranks import Ranks
from tests.store.filled import flip
from torchtitan_lite import faults
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointDamaged, CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ROWS, COLUMNS = 1024, 1024


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write 4 MiB of one tensor, and 2 MiB of an object that is in the data file only."""
    state = {"model": {"w": torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS).float()}, "s": {"text": "x" * (2 << 20)}}
    dcp_save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    add_manifest(tmp_path / "c")
    return tmp_path / "c"


def place_of(folder: Path, row: int) -> tuple[Path, int]:
    """Return the file and the byte where `row` begins."""
    manifest = add_manifest(folder)
    [name, at, *_] = manifest.tensors["model.w"]["chunks"][0]
    return folder / name, at + row * COLUMNS * 4


def read(rank: int, folder: Path, dim: int = 0, fault: str = "") -> tuple[str, torch.Tensor]:
    """Read everything. Returns the error that it raised, as "type: keys", and this rank's part."""
    mesh = init_device_mesh("cpu", (2,))
    live = distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(dim)])
    assert isinstance(live, DTensor)
    faults.install(fault, rank=rank)
    try:
        checkpoint = StoredCheckpoint(folder, Peers(timedelta(seconds=60)))
        checkpoint.verify_rest()
        checkpoint.read_model({"w": live})
    except CheckpointError as error:
        return f"{type(error).__name__}: {', '.join(getattr(error, 'keys', ()))}", live.to_local()
    finally:
        faults.install("", rank=rank)
    return "", live.to_local()


@pytest.mark.parametrize("dim", [0, 1])
def test_each_rank_reads_its_part(two_ranks: Ranks, folder: Path, dim: int) -> None:
    expected = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS).float().chunk(2, dim)
    for (found, local), part in zip(two_ranks.run(read, folder=folder, dim=dim), expected, strict=True):
        assert found == ""
        assert torch.equal(local, part)


@pytest.mark.promise(
    "By default no run resumes from changed files: all ranks load the next older step, and the log names the other.",
    section="loaded",
)
@pytest.mark.parametrize("row", [ROWS // 8, ROWS - ROWS // 8])
def test_damage_in_one_ranks_part_is_raised_on_all(two_ranks: Ranks, folder: Path, row: int) -> None:
    flip(*place_of(folder, row))
    assert [found for found, _ in two_ranks.run(read, folder=folder)] == ["CheckpointDamaged: model.w"] * 2


def test_damage_outside_all_tensors_is_raised_on_all_before_a_tensor_changes(two_ranks: Ranks, folder: Path) -> None:
    flip(folder / "__0_0.distcp", 3 << 19)
    for found, local in two_ranks.run(read, folder=folder):
        assert found == "CheckpointDamaged: "
        assert not local.any()


@pytest.mark.promise("An I/O error is not damage: nothing is renamed, and the start fails.", section="loaded")
def test_an_error_of_the_machine_on_one_rank_outweighs_damage_on_another(two_ranks: Ranks, folder: Path) -> None:
    flip(*place_of(folder, ROWS // 8))
    fault = "EIO@read:rank=1,times=always,path=*.distcp"
    assert [found for found, _ in two_ranks.run(read, folder=folder, fault=fault)] == ["CheckpointUnreadable: "] * 2


def test_an_error_of_the_machine_outweighs_damage_before_a_tensor_is_read(two_ranks: Ranks, folder: Path) -> None:
    """Of several files each rank looks at some; what the lowest rank finds is no worse than an error of the machine."""
    of_many = folder.with_name("of-many-files")
    state = {"model": {"w": torch.ones(ROWS, COLUMNS)}, "s": {name: name * (1 << 20) for name in "abcdef"}}
    writer = FileSystemWriter(of_many, single_file_per_rank=False)
    dcp_save(state, storage_writer=writer, no_dist=True)
    manifest = add_manifest(of_many)
    tensor_file = manifest.tensors["model.w"]["chunks"][0][0]
    for file in of_many.glob("*.distcp"):
        if file.name != tensor_file:
            flip(file, 1 << 19)
    fault = "EIO@read:rank=1,times=always,path=*.distcp"
    for found, local in two_ranks.run(read, folder=of_many, fault=fault):
        assert found == "CheckpointUnreadable: "
        assert not local.any()


def test_damage_has_its_own_type_in_one_process_too(folder: Path) -> None:
    flip(*place_of(folder, 0))
    with pytest.raises(CheckpointDamaged):
        StoredCheckpoint(folder, Peers(timedelta(seconds=60))).read_model({"w": torch.zeros(ROWS, COLUMNS)})
