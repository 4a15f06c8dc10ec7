"""A run of which nearly all stays the same from save to save: frozen layers, and a small one that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.checkpoint.small_run import Events, Run, job_config
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import CheckpointInfo, Manifest
from torchtitan_lite.store.store import CheckpointStore

CHANGES, STILL = layout.data_file(0, layout.CHANGES), layout.data_file(0, layout.STILL)
"""The files of rank 0."""


class Frozen(nn.Module):
    """A trained layer between frozen ones of `frozen_bytes` together; `table` has no gradient, but may change."""

    table: Tensor

    def __init__(self, frozen_bytes: int = 4 << 20, layers: int = 2) -> None:
        super().__init__()
        width = 256
        rows = frozen_bytes // (4 * width * layers)
        self.frozen = nn.ModuleList(nn.Linear(width, rows, bias=False) for _ in range(layers))
        self.frozen.requires_grad_(False)
        self.trained = nn.Linear(width, 8)
        self.register_buffer("table", torch.zeros(64, width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.trained(x)
        return y


class FrozenRun(Run):
    """One run, or its part between two restarts, with `checkpoint.incremental`."""

    def __init__(
        self,
        folder: Path,
        /,
        *,
        model: nn.Module | None = None,
        states: dict[str, Any] | None = None,
        seams: dict[str, Any] | None = None,
        **checkpoint: Any,
    ) -> None:
        torch.manual_seed(0)
        self.events, self.root = Events(), folder / "checkpoint"
        super().__init__(
            model or Frozen(),
            job_config(folder, **{"interval": 1, "incremental": True} | checkpoint),
            states=states,
            seams={"on_event": self.events} | (seams or {}),
        )

    def __enter__(self) -> FrozenRun:
        return self

    def __exit__(self, *error: Any) -> None:
        self.manager.__exit__(*error)

    def step(self) -> None:
        """Take one optimizer step, and save."""
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(self.train_state.step))
        self.take_step(lambda: self.model(x).square().mean())
        self.manager.save(self.train_state.step)

    def steps(self, count: int) -> None:
        """Take `count` steps; the last save is durable on return."""
        for _ in range(count):
            self.step()
        self.manager.wait()

    def contents(self) -> dict[str, Any]:
        """Return a copy of what a checkpoint must restore."""
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "moments": [{k: v.clone() for k, v in s.items()} for s in self.optimizer.state_dict()["state"].values()],
            "step": self.train_state.step,
        }

    def info(self, step: int) -> CheckpointInfo:
        """Return the committed checkpoint of `step`."""
        return CheckpointStore(self.root).get(step)

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of `step`."""
        found = Manifest.of_folder(self.root / layout.step_dir(step))
        assert found is not None
        return found

    def shares(self, a: int, b: int, file: str = STILL) -> bool:
        """Return whether the steps `a` and `b` have one `file`."""
        paths = [self.root / layout.step_dir(step) / file for step in (a, b)]
        return paths[0].stat().st_ino == paths[1].stat().st_ino
