"""A run resumes from a full folder that torchtitan 0.3 itself wrote."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.checkpoint.reading.foreign_folders import run_torchtitan
from tests.checkpoint.small_run import Loader
from tests.titan_packages import needs_torchtitan
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.state.train_state import TrainState
from torchtitan_lite.config.job_config import Checkpoint, Job, JobConfig, LRScheduler, Optimizer
from torchtitan_lite.models.llama.args import ModelArgs
from torchtitan_lite.models.llama.model import Transformer
from torchtitan_lite.optim import build_lr_schedulers, build_optimizers

RENAME = ("^lm_head[.]=output.", "[.]qkv_linear[.]=.")


@pytest.mark.slow  # a cold start of torchtitan
@needs_torchtitan
def test_a_folder_of_0_3_is_resumed_with_the_same_state_rate_step_and_losses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = _run_torchtitan(tmp_path)
    model = Transformer(
        ModelArgs(dim=128, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=258, ffn_dim=352, max_seq_len=64)
    )
    model.init_weights(7)
    (optimizer,) = optimizers = build_optimizers([model], Optimizer(implementation="for-loop"))
    (scheduler,) = schedulers = build_lr_schedulers(optimizers, LRScheduler(warmup_steps=2, decay_ratio=0.8), 10)
    state, loader = TrainState(), Loader()
    config = JobConfig(
        job=Job(dump_folder=str(tmp_path / "ours")),
        checkpoint=Checkpoint(
            enable_checkpoint=True,
            initial_load_path=str(tmp_path / "checkpoint" / "step-4"),
            initial_load_model_only=False,
            load_rename=RENAME,
            preemption_signals=(),
        ),
    )
    with CheckpointManager(loader, [model], optimizers, schedulers, {"train_state": state}, config) as manager:
        assert manager.load()
        assert (manager.loaded_step, state.step, state.n_tokens_seen) == (4, 4, reference["tokens"])
    assert scheduler.get_last_lr() == reference["lr"]
    own = model.state_dict()
    assert len(own) == len(reference["model"])
    assert not [name for name in own if not torch.equal(own[name], reference["model"][_theirs(name)])]
    moments = {
        f"state.{_theirs(name)}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    assert moments.keys() == {key for key in reference["optimizer"] if key.startswith("state.")}
    assert not [key for key, value in moments.items() if not torch.equal(value, reference["optimizer"][key])]
    assert loader.state == {"position": 0, "seen": []}
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "dataloader: its state is torchtitan's, and not read: the data begin from their start"
    ]
    for batch, expected in reference["following"]:
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        assert abs(loss.item() - expected) < 1e-5
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == reference["lr_after"]


def _run_torchtitan(folder: Path) -> dict[str, Any]:
    run_torchtitan(Path(__file__).with_name("torchtitan_run.py"), folder)
    reference: dict[str, Any] = torch.load(folder / "reference.pt", weights_only=True)
    return reference


def _theirs(name: str) -> str:
    """Return torchtitan 0.3's name of the tensor `name`."""
    name = name.replace("output.", "lm_head.")
    return name.replace("attention.w", "attention.qkv_linear.w").replace("qkv_linear.wo", "wo")
