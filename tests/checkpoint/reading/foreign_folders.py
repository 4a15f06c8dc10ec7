"""Folders as torchtitan writes them, made by plain DCP from a small run: the same keys and kinds of values.

`of_2024` has the layout of November 2024, `of_0_3` that of torchtitan 0.3.0. Both follow torchtitan's sources.
"""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.checkpoint.small_run import SmallRun
from torchtitan_lite.checkpoint.state.stateful import ModelWrapper, OptimizerWrapper

TOKENS_OF_RANK = 640


def of_2024(run: SmallRun, folder: Path) -> Path:
    """Write a full folder: the model under `model`, a complete LambdaLR, losses as lists saved into BytesIO."""
    schedule = run.scheduler.state_dict()
    # torchtitan's factor was a functools.partial, which LambdaLR saves as an empty dict; DCP drops that.
    schedule["lr_lambdas"] = [{}]
    train_state = {
        "step": torch.tensor(run.train_state.step, dtype=torch.int32),
        "global_avg_losses": _saved(run.train_state.global_avg_losses),
        "global_max_losses": _saved(run.train_state.global_max_losses),
        "log_steps": _saved(run.train_state.log_steps),
    }
    state = {
        "model": ModelWrapper(run.model).state_dict(),
        "optimizer": _optimizer(run),
        "dataloader": {"dp_rank_0": pickle.dumps({"_sample_idx": 48})},
        "lr_scheduler": schedule,
        "train_state": train_state,
    }
    return _save(state, folder)


def of_0_3(run: SmallRun, folder: Path, *, prefix: str = "") -> Path:
    """Write a full folder of two data-parallel ranks: bare FQNs, plain numbers, only `last_epoch` of the schedule.

    `prefix` is put before each FQN of the model.
    """
    optimizer = {}
    for key, value in _optimizer(run).items():
        kind, _, rest = key.partition(".")
        optimizer[f"{kind}.{prefix}{rest}"] = value
    state = {
        **{prefix + name: tensor for name, tensor in ModelWrapper(run.model).state_dict().items()},
        "optimizer": optimizer,
        "dataloader": {**{f"dp_rank_{rank}": pickle.dumps({"at": 24}) for rank in range(2)}, "world_size": 2},
        "lr_scheduler": {"last_epoch": run.scheduler.last_epoch},
        "train_state": {"step": run.train_state.step, "ntokens_seen": TOKENS_OF_RANK},
    }
    return _save(state, folder)


def save_plain(state: dict[str, Any], folder: Path) -> Path:
    """Write `state` with `dcp.save`."""
    return _save(state, folder)


def _optimizer(run: SmallRun) -> dict[str, Any]:
    return OptimizerWrapper([run.model], [run.optimizer]).state_dict()


def _saved(values: list[Any]) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer


def _save(state: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp_save(state, checkpoint_id=folder, no_dist=True)
    return folder
