"""Measure saves with and without checkpoint.incremental: of a model most of which is frozen, and of one that is not.

    python scripts/bench_incremental.py
    python scripts/bench_incremental.py --gib 0.25 --rounds 3 --folder /mnt/disk

One process, each async_mode. Each round saves the same states both ways, in turn: a first save, then `--saves` more,
each after the trained layers changed, timed until it is durable. At the end the last step is loaded into another model
and compared bit for bit. Prints the medians of the rounds, and of their ratios; returns 1 if a load was not exact.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtitan_lite.checkpoint import CheckpointManager, TrainState

WIDTH = 512
MODES = ("disabled", "async", "async_with_pinned_mem")
FROZEN = 0.98
"""The share of the bytes that stays the same: frozen layers, which have no optimizer state."""


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state (1)")
    parser.add_argument("--rounds", type=int, default=5, help="of each (5)")
    parser.add_argument("--saves", type=int, default=4, help="after the first one of each round (4)")
    parser.add_argument("--folder", help="where the checkpoints are; default: the folder for temporary files")
    args = parser.parse_args()
    is_exact = True
    print(f"{'seconds, medians':<32}{'full':>8}{'incr.':>8}{'ratio':>8}{'written':>9}")
    for frozen in (FROZEN, 0.0):
        for mode in MODES:
            found: dict[bool, list[float]] = {True: [], False: []}
            shares = []
            for number in range(args.rounds):
                for is_incremental in random.Random(number).sample((True, False), 2):
                    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                        run = Run(Path(folder), mode, frozen, args.gib, is_incremental=is_incremental)
                        found[is_incremental].append(run.seconds(args.saves))
                        shares += [run.share_written] if is_incremental else []
                        is_exact &= run.loads_exactly()
            full, incremental = (statistics.median(found[each]) for each in (False, True))
            ratio = statistics.median(a / b for a, b in zip(found[True], found[False], strict=True))
            what = f"{frozen:.0%} frozen, {mode}"
            print(f"{what:<32}{full:8.3f}{incremental:8.3f}{ratio:8.2f}{statistics.median(shares):9.1%}", flush=True)
    print("each last step loaded bit for bit" if is_exact else "a load differs from what was saved")
    return int(not is_exact)


class Run:
    """A loop of one process that saves into `folder`."""

    def __init__(self, folder: Path, mode: str, frozen: float, gib: float, *, is_incremental: bool) -> None:
        self._options: dict[str, Any] = {
            "folder": str(folder / "checkpoint"),
            "interval": 1_000_000,
            "async_mode": mode,
            "keep_latest_k": 2,
            "memory_ttl_seconds": 0,
            "incremental": is_incremental,
        }
        of_layer = 4 * WIDTH**2
        self._num_frozen = round(frozen * gib * 2**30 / of_layer)
        # A trained layer has two moments, too.
        self._num_layers = self._num_frozen + max(1, round((1 - frozen) * gib * 2**30 / (3 * of_layer)))
        self._model = self._made()
        self._optimizer = _optimizer_of(self._model)
        self._written: list[tuple[int, int]] = []

    @property
    def share_written(self) -> float:
        """The bytes that the saves after the first wrote, over those of their checkpoints."""
        return 1 - sum(linked for _, linked in self._written[1:]) / sum(size for size, _ in self._written[1:])

    def seconds(self, saves: int) -> float:
        """Return the median time of a save after the first one."""
        progress, found = TrainState(), []
        with CheckpointManager.for_loop(
            model=self._model,
            optimizer=self._optimizer,
            states={"train_state": progress},
            on_event=self._note,
            **self._options,
        ) as manager:
            for _ in range(saves + 2):  # A plan is made with the first, and memory for copies with the second.
                self._train()
                progress.step += 1
                began = time.perf_counter()
                manager.save(progress.step, now=True)
                manager.wait()
                found.append(time.perf_counter() - began)
                manager.maybe_wait_for_staging()
        return statistics.median(found[2:])

    def loads_exactly(self) -> bool:
        """Return whether the latest step is what this run has."""
        other, options = self._made(), self._options | {"load_only": True}
        optimizer, states = _optimizer_of(other), {"train_state": TrainState()}
        with CheckpointManager.for_loop(model=other, optimizer=optimizer, states=states, **options) as manager:
            manager.load()
        saved, loaded = (
            [*model.parameters(), *(value for state in each.state.values() for value in state.values())]
            for model, each in ((self._model, self._optimizer), (other, optimizer))
        )
        return len(saved) == len(loaded) and all(map(torch.equal, saved, loaded))

    def _train(self) -> None:
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 0.5)
        self._optimizer.step()

    def _made(self) -> nn.Module:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(self._num_layers)))
        for layer in model[: self._num_frozen]:
            layer.requires_grad_(requires_grad=False)
        return model

    def _note(self, event: str, step: int, /, **figures: Any) -> None:
        if event == "committed":
            self._written.append((figures["bytes"], figures.get("linked_bytes") or 0))


def _optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], foreach=True)


if __name__ == "__main__":
    sys.exit(main())
