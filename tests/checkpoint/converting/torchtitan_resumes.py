"""Train with our manager, convert the checkpoint, and resume from it with torchtitan 0.3's own manager.

`python torchtitan_resumes.py FOLDER` prints what differs, line by line, and nothing else on stdout. A test runs this
program. Needs torchtitan 0.3.
"""
# ruff: noqa: E402

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from tests.titan_packages import leave_kernels_out

leave_kernels_out()

from torchtitan.components.checkpoint import CheckpointManager as TheirManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.models.common.attention import ScaledDotProductAttention

from tests.checkpoint.reading.torchtitan_run import Progress, Tokens, build_model
from torchtitan_lite.checkpoint import CheckpointManager, TrainState
from torchtitan_lite.cli.app import main as cli
from torchtitan_lite.config.job_config import Checkpoint, Job, JobConfig

STEPS = 4


class Training:
    """A model of torchtitan with its optimizer and schedule."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = build_model()
        adamw = default_adamw(lr=8e-4)
        adamw.implementation = "for-loop"
        self.optimizers = adamw.build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8).build(
            optimizers=self.optimizers, training_steps=10
        )

    def step(self, batch: torch.Tensor) -> float:
        loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        self.optimizers.zero_grad()
        loss.backward()
        self.optimizers.step()
        self.schedulers.step()
        return loss.item()


def main(folder: Path) -> list[str]:
    """Return what differs, a line for each."""
    store = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    ScaledDotProductAttention.sdpa_backends = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]  # those of a CPU
    batches = [torch.randint(0, 258, (4, 33), generator=torch.Generator().manual_seed(at)) for at in range(STEPS + 2)]
    ours = train_ours(folder / "ours", batches[:STEPS])
    source, target = folder / "ours" / "checkpoint", folder / "theirs" / "checkpoint"
    code = cli(["convert", f"{source}:{STEPS}", str(target / f"step-{STEPS}"), "--layout", "torchtitan", "--json"])
    theirs, progress = Training(seed=1), Progress()
    manager = TheirManager.Config(enable=True, interval=STEPS).build(
        dataloader=ParallelAwareDataloader(Tokens(), dp_rank=0, dp_world_size=1, batch_size=4),
        model_parts=[theirs.model],
        optimizers=theirs.optimizers,
        lr_schedulers=theirs.schedulers,
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=str(folder / "theirs"),
    )
    loaded = manager.load(step=STEPS)
    compared: list[tuple[str, Any, Any]] = [
        ("exit code", code, 0),
        ("loaded", loaded, True),
        ("step", progress.step, STEPS),
        ("tokens", progress.ntokens_seen, STEPS * 128),
        ("rate", theirs.schedulers.schedulers[0].get_last_lr(), ours.schedulers.schedulers[0].get_last_lr()),
        *differences("model", theirs.model.state_dict(), ours.model.state_dict()),
        *differences("optimizer", theirs.optimizers.state_dict(), ours.optimizers.state_dict()),
        *((f"loss {at}", theirs.step(batches[at]), ours.step(batches[at])) for at in (STEPS, STEPS + 1)),
    ]
    manager.close()
    dist.destroy_process_group()
    return [f"{name}: {found}, expected {expected}" for name, found, expected in compared if found != expected]


def train_ours(folder: Path, batches: list[torch.Tensor]) -> Training:
    """Train on `batches` with our manager, which saves at the end."""
    training, state = Training(seed=0), TrainState()
    config = JobConfig(
        job=Job(dump_folder=str(folder)),
        checkpoint=Checkpoint(enable_checkpoint=True, interval=len(batches), preemption_signals=()),
    )
    optimizers, schedulers = [*training.optimizers], [*training.schedulers.schedulers]
    with CheckpointManager(None, [training.model], optimizers, schedulers, {"train_state": state}, config) as manager:
        manager.load()
        for batch in batches:
            training.step(batch)
            state.step += 1
            state.n_tokens_seen += batch[:, 1:].numel()
            manager.save(state.step)
    return training


def differences(name: str, found: dict[str, Any], expected: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, found, expected) of each entry that differs, and of the two sets of keys if they do."""
    pairs: list[tuple[str, Any, Any]] = [(f"keys of {name}", [*found], [*expected])]
    for key in found.keys() & expected.keys():
        a, b = found[key], expected[key]
        same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        if not same:
            pairs.append((f"{name} {key}", repr(a)[:80], f"not {repr(b)[:80]}"))
    return pairs


if __name__ == "__main__":
    screen, sys.stdout = sys.stdout, sys.stderr  # torchtitan logs to stdout.
    screen.writelines(f"{line}\n" for line in main(Path(sys.argv[1])))
