"""Large jobs: what one rank alone knows of a checkpoint is in a record of it, and the manifest does not grow with it.

Here every job is large: records begin with one rank.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.checkpoint.small_run import job_config
from tests.ranks import on_two_ranks
from tests.store.filled import flip
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.state.per_rank import PerRank
from torchtitan_lite.checkpoint.state.stateful import DictState
from torchtitan_lite.cli.app import main
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.errors import AllCheckpointsDamaged
from torchtitan_lite.store import rank_records
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.rank_records import RankRecord


@contextmanager
def every_job_is_large() -> Iterator[None]:
    before = rank_records.FROM_RANKS
    rank_records.FROM_RANKS = 1
    try:
        yield
    finally:
        rank_records.FROM_RANKS = before


@pytest.fixture(autouse=True)
def _large() -> Iterator[None]:
    with every_job_is_large():
        yield


class Job:
    """A model of one layer, sharded if there are several ranks, AdamW, and a state of each rank."""

    def __init__(self, folder: Path, rank: int = 0, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(6, 5)
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for name, parameter in [*self.model.named_parameters()]:
                sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
                self.model.register_parameter(name, nn.Parameter(sharded))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.own = {"seen": torch.arange(3) + 10 * rank, "name": f"rank {rank}", "shared": 1}
        config = job_config(folder, **options)
        states = {"own": PerRank(DictState(self.own))}
        self.manager = CheckpointManager(None, self.model, self.optimizer, None, states, config)

    def train(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def values(self) -> dict[str, torch.Tensor]:
        found = {name: _whole(each).clone() for name, each in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            found |= {f"{name}.{key}": _whole(each).clone() for key, each in self.optimizer.state[parameter].items()}
        return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def saved(folder: Path, rank: int = 0, **options: Any) -> tuple[dict[str, torch.Tensor], float]:
    """Return the values of a job that saves step 1, and the next random number of its rank."""
    job = Job(folder, rank, **options)
    with job.manager as manager:
        job.train()
        random.seed(rank)
        manager.save(1, force=True)
        return job.values(), random.random()


def resumed(folder: Path, rank: int = 0, **options: Any) -> tuple[dict[str, torch.Tensor], float, dict[str, Any]]:
    """Return the same of a job that resumes from step 1, and the state of its rank."""
    job = Job(folder, rank + 7, **options)
    with job.manager as manager:
        assert manager.load()
        return job.values(), random.random(), dict(job.own)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def step(folder: Path) -> Path:
    return folder / "checkpoint" / "step-1"


def manifest_of(folder: Path) -> Manifest:
    manifest = Manifest.of_folder(folder)
    assert manifest is not None
    return manifest


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_run_comes_back_as_it_was(tmp_path: Path, mode: str) -> None:
    values, number = saved(tmp_path, async_mode=mode)
    again, next_number, own = resumed(tmp_path)
    assert same(values, again)
    assert number == next_number
    assert (own["seen"].tolist(), own["name"]) == ([0, 1, 2], "rank 0")


def test_the_manifest_has_neither_digests_of_blocks_nor_the_entries_of_one_rank(tmp_path: Path) -> None:
    saved(tmp_path)
    manifest = manifest_of(step(tmp_path))
    assert not manifest.files["__0_0.distcp"].blocks
    assert not [key for key in (*manifest.tensors, *manifest.objects) if "rank0" in key]
    record = RankRecord.parse((step(tmp_path) / "__0_0.json").read_bytes())
    assert len(record.blocks) == 8
    assert {"own.rank0.seen", "rng.rank0.torch"} <= {*record.tensors}
    assert record.objects["own.rank0.name"] == {"value": "rank 0"}


def test_plain_dcp_reads_what_ranks_have_in_common(tmp_path: Path) -> None:
    values, _ = saved(tmp_path)
    state: dict[str, Any] = {"model": {"weight": torch.zeros(5, 6)}}
    dcp_load(state, checkpoint_id=step(tmp_path))
    assert torch.equal(state["model"]["weight"], values["weight"])


@pytest.mark.parametrize("name", ["__0_0.json", "__0_0.distcp"])
def test_a_damaged_record_is_found_as_a_damaged_file_is(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path)
    flip(step(tmp_path) / name)
    with pytest.raises(AllCheckpointsDamaged, match=name.replace(".", r"\.")):
        resumed(tmp_path)
    assert main(["verify", str(step(tmp_path))]) == 3
    assert name in capsys.readouterr().out


def test_a_record_of_another_file_is_damage(tmp_path: Path) -> None:
    saved(tmp_path)
    (step(tmp_path) / "__0_0.json").unlink()
    with pytest.raises(AllCheckpointsDamaged, match=r"__0_0\.json"):
        resumed(tmp_path)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"blocks": "xy"}', b'{"blocks": 1, "objects": {}}'])
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        RankRecord.parse(data)


def test_tools_see_all_entries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path)
    made = tmp_path / "made" / "step-1"
    assert main(["verify", str(step(tmp_path))]) == 0
    assert main(["inspect", str(step(tmp_path))]) == 0
    assert "own.rank0.seen" in capsys.readouterr().out
    assert main(["reshard", str(step(tmp_path)), str(made), "--files", "2"]) == 0
    assert {"own.rank0.seen", "rng.rank0.torch"} <= {*manifest_of(made).tensors}
    assert main(["diff", str(step(tmp_path)), str(made)]) == 0
    assert main(["convert", str(step(tmp_path)), str(tmp_path / "dcp"), "--layout", "dcp"]) == 0
    state = {"own.rank0.seen": torch.zeros(3, dtype=torch.int64)}
    dcp_load(state, checkpoint_id=tmp_path / "dcp")
    assert state["own.rank0.seen"].tolist() == [0, 1, 2]


def test_a_checkpoint_that_was_set_aside_comes_back(tmp_path: Path) -> None:
    saved(tmp_path)
    shutil.move(step(tmp_path), tmp_path / "checkpoint" / "step-1.corrupt")
    assert main(["bring-back", str(tmp_path / "checkpoint"), "step-1.corrupt"]) == 0
    resumed(tmp_path)


@on_two_ranks
def test_each_of_two_ranks_gets_its_own(rank: int, tmp_path: Path) -> None:
    with every_job_is_large():
        values, number = saved(tmp_path, rank)
        dist.barrier()
        again, next_number, own = resumed(tmp_path, rank)
    assert same(values, again)
    assert number == next_number
    assert (own["seen"].tolist(), own["name"]) == ([10 * rank, 10 * rank + 1, 10 * rank + 2], f"rank {rank}")
    manifest = manifest_of(step(tmp_path))
    assert not [key for key in (*manifest.tensors, *manifest.objects) if ".rank0" in key or ".rank1" in key]
    record = RankRecord.parse((step(tmp_path) / f"__{rank}_0.json").read_bytes())
    assert {key.split(".")[1] for key in (*record.tensors, *record.objects)} == {f"rank{rank}"}


def test_a_record_that_is_gone_is_damage_to_every_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path)
    (step(tmp_path) / "__0_0.json").unlink()
    assert main(["verify", str(step(tmp_path))]) == 3
    assert "__0_0.json: it is missing" in capsys.readouterr().out
    assert main(["inspect", str(step(tmp_path))]) == 3


def test_a_record_with_an_entry_that_is_not_of_its_rank_alone_is_damage(tmp_path: Path) -> None:
    saved(tmp_path)
    path = step(tmp_path) / "__0_0.json"
    text = path.read_bytes().replace(b'"own.rank0.name"', b'"own.rank1.name"')
    path.write_bytes(text)
    manifest = manifest_of(step(tmp_path))
    files = {**manifest.files, "__0_0.json": FileRecord.of(text)}
    (step(tmp_path) / "manifest.json").write_bytes(dataclasses.replace(manifest, files=files).to_json())
    with pytest.raises(AllCheckpointsDamaged, match=r"own\.rank1\.name is no entry of rank 0 alone"):
        resumed(tmp_path)


def test_a_state_that_is_named_like_the_entry_of_a_rank_is_saved_too(tmp_path: Path) -> None:
    job = Job(tmp_path)
    states = {"own": PerRank(DictState({"a": 1})), "own.rank0": DictState({"b": 2})}
    with CheckpointManager(None, job.model, job.optimizer, None, states, job_config(tmp_path)) as manager:
        job.train()
        manager.save(1, force=True)
    assert "own.rank0.b" in manifest_of(step(tmp_path)).objects
