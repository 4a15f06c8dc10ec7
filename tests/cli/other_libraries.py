"""Checkpoints as transformers' Trainer and Lightning leave them, written by the libraries that these use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.checkpoint.reading.foreign_folders import save_plain

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class Setting:
    """What a user keeps in a checkpoint, and no reader of ours may load."""


def of_trainer(root: Path, step: int, *, sharded: bool = False, best: int | None = None, **weights: Any) -> Path:
    """Write `checkpoint-STEP` of a model with `weights`; `best` is the step that it names as the best."""
    folder = root / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    tensors = {"embed.weight": torch.arange(12.0).reshape(4, 3), "norm.weight": torch.ones(3), **weights}
    if sharded:
        places = {name: SHARDS[number % 2] for number, name in enumerate(tensors)}
        for shard in SHARDS:
            save_file({name: tensors[name] for name in tensors if places[name] == shard}, folder / shard)
        index = {"metadata": {"total_size": 60}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    torch.save({"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []}, folder / "optimizer.pt")
    torch.save({"last_epoch": step}, folder / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    state = {"global_step": step, "best_model_checkpoint": None if best is None else str(root / f"checkpoint-{best}")}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def of_trainer_with_fsdp(root: Path, step: int) -> Path:
    """Write the same with a model and an optimizer that accelerate saves by DCP."""
    folder = of_trainer(root, step)
    for name in ("model.safetensors", "optimizer.pt"):
        (folder / name).unlink()
    save_plain({"model": {"weight": torch.arange(6.0)}}, folder / "pytorch_model_fsdp_0")
    save_plain({"optimizer": {"state": {"weight": {"exp_avg": torch.ones(6)}}}}, folder / "optimizer_0")
    return folder


def callbacks(best: str = "", last: str = "") -> dict[str, Any]:
    """Return the state of Lightning's ModelCheckpoint, which names these paths."""
    state = {"monitor": "loss", "best_model_path": best, "last_model_path": last, "best_k_models": {}}
    return {"ModelCheckpoint{'monitor': 'loss', 'mode': 'min'}": state}


def of_lightning(root: Path, step: int, name: str = "", best: str = "") -> Path:
    """Write one file as Lightning does, with its keys, and with an object of the user's own class."""
    root.mkdir(exist_ok=True, parents=True)
    path = root / (name or f"epoch=0-step={step}.ckpt")
    checkpoint = {
        **{"epoch": 0, "global_step": step, "pytorch-lightning_version": "2.5.0", "loops": {}},
        **{"state_dict": {"weight": torch.full((3,), float(step))}, "optimizer_states": [], "lr_schedulers": []},
        "callbacks": callbacks(best),
        "hyper_parameters": {"setting": Setting(), "folder": Path("data")},
    }
    torch.save(checkpoint, path)
    return path


def of_lightning_with_dcp(root: Path, step: int) -> Path:
    """Write a folder as Lightning's strategies for sharded models do."""
    state = {"state_dict": {"weight": torch.ones(3)}, "optimizer_0": {"state": {"weight": {"exp_avg": torch.ones(3)}}}}
    folder = save_plain(state, root / f"epoch=0-step={step}.ckpt")
    torch.save({"epoch": 0, "global_step": step, "callbacks": callbacks()}, folder / "meta.pt")
    return folder


def of_dcp(root: Path, step: int) -> Path:
    """Write `step-STEP` with `dcp.save`."""
    state = {"model": {"weight": torch.full((3,), float(step))}, "optimizer": {"weight": {"exp_avg": torch.ones(3)}}}
    return save_plain(state, root / f"step-{step}")


def of_accelerate(root: Path, step: int) -> Path:
    """Write `checkpoint_STEP` with `Accelerator.save_state`."""
    from accelerate import Accelerator

    model = torch.nn.Linear(3, 2)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    folder = root / f"checkpoint_{step}"
    accelerator.save_state(str(folder))
    return folder


def of_sharded_trainer(root: Path, step: int) -> Path:
    """Write `checkpoint-STEP` with two files of weights."""
    return of_trainer(root, step, sharded=True)


MAKERS: dict[str, Callable[[Path, int], Path]] = {
    **{"dcp": of_dcp, "trainer": of_trainer, "sharded": of_sharded_trainer, "fsdp": of_trainer_with_fsdp},
    **{"accelerate": of_accelerate, "lightning": of_lightning, "lightning-dcp": of_lightning_with_dcp},
}
"""What writes a checkpoint of a step as each library does."""
