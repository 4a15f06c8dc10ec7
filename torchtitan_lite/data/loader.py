"""Which windows each rank trains on at each step.

The run has one global order of samples: position p is window `shuffled(p % n)` of epoch p // n, for n windows. A step
takes the next `global_batch_size` positions, and each rank takes an equal, contiguous share of them. A resume needs
only the next position, so the state is the same on every rank and fits any number of ranks and any batch size.
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
    """Return this rank's loader. `rank` and `num_ranks` count the ranks that take different data."""
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
    """Return the sequences in one optimizer step. Raise ConfigError if the ranks cannot share them equally."""
    unit = config.batch_size * num_ranks
    total = unit if config.global_batch_size == -1 else config.global_batch_size
    if total % unit:
        raise ConfigError(
            f"training.global_batch_size: {total} is not a multiple of batch_size x ranks = {config.batch_size} x "
            f"{num_ranks} = {unit}; {_what_would_do(total, config.batch_size, num_ranks)}."
        )
    return total


def _what_would_do(total: int, batch_size: int, num_ranks: int) -> str:
    """Return, for each of the three values, the nearest ones that fit the other two, in the words of an error."""
    unit = batch_size * num_ranks
    totals = [str(multiple) for multiple in (total // unit * unit, (total // unit + 1) * unit) if multiple]
    batch_sizes, ranks = _nearest_factors(total, num_ranks, batch_size), _nearest_factors(total, batch_size, num_ranks)
    others = [f"batch_size {batch_sizes}"] if batch_sizes else []
    others += [f"{ranks} ranks"] if ranks else []
    return f"{' and '.join(totals)} would do" + (f", as would {', or '.join(others)}" if others else "")


def _nearest_factors(total: int, other: int, current: int) -> str:
    fitting = [factor for factor in range(1, total // other + 1) if total % (factor * other) == 0]
    below, above = [f for f in fitting if f < current], [f for f in fitting if f > current]
    return " or ".join(map(str, below[-1:] + above[:1]))


class TokenLoader:
    """Iterator over this rank's share of each step: int64 [accumulation, local_batch, seq_len + 1] on the CPU."""

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
        self._end_position = max_epochs * len(dataset) if max_epochs else None
        self._next_position = 0
        self._last_positions = range(0)
        if self._end_position is not None and self._end_position < global_batch_size:
            raise ConfigError(
                f"training.max_epochs: {max_epochs} x {len(dataset)} sequences are less than one step of "
                f"{global_batch_size}. Lower the batch size or --training.seq_len."
            )

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        if self.has_ended:
            raise StopIteration
        start, stop = self._next_position, self._next_position + self._global_batch_size
        first = start + self._first
        positions = range(first, first + self._share)
        windows = [self._window(position) for position in positions]
        self._next_position, self._last_positions = stop, positions
        return torch.from_numpy(np.stack(windows)).view(-1, self._local_batch_size, self._dataset.seq_len + 1)

    @property
    def has_ended(self) -> bool:
        """Whether less than one step of data is left."""
        return self._end_position is not None and self._next_position + self._global_batch_size > self._end_position

    @property
    def last_positions(self) -> range:
        """Positions of this rank's last step in the run's order, before the shuffle; empty before the first step."""
        return self._last_positions

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the run, as new ints and strings that are the same on every rank."""
        corpus = dataclasses.asdict(self._dataset.fingerprint)
        return {
            "next_position": self._next_position,
            "seed": self._seed,
            "epoch": self._next_position // len(self._dataset),
            "seq_len": self._dataset.seq_len,
            "global_batch_size": self._global_batch_size,
        } | {f"corpus_{name}": value for name, value in corpus.items()}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise CorpusChanged if `state` belongs to another corpus or another seq_len. Changes nothing."""
        mine = self.state_dict()
        named = [name for name in mine if name == "seq_len" or name.startswith("corpus_")]
        changed = [name for name in named if state.get(name) != mine[name]]
        if changed:
            raise CorpusChanged(
                [f"{name.removeprefix('corpus_')}: {state.get(name)} -> {mine[name]}" for name in changed]
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the next position of `state`, in the order of its seed. Raises as `check_state` does."""
        self.check_state(state)
        if state.get("global_batch_size", self._global_batch_size) != self._global_batch_size:
            logger.warning(
                "The global batch was %d in the checkpoint and is %d now. To keep it, set "
                "--training.global_batch_size=%d",
                state["global_batch_size"],
                self._global_batch_size,
                state["global_batch_size"],
            )
        if state["seed"] != self._seed:
            logger.info(
                "The data order continues with seed %d of the checkpoint; seed %d of this start does not change it",
                state["seed"],
                self._seed,
            )
        self._next_position, self._seed = int(state["next_position"]), int(state["seed"])
        self._last_positions = range(0)

    def _window(self, position: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        epoch, place = divmod(position, len(self._dataset))
        return self._dataset[shuffled(place, size=len(self._dataset), seed=self._seed, epoch=epoch)]
