"""Folders as torchtitan writes them, made by plain DCP from a small run: the same keys and kinds of values.

`of_2024` has the layout of November 2024, `of_0_3` that of torchtitan 0.3.0. Both follow torchtitan's sources.
"""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.checkpoint.small_run import SmallRun
from tests.titan_packages import environment
from torchtitan_lite.checkpoint.state.stateful import LRSchedulerWrapper, ModelWrapper, OptimizerWrapper

TOKENS_OF_RANK = 640
DEADLINE_SECONDS = 300.0
"""Of a cold start of torchtitan."""


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
    return save_plain(state, folder)


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
    return save_plain(state, folder)


def state_of(run: SmallRun) -> dict[str, Any]:
    """Return the state of `run` as our manager keeps it."""
    return {
        "model": ModelWrapper(run.model).state_dict(),
        "optimizer": _optimizer(run),
        "lr_scheduler": LRSchedulerWrapper([run.scheduler]).state_dict(),
        "dataloader": run.loader.state_dict(),
        "train_state": run.train_state.state_dict(),
    }


def save_plain(state: dict[str, Any], folder: Path) -> Path:
    """Write `state` with `dcp.save`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp_save(state, checkpoint_id=folder, no_dist=True)
    return folder


def run_torchtitan(program: Path, folder: Path) -> str:
    """Run `program` in a process with torchtitan; return its output."""
    ended = subprocess.run(
        [sys.executable, program, folder],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def _optimizer(run: SmallRun) -> dict[str, Any]:
    return OptimizerWrapper([run.model], [run.optimizer]).state_dict()


def _saved(values: list[Any]) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer
