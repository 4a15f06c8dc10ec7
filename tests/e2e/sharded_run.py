"""A run on some ranks that is killed: a tiny model under FSDP2, a real manager, and the tally of all its cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.checkpoint.small_run import Run, job_config
from torchtitan_lite.distributed.peers import Peers

RANKS = 2
"""Unless a test says otherwise."""

T = TypeVar("T")


class ShardedRun(Run):
    """The run of one rank. Its losses depend on its whole state, and with `dropout` on the generators."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        on_event: Callable[..., None],
        *,
        lr: float,
        width: int = 1024,
        dropout: float = 0.1,
        timeout_seconds: float = 60,
        **checkpoint: Any,
    ) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, width), nn.Dropout(dropout), nn.Tanh(), nn.Linear(width, 512))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        super().__init__(
            model,
            job_config(folder, timeout_seconds=timeout_seconds, **checkpoint),
            lr=lr,
            seams={"peers": Peers(timedelta(seconds=timeout_seconds)), "on_event": on_event},
        )
        self.rank = rank
        torch.manual_seed(rank)

    def train(self) -> str:
        """Train one step. Return its exact loss."""
        return self.take_step(self._loss).hex()

    def state_digest(self) -> str:
        """Return a digest of the state of all ranks, the same in every topology. **Collective**."""
        digest = xxhash.xxh3_128(f"{self.train_state.step} {self.scheduler.last_epoch}".encode())
        moments = [state[name] for state in self.optimizer.state.values() for name in sorted(state)]
        for tensor in [*self.model.parameters(), *moments]:
            complete = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            digest.update(complete.detach().contiguous().numpy())
        return digest.hexdigest()

    def _loss(self) -> torch.Tensor:
        batch = torch.randn(8, 512, generator=torch.Generator().manual_seed(self.train_state.step)).chunk(
            dist.get_world_size()
        )
        loss: torch.Tensor = (self.model(batch[self.rank]) - 1).square().mean()
        return loss


@contextmanager
def printed(request: pytest.FixtureRequest, counts: T) -> Iterator[T]:
    """Yield `counts`, and print them once all cases are over."""
    yield counts
    plugins = request.config.pluginmanager
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        plugins.getplugin("terminalreporter").write_line(f"\n{counts}")
