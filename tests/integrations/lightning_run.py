"""A run of Lightning's Trainer, as its users write them, for tests: it prints each loss, and may end itself.

Hooks draw random numbers and print them, too. As a script it is a rank of torchrun, and its argument the options.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any

warnings.simplefilter("ignore")

import lightning  # noqa: E402  # a warning while it is imported is not ours
import numpy as np  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.callbacks import EarlyStopping  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from tests.processes import kill_with_children  # noqa: E402
from torchtitan_lite import log  # noqa: E402
from torchtitan_lite.integrations.lightning import Checkpoints  # noqa: E402

NUM_SAMPLES, BATCH = 52, 4
LIKE_TORCHRUN = {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "run"}
"""What torchrun sets of which Lightning knows that it need not start the ranks."""


@dataclass(frozen=True)
class Options:
    """What is trained and how; the names are those of the keywords of `run`."""

    folder: str
    strategy: str = "auto"
    """Or ddp, fsdp2."""
    loader: str = "plain"
    """Or stateful."""
    schedule: str = "step"
    """Or epoch, plateau."""
    own_generator: bool = False
    manual: bool = False
    scaler: bool = False
    workers: int = 0
    epochs: int = -1
    steps: int = -1
    accumulate: int = 1
    validate: float = 0.0
    interval: int = 1
    kill_at: int = 0
    """The batch at which the process kills itself, in the hook `kill_in` or the first such one after; 0: none."""
    kill_in: str = "on_train_batch_start"
    kill_waits: bool = False
    """Whether it waits for the save that is under way."""
    signal_at: int = 0
    exit_on_signal: bool = True


class Samples(Dataset[torch.Tensor]):
    """Samples with noise: to read one draws a random number."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index] + 0.01 * torch.rand(()) + 0.01 * random.random() + 0.01 * float(np.random.rand())


class Module(lightning.LightningModule):
    """A small network with dropout and running statistics, and an average that a hook keeps."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.automatic_optimization = not options.manual
        # The running statistics of ranks differ, and a checkpoint has one of each.
        norm = nn.BatchNorm1d(8) if options.strategy == "auto" else nn.LayerNorm(8)
        self.net = nn.Sequential(nn.Linear(1, 8), norm, nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
        self.register_buffer("average", torch.zeros(()))

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.net[0].weight, DTensor):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        if self.options.manual:
            parts = [self.net[0], self.net[4]]
            optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in parts]
            return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizers[0], gamma=0.9)]
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        by = self.options.schedule
        if by == "plateau":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            config = {"scheduler": schedule, "monitor": "val", "interval": "epoch"}
        else:
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
            config = {"scheduler": schedule, "interval": by}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def training_step(self, batch, index):
        x = batch[:, None]
        loss = nn.functional.mse_loss(self.net(x), torch.sin(6 * x))
        say(f"{self.global_rank} step {self.global_step + 1}: loss {loss.item():.9g}")
        if self.options.manual:
            for each in self.optimizers():
                each.zero_grad()
            self.manual_backward(loss)
            for each in self.optimizers():
                each.step()
            if self.trainer.is_last_batch:
                self.lr_schedulers().step()
        return loss

    def on_train_batch_end(self, *_):
        self.average += torch.rand(()) / 100

    def on_train_epoch_start(self):
        say(f"{self.global_rank} epoch {self.current_epoch} drew {torch.rand(()).item():.9g}")

    def validation_step(self, batch, index):
        loss = (self.net(batch[:, None]) - torch.sin(6 * batch[:, None])).square().mean() + 0.001 * torch.rand(())
        self.log("val", loss, sync_dist=True)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            at = self.trainer.fit_loop.total_batch_idx + 1
            say(f"{self.global_rank} validation at {at} drew {torch.rand(()).item():.9g}")


class Killer(lightning.Callback):
    """Ends the process in a hook of a batch, or sends it a signal when one begins."""

    def __init__(self, options: Options, checkpoints: Checkpoints) -> None:
        self.options, self.checkpoints = options, checkpoints
        if options.kill_at:
            setattr(self, options.kill_in, self._kill)
        if options.signal_at:
            self.on_train_batch_start = self._signal

    def _kill(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 < self.options.kill_at:
            return
        if self.options.kill_waits:
            self.checkpoints.manager.wait()
            trainer.strategy.barrier()
        if self.options.workers:
            kill_with_children()
        os.kill(os.getpid(), signal.SIGKILL)

    def _signal(self, trainer: Any, *_: Any) -> None:
        is_last_rank = trainer.global_rank == trainer.world_size - 1
        if is_last_rank and trainer.fit_loop.total_batch_idx + 1 == self.options.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 60
            while not self.checkpoints.manager._preemption.received:  # A thread hears of it: on a busy machine, later.
                assert time.monotonic() < deadline, "the signal was not heard"
                time.sleep(0.001)


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # In one piece: the other rank writes into the same file.


def loader_of(options: Options):
    samples = Samples(torch.rand(NUM_SAMPLES, generator=torch.Generator().manual_seed(1)))
    own = {"generator": torch.Generator().manual_seed(2)} if options.own_generator else {}
    settings = {"batch_size": BATCH, "shuffle": True, "num_workers": options.workers, **own}
    if options.loader == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(samples, **settings)
    return DataLoader(samples, **settings)


def run(**keywords: Any) -> None:
    options = Options(**keywords)
    if "RANK" in os.environ:
        os.environ.update(LIKE_TORCHRUN | {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]} | os.environ)
    log.setup(int(os.environ.get("RANK", "0")))
    lightning.seed_everything(3, verbose=False)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    strategy = {"auto": "auto", "ddp": "ddp", "fsdp2": None}[options.strategy] or ModelParallelStrategy(
        data_parallel_size=ranks, tensor_parallel_size=1
    )
    checkpoints = Checkpoints(
        options.folder, interval=options.interval, keep_latest_k=3, exit_on_signal=options.exit_on_signal
    )
    stopping = [EarlyStopping("val", patience=3)] if options.validate else []
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)] if options.scaler else []
    trainer = lightning.Trainer(
        strategy=strategy,
        plugins=plugins,
        accelerator="cpu",
        devices=ranks,
        max_epochs=options.epochs,
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        val_check_interval=options.validate or None,
        limit_val_batches=2 if options.validate else 0,
        callbacks=[checkpoints, Killer(options, checkpoints), *stopping],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    module = Module(options)
    validation = DataLoader(Samples(torch.rand(16, generator=torch.Generator().manual_seed(4))), batch_size=BATCH)
    trainer.fit(module, loader_of(options), validation)
    digest = hashlib.sha256()
    for value in module.state_dict().values():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        digest.update(whole.detach().numpy().tobytes())
    ended = {
        "step": trainer.global_step,
        "digest": digest.hexdigest(),
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "scale": scaler.get_scale(),
        "stopping": [[each.wait_count, float(each.best_score)] for each in stopping],
        "preempted_by": checkpoints.preempted_by,
    }
    say(f"ended {json.dumps(ended)}")


if __name__ == "__main__":
    run(**json.loads(sys.argv[1]))
