"""Runs of Lightning's Trainer, as its users write them, forked from one process that has imported Lightning.

For each line of its input, a run as JSON, it forks the ranks and prints their exit codes; with arguments it is a rank.
A rank prints the loss of each batch, and after `fit` a digest of all that was trained. At the batch of `--kill-at` it
kills itself, once the steps before are on disk.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence

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

from torchtitan_lite import log  # noqa: E402
from torchtitan_lite.integrations.lightning import Checkpoints  # noqa: E402

NUM_SAMPLES, BATCH = 52, 4


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

    def __init__(self, options: argparse.Namespace) -> None:
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
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        say(f"rank {self.global_rank} batch {self.trainer.fit_loop.total_batch_idx + 1}", f"{loss.item():.9g} {lr:.6g}")
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
        say(f"rank {self.global_rank} epoch {self.current_epoch}", f"{torch.rand(()).item():.9g}")

    def validation_step(self, batch, index):
        loss = (self.net(batch[:, None]) - torch.sin(6 * batch[:, None])).square().mean() + 0.001 * torch.rand(())
        self.log("val", loss, sync_dist=True)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            say(
                f"rank {self.global_rank} validation at {self.trainer.fit_loop.total_batch_idx + 1}",
                f"{torch.rand(()).item():.9g}",
            )


class Killer(lightning.Callback):
    """Ends the process, or sends it a signal, when a batch begins."""

    def __init__(self, options: argparse.Namespace, checkpoints: Checkpoints) -> None:
        self.options, self.checkpoints = options, checkpoints

    def on_train_batch_start(self, trainer, module, batch, index):
        at = trainer.fit_loop.total_batch_idx + 1
        if at == self.options.kill_at:
            self.checkpoints.manager.wait()
            trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        if at == self.options.signal_at and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def say(what: str, value: str) -> None:
    os.write(1, f"{what}: {value}\n".encode())  # At once: ranks write into one file.


def loader_of(options: argparse.Namespace):
    samples = Samples(torch.rand(NUM_SAMPLES, generator=torch.Generator().manual_seed(1)))
    own = {"generator": torch.Generator().manual_seed(2)} if options.own_generator else {}
    settings = {"batch_size": BATCH, "shuffle": True, "num_workers": options.workers, **own}
    if options.loader == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(samples, **settings)
    return DataLoader(samples, **settings)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--strategy", default="auto", choices=["auto", "ddp", "fsdp2"])
    parser.add_argument("--loader", default="plain", choices=["plain", "stateful"])
    parser.add_argument("--schedule", default="step", choices=["step", "epoch", "plateau"])
    for name in ("own-generator", "manual", "scaler", "stop-on-signal"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("workers", "kill-at", "signal-at"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--interval", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--validate", type=float, default=0.0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    options = parsed(arguments)
    log.setup(int(os.environ.get("RANK", "0")))
    lightning.seed_everything(3, verbose=False)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    strategy = {"auto": "auto", "ddp": "ddp", "fsdp2": None}[options.strategy] or ModelParallelStrategy(
        data_parallel_size=ranks, tensor_parallel_size=1
    )
    checkpoints = Checkpoints(
        options.folder, interval=options.interval, keep_latest_k=3, exit_on_signal=not options.stop_on_signal
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
    say(f"rank {trainer.global_rank} ended at {trainer.global_step}", digest.hexdigest())
    say(f"rank {trainer.global_rank} scale", f"{scaler.get_scale()}")
    for each in stopping:
        say(f"rank {trainer.global_rank} stopping", f"{each.wait_count} {float(each.best_score):.9g}")
    say(f"rank {trainer.global_rank} preempted by", str(checkpoints.preempted_by))


def rank_of(run: dict, rank: int) -> None:
    """Be a rank of `run`, as torchrun starts one."""
    output = os.open(run["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(output, standard)
    if run["ranks"] > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run["ranks"], "LOCAL_WORLD_SIZE": run["ranks"]}
        group = {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": run["port"], "TORCHELASTIC_RUN_ID": "run"}
        os.environ |= {name: str(value) for name, value in (place | group).items()}
    os.chdir(run["folder"])
    main(run["arguments"])


def fork(run: dict, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        rank_of(run, rank)
        code = 0
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def serve() -> None:
    for line in sys.stdin:
        run = json.loads(line)
        pids = [fork(run, rank) for rank in range(run["ranks"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    if arguments := sys.argv[1:]:
        main(arguments)
    else:
        serve()
