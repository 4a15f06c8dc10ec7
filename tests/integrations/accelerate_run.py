"""A loop with accelerate and a small model, for tests: it prints each loss, and may end itself."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from torchtitan_lite import log
from torchtitan_lite.checkpoint import TrainState
from torchtitan_lite.integrations.accelerate import Batches, for_accelerator


def run(
    folder: str, kill_at: int = 0, kill_in: str = "save", steps: int = 20, accumulated: int = 1, **keys: Any
) -> None:
    """Train; at step `kill_at` kill the process after the call that `kill_in` names: backward, step or save."""

    def may_kill(after: str) -> None:
        step = progress.step if after == "save" else progress.step + 1
        if step == kill_at and after == kill_in:
            os.kill(os.getpid(), signal.SIGKILL)

    log.setup(int(os.environ.get("RANK", "0")))
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    x = torch.rand(22, 1)
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(adamw, gamma=0.99)
    loader = DataLoader(TensorDataset(x, torch.sin(6 * x)), batch_size=2, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(net, adamw, schedule, loader)
    progress, batches = TrainState(), Batches(loader)
    objects = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "dataloader": batches}
    manager = for_accelerator(accelerator, **objects, states={"train_state": progress}, folder=folder, **keys)
    with manager:
        manager.load()
        manager.reset()
        while progress.step < steps:
            for inputs, targets in batches:
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    os.write(1, f"{accelerator.process_index} step {progress.step + 1}: loss {loss:.9g}\n".encode())
                    accelerator.backward(loss)
                    may_kill("backward")
                    optimizer.step()
                    may_kill("step")
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    progress.step += 1
                    manager.save(progress.step, force=progress.step == steps)
                    may_kill("save")
                if progress.step == steps:
                    break
    values = [parameter.double().sum().item() for parameter in model.parameters()]
    os.write(1, f"ended {json.dumps({'values': values, 'lr': scheduler.get_last_lr()})}\n".encode())


def ask_for_fsdp2() -> None:
    """Prepare a model as a user who asks for FSDP2, and print what became of it."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = accelerator.prepare(nn.Linear(2, 2))
    sharded = sum(isinstance(parameter, DTensor) for parameter in model.parameters())
    ended = {"type": accelerator.distributed_type.value, "model": type(model).__name__, "sharded": sharded}
    os.write(1, f"ended {json.dumps(ended)}\n".encode())
