"""`last_save_in_hf` in a loop of one's own, and the work of several ranks on it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.checkpoint.only_once import save_and_close
from tests.checkpoint.small_run import Loader
from tests.disks import injected
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint import CheckpointManager, HuggingFaceModel, Place
from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.run_folders import RunFolders
from torchtitan_lite.config.own_loop import loop_config
from torchtitan_lite.converting import safetensors_files
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import ConfigError, SaveFailed
from torchtitan_lite.events import ignore
from torchtitan_lite.hugging_face.last_export import HuggingFaceExport, share_of

PLACES = {
    "0.weight": Place("first.weight", (4, 2)),
    "0.bias": Place("first.bias", (4,)),
    "1.weight": Place("second.weight", (1, 4)),
    "1.bias": Place("second.bias", (1,)),
}
DESCRIBED = HuggingFaceModel({"model_type": "mine"}, PLACES, {"tokenizer.json": b"{}"})


def a_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))


def manager_of(folder: Path, model: nn.Module, **given: Any) -> CheckpointManager:
    return CheckpointManager.for_loop(
        model=model, folder=folder / "checkpoint", preemption_signals=(), last_save_in_hf=True, **given
    )


def test_a_loop_leaves_its_last_step_in_the_files_that_it_describes(tmp_path: Path) -> None:
    model = a_model(1)
    events: list[str] = []
    with manager_of(
        tmp_path, model, hugging_face=DESCRIBED, on_event=lambda event, step, **_: events.append(event)
    ) as manager:
        manager.load()
        assert manager.save(1, now=True)
        assert not (tmp_path / "hf").exists(), "only the last step is written"
        assert manager.save(2, force=True)
    folder = tmp_path / "hf" / "step-2"
    written = load_file(folder / "model.safetensors")
    assert written.keys() == {place.name for place in PLACES.values()}
    assert torch.equal(written["first.weight"], model[0].weight)
    assert json.loads((folder / "config.json").read_bytes())["model_type"] == "mine"
    assert (folder / "tokenizer.json").read_bytes() == b"{}"
    assert events[-1] == "exported"


def test_a_loop_that_has_nothing_left_to_train_writes_what_is_missing(tmp_path: Path) -> None:
    with manager_of(tmp_path, a_model(1), hugging_face=DESCRIBED) as manager:
        manager.load()
        manager.save(2, force=True)
        assert manager.ended() is None, "training.steps is far away"
    shutil.rmtree(tmp_path / "hf")
    with manager_of(tmp_path, a_model(2), hugging_face=DESCRIBED) as manager:
        assert manager.load() and manager.loaded_step == 2
        manager.finish(2)
    written = tmp_path / "hf" / "step-2" / "model.safetensors"
    before = written.stat().st_mtime_ns
    with manager_of(tmp_path, a_model(2), hugging_face=DESCRIBED) as manager:
        manager.load()
        manager.finish(2)
    assert written.stat().st_mtime_ns == before, "it is written once"


class OfTokenizer(Loader):
    """A loader whose state has the fingerprint of its tokenizer, as the trainer's has."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "tokenizer": "old"}


def test_a_run_of_another_tokenizer_is_refused_and_leaves_no_export(tmp_path: Path) -> None:
    with manager_of(
        tmp_path,
        a_model(1),
        dataloader=OfTokenizer(),
        hugging_face=dataclasses.replace(DESCRIBED, tokenizer="new"),
    ) as manager:
        manager.load()
        with pytest.raises(ConfigError, match=r"model\.tokenizer_path: expected the tokenizer of .* old, found new"):
            manager.save(2, force=True)
    assert [path.name for path in (tmp_path / "checkpoint").glob("step-*")] == ["step-2"]
    assert not list((tmp_path / "hf").glob("step-*"))


def test_what_is_missing_or_does_not_fit_is_refused_when_the_manager_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.last_save_in_hf: .*Pass hugging_face=HuggingFaceModel\("):
        manager_of(tmp_path, a_model(1))
    part = HuggingFaceModel({}, {"0.weight": PLACES["0.weight"]})
    with pytest.raises(ConfigError, match=r"hugging_face: 0\.bias, 1\.bias, 1\.weight of the model have no place"):
        manager_of(tmp_path, a_model(1), hugging_face=part)
    with pytest.raises(ConfigError, match="with save_trained_only a checkpoint lacks the frozen parameters"):
        manager_of(tmp_path, a_model(1), hugging_face=DESCRIBED, save_trained_only=True)
    with pytest.raises(ConfigError, match=r"checkpoint\.hf_folder: expected a folder of its own, found 'checkpoint'"):
        manager_of(tmp_path, a_model(1), hugging_face=DESCRIBED, hf_folder="checkpoint")
    with pytest.raises(ConfigError, match=r"initial_load_in_hf: only the trainer .*torchtitan-lite import-weights"):
        CheckpointManager.for_loop(
            model=a_model(1), folder=tmp_path, initial_load_in_hf=True, initial_load_path=str(tmp_path)
        )
    assert not list(tmp_path.iterdir())


@on_two_ranks
def test_the_ranks_divide_the_shards_and_a_failure_of_one_is_a_failure_of_all(rank: int, tmp_path: Path) -> None:
    model = a_model(1)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with manager_of(tmp_path, model, hugging_face=DESCRIBED) as manager:
        manager.load()
        manager.save(2, force=True)
    dist.barrier()
    whole = load_file(tmp_path / "hf" / "step-2" / "model.safetensors")
    config, peers = loop_config(tmp_path / "checkpoint", {"last_save_in_hf": True}), Peers(manager._peers._timeout)
    folders = RunFolders(config, "later")
    if rank == 0:
        folders.take()
    dist.barrier()
    context = RunContext(config.checkpoint, peers, time.monotonic, ignore)
    last_save = HuggingFaceExport(config, DESCRIBED, folders, context)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(safetensors_files, "SHARD_BYTES", 16)
    with (
        injected("ENOSPC@open:rank=1,path=*-00002-of-00004.safetensors", rank),
        pytest.raises(SaveFailed, match=r"step-2, in Hugging Face's format, was not written: .*No space left"),
    ):
        last_save.write(2)
    dist.barrier()
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["step-2"]
    assert (tmp_path / "hf" / "step-2" / "model.safetensors").exists(), "the older export is as it was"
    dist.barrier()
    last_save.write(2)
    monkeypatch.undo()
    dist.barrier()
    shards = sorted((tmp_path / "hf" / "step-2").glob("model-*-of-00004.safetensors"))
    again = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert len(shards) == 4 and again.keys() == whole.keys()
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    assert not (tmp_path / "hf" / "step-2" / "model.safetensors").exists()
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["step-2"]
    if rank == 0:
        folders.release()


def test_every_file_has_one_writer_and_few_writers_are_far_apart() -> None:
    for num_files in range(1, 20):
        files = [f"file-{number}" for number in range(num_files)]
        for num_ranks in range(1, 12):
            shares = [share_of(files, rank, num_ranks) for rank in range(num_ranks)]
            assert sorted(name for share in shares for name in share) == sorted(files)
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert [bool(share_of(["a", "b"], rank, 8)) for rank in range(8)] == [rank in (0, 4) for rank in range(8)]


def test_a_seed_checkpoint_is_no_last_save(tmp_path: Path) -> None:
    save_and_close(manager_of(tmp_path, a_model(1), hugging_face=DESCRIBED, create_seed_checkpoint=True), 0)
    assert (tmp_path / "checkpoint" / "step-0").exists()
    assert not (tmp_path / "hf").exists()
