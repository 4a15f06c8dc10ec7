"""Complete trainers on any topology, in processes that stay: the work of each rank in the resharding tests.

Every function runs on each of four processes, of which a topology with fewer ranks uses the first ones. States are
compared by a digest of each full tensor's bytes, taken from the live tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.forked import join_group
from tests.logged import logged_warnings
from torchtitan_lite.config.job_config import (
    ActivationCheckpoint,
    Checkpoint,
    Job,
    JobConfig,
    LRScheduler,
    Metrics,
    Model,
    Parallelism,
    Training,
)

GLOBAL_BATCH_SIZE = 8
TOPOLOGIES: dict[str, tuple[int, Parallelism]] = {
    "1 process": (1, Parallelism()),
    "FSDP 2": (2, Parallelism()),
    "FSDP 4": (4, Parallelism()),
    "HSDP 2 x 2": (4, Parallelism(data_parallel_replicate_degree=2)),
    "DDP 2": (2, Parallelism(data_parallel_replicate_degree=2, data_parallel_shard_degree=1)),
    "TP 2": (2, Parallelism(tensor_parallel_degree=2)),
    "TP 2 x FSDP 2": (4, Parallelism(tensor_parallel_degree=2)),
    "PP 2 (1F1B)": (2, Parallelism(pipeline_parallel_degree=2)),
    "PP 2 (interleaved)": (
        2,
        Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule="Interleaved1F1B"),
    ),
    "PP 2 x FSDP 2": (4, Parallelism(pipeline_parallel_degree=2)),
}


def save(rank: int, folder: Path, topology: str) -> dict[str, str] | None:
    """Train two steps on `topology` and save. Return the digests of the saved state on rank 0."""
    with _trainer(rank, folder, topology, steps=2) as trainer, logged_warnings() as warnings:
        if trainer is None:
            return None
        assert trainer.run() == 0
        assert not [message for message in warnings if "Ranks hold different" in message]
        return _digests(trainer) if rank == 0 else _digests(trainer) and None


def load(rank: int, folder: Path, saved: Path, topology: str) -> dict[str, Any] | None:
    """Load `saved` into `topology`. Return digests, learning rates and next samples of this rank."""
    with _trainer(rank, folder, topology, steps=4, start_from=saved, digest_tensors=("save", "load")) as trainer:
        if trainer is None:
            return None
        with trainer.checkpointer:
            assert trainer.checkpointer.load()
            digests = _digests(trainer)
            next(trainer.loader)
            return {
                "digests": digests,
                "step": trainer.train_state.step,
                "rates": [_rates(scheduler) for scheduler in trainer.lr_schedulers],
                "next": list(trainer.loader.last_positions),
            }


def losses_of_straight_and_resumed(rank: int, folder: Path, topology: str) -> tuple[list[float], list[float]] | None:
    """Return the last losses of six steps without a stop, and those of a resume at step 3; with dropout."""
    straight, resumed = folder / "straight", folder / "resumed"
    with _trainer(rank, straight, topology, steps=6, dropout=0.1) as trainer:
        if trainer is None:
            return None
        assert trainer.run() == 0
    start = straight / "checkpoint" / "step-3"
    with _trainer(rank, resumed, topology, steps=6, dropout=0.1, start_from=start) as trainer:
        assert trainer is not None and trainer.run() == 0
    return (_losses(straight)[3:], _losses(resumed)) if rank == 0 else ([], [])


@contextmanager
def _trainer(
    rank: int,
    folder: Path,
    topology: str,
    *,
    steps: int,
    dropout: float = 0.0,
    start_from: Path | None = None,
    digest_tensors: tuple[str, ...] = ("save",),
) -> Iterator[Any]:
    """Yield this rank's trainer, in a process group of the topology's size; None on a rank outside of it."""
    import torch
    import torch.distributed as dist

    from torchtitan_lite.distributed.process_group import World
    from torchtitan_lite.trainer import Trainer

    size, parallelism = TOPOLOGIES[topology]
    if rank >= size:
        yield None
        return
    join_group(rank, size, folder.with_suffix(".rendezvous"))
    if start_from is not None and rank == 0:
        _link(start_from, folder / "checkpoint" / start_from.name)
    dist.barrier()
    config = _config(folder, parallelism, steps=steps, dropout=dropout, digest_tensors=digest_tensors)
    try:
        yield Trainer(config, World(rank, size, torch.device("cpu")))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _config(
    folder: Path, parallelism: Parallelism, *, steps: int, dropout: float, digest_tensors: tuple[str, ...]
) -> JobConfig:
    return JobConfig(
        job=Job(dump_folder=str(folder)),
        metrics=Metrics(log_freq=1),
        model=Model(dropout=dropout),
        # Constant after warm-up, so that the number of steps does not change the curve.
        lr_scheduler=LRScheduler(warmup_steps=4, decay_ratio=0.0),
        training=Training(
            batch_size=2,
            global_batch_size=GLOBAL_BATCH_SIZE,
            seq_len=32,
            steps=steps,
            seed=7,
            mixed_precision_param="float32",
        ),
        parallelism=parallelism,
        activation_checkpoint=ActivationCheckpoint(mode="none"),
        checkpoint=Checkpoint(
            enable_checkpoint=True,
            interval=3,
            preemption_signals=(),
            digest_tensors=digest_tensors,
            timeout_seconds=60,
        ),
    )


def _digests(trainer: Any) -> dict[str, str]:
    """Return the digest of each full tensor of model and optimizer, by key, over all ranks. **Collective**."""
    import torch
    from torch.distributed.tensor import DTensor

    from torchtitan_lite.checkpoint.state.stateful import ModelWrapper, OptimizerWrapper

    model = ModelWrapper(trainer.model_parts).state_dict()
    optimizer = OptimizerWrapper(trainer.model_parts, trainer.optimizers).state_dict()
    own = {}
    for key, value in {**model, **{f"optimizer.{key}": value for key, value in optimizer.items()}}.items():
        if isinstance(value, torch.Tensor):
            full = value.full_tensor() if isinstance(value, DTensor) else value
            data = full.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            own[key] = hashlib.blake2b(data, digest_size=12).hexdigest()
    return {key: digest for per_rank in trainer.peers.gather(own) for key, digest in per_rank.items()}


def _rates(scheduler: Any) -> list[float]:
    """Return the learning rates of the next steps."""
    return [scheduler.base_lrs[0] * scheduler.lr_lambdas[0](scheduler.last_epoch + ahead) for ahead in range(4)]


def _losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss_metrics/global_avg_loss"] for line in lines]


def _link(checkpoint: Path, target: Path) -> None:
    shutil.copytree(checkpoint, target, copy_function=os.link)
