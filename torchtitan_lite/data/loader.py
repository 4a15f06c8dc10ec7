"""Which windows each rank trains on at each step.

The run has one global order of samples: position p is window `shuffled(p % n)` of epoch p // n.
A step takes the next `global_batch_size` positions, and each rank an equal, contiguous share of
them. All that a resume needs is the next position, so the state is the same on every rank and fits
any number of ranks and any batch size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan_lite.config.job_config import JobConfig, Training
from torchtitan_lite.data.dataset import WindowDataset
from torchtitan_lite.data.documents import build_documents
from torchtitan_lite.data.permutation import shuffled
from torchtitan_lite.errors import ConfigError, CorpusChanged
from torchtitan_lite.log import logger


def build_dataloader(config: JobConfig, *, seed: int, rank: int, num_ranks: int) -> TokenLoader:
    """This rank's loader; `num_ranks` counts the ranks that take different data."""
    training = config.training
    return TokenLoader(
        WindowDataset(build_documents(training), training.seq_len),
        seed=seed,
        rank=rank,
        num_ranks=num_ranks,
        local_batch_size=training.batch_size,
        global_batch_size=global_batch_size(training, num_ranks),
        max_epochs=training.max_epochs,
    )


def global_batch_size(config: Training, num_ranks: int) -> int:
    """Sequences in one optimizer step. Raises ConfigError when the ranks cannot share them equally."""
    unit = config.batch_size * num_ranks
    total = unit if config.global_batch_size == -1 else config.global_batch_size
    if total % unit:
        fitting = [multiple for multiple in (total // unit * unit, (total // unit + 1) * unit) if multiple]
        raise ConfigError(
            f"training.global_batch_size: {total} is not a multiple of batch_size x ranks = {config.batch_size} x "
            f"{num_ranks} = {unit}; {' and '.join(map(str, fitting))} would do."
        )
    return total


class TokenLoader:
    """Iterating yields this rank's share of each step: int64 [accumulation, local_batch, seq_len + 1] on the CPU."""

    def __init__(
        self,
        dataset: WindowDataset,
        *,
        seed: int,
        rank: int,
        num_ranks: int,
        local_batch_size: int,
        global_batch_size: int,
        max_epochs: int = 0,
    ) -> None:
        assert global_batch_size % (local_batch_size * num_ranks) == 0, "build_dataloader checks this"
        self._dataset = dataset
        self._seed = seed
        self._share = global_batch_size // num_ranks
        self._first = rank * self._share
        self._local_batch_size = local_batch_size
        self._global_batch_size = global_batch_size
        self._last_position = max_epochs * len(dataset) if max_epochs else None
        self._next_position = 0
        if self._last_position is not None and self._last_position < global_batch_size:
            raise ConfigError(
                f"training.max_epochs: {max_epochs} x {len(dataset)} sequences are less than one step of "
                f"{global_batch_size}. Lower the batch size or --training.seq_len."
            )

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        start, stop = self._next_position, self._next_position + self._global_batch_size
        if self._last_position is not None and stop > self._last_position:
            raise StopIteration
        first = start + self._first
        windows = [self._window(position) for position in range(first, first + self._share)]
        self._next_position = stop
        return torch.from_numpy(np.stack(windows)).view(-1, self._local_batch_size, self._dataset.seq_len + 1)

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, in fresh ints and strings, the same on every rank."""
        corpus = dataclasses.asdict(self._dataset.fingerprint)
        return {
            "next_position": self._next_position,
            "seed": self._seed,
            "epoch": self._next_position // len(self._dataset),
            "seq_len": self._dataset.seq_len,
        } | {f"corpus_{name}": value for name, value in corpus.items()}

    def check_state(self, state: dict[str, Any]) -> None:
        """Nothing is changed. Raises CorpusChanged when `state` is of another corpus or another seq_len."""
        mine = self.state_dict()
        named = [name for name in mine if name == "seq_len" or name.startswith("corpus_")]
        changed = [name for name in named if state.get(name) != mine[name]]
        if changed:
            raise CorpusChanged(
                [f"{name.removeprefix('corpus_')}: {state.get(name)} -> {mine[name]}" for name in changed]
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next step takes the next position of `state`, in the order of its seed. Raises as `check_state`."""
        self.check_state(state)
        if state["seed"] != self._seed:
            logger.info(
                "The data order goes on with seed %d of the checkpoint; seed %d of this start does not change it.",
                state["seed"],
                self._seed,
            )
        self._next_position, self._seed = int(state["next_position"]), int(state["seed"])

    def _window(self, position: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        epoch, place = divmod(position, len(self._dataset))
        return self._dataset[shuffled(place, size=len(self._dataset), seed=self._seed, epoch=epoch)]
