"""Samples from a dataset of Hugging Face's `datasets`, read as a stream.

Each data-parallel rank reads its own share of the dataset, in the dataset's order, and packs the tokens of one document
after the other into windows of seq_len + 1. What is left of a document when a step is full is part of the state. So a
resume on the same number of ranks continues with the next token, and another number of ranks is refused: the shares
would be others. When a rank's share ends it begins again, as its next epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchtitan_lite.config.job_config import Training
from torchtitan_lite.data.adapters import HuggingFaceStreamAdapter
from torchtitan_lite.data.documents import text_under
from torchtitan_lite.data.rank_state import pack, unpack
from torchtitan_lite.data.tokenizer import Tokenizer, marks_of
from torchtitan_lite.distributed.host_mismatch import HostView, Kind
from torchtitan_lite.errors import ConfigError, CorpusChanged, ExtraMissing


def open_share(config: Training, *, rank: int, num_ranks: int) -> Any:
    """Return the share of `rank` in the dataset that `config` names, a `datasets.IterableDataset`.

    Raises ConfigError with what `datasets` says if there is none, and ExtraMissing without `datasets`.
    """
    try:
        import datasets
        from datasets.distributed import split_dataset_by_node
    except ImportError as error:
        raise ExtraMissing.of(error, "datasets") from error
    path = str(config.dataset_path)
    if (Path(path) / "state.json").is_file() or (Path(path) / "dataset_dict.json").is_file():
        raise ConfigError(
            f"training.dataset_path: {path} was written by save_to_disk, which cannot be streamed. Save it as Parquet "
            "(to_parquet), and set --training.dataset=parquet."
        )
    try:
        dataset = datasets.load_dataset(path, config.dataset_subset, split=config.dataset_split, streaming=True)
    except Exception as error:  # Everything that a hub, a network and a loader can raise.
        raise ConfigError(
            f"training.dataset_path: datasets {datasets.__version__} did not open {path!r}, "
            f"subset {config.dataset_subset or '(default)'}, split {config.dataset_split!r}: "
            f"{type(error).__name__}: {error}. Correct dataset_path, dataset_subset or dataset_split."
        ) from error
    return split_dataset_by_node(dataset, rank=rank, world_size=num_ranks)


class EpochProgress(NamedTuple):
    """The epoch of the last sample that was taken, and the part of that epoch that is taken, up to 1.0."""

    epoch: int
    """The first epoch is 0."""
    fraction: float | None
    """None where the length of an epoch is not known, as of a stream."""


class StreamLoader:
    """Iterator over this rank's share of each step: int64 [accumulation, local_batch, seq_len + 1] on the CPU.

    It never ends. The names in `config` identify the dataset in the state.
    """

    has_ended = False

    def __init__(
        self,
        share: Any,
        tokenizer: Tokenizer,
        config: Training,
        *,
        rank: int,
        num_ranks: int,
        global_batch_size: int,
    ) -> None:
        self._stream = HuggingFaceStreamAdapter(share, rank=rank, num_ranks=num_ranks)
        self._tokenizer, self._text_key = tokenizer, config.dataset_text_key
        self._rank, self._num_ranks = rank, num_ranks
        self._local_batch_size, self._global_batch_size = config.batch_size, global_batch_size
        source = ", ".join(filter(None, (config.dataset_path, config.dataset_subset, config.dataset_split)))
        self._identity = {"source": source, "tokenizer": tokenizer.fingerprint, "seq_len": config.seq_len}
        self._width = config.seq_len + 1
        self._documents = self._read()
        self._rest: list[int] = []
        self._epoch = 0
        self._next_position = 0
        self.last_positions = range(0)
        """Positions of this rank's last step, counted over all ranks' shares; empty before the first step."""

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        share = self._global_batch_size // self._num_ranks
        needed = share * self._width
        while len(self._rest) < needed:
            self._rest += next(self._documents)
        taken, self._rest = self._rest[:needed], self._rest[needed:]
        first = self._next_position + self._rank * share
        self.last_positions = range(first, first + share)
        self._next_position += self._global_batch_size
        tokens = np.array(taken, dtype=np.int64).reshape(-1, self._local_batch_size, self._width)
        return torch.from_numpy(tokens)

    def prepare(self) -> None:
        """Read the first document, so that a dataset without text is refused before anything starts."""
        if not self._rest and self._next_position == 0:
            self._rest += next(self._documents)

    def view(self) -> HostView:
        """Return what of the data must be the same on all hosts."""
        names = {"source": "the data", "tokenizer": "the tokenizer"}
        return HostView({(Kind.DATA, words): str(self._identity[name]) for name, words in names.items()})

    @property
    def progress(self) -> EpochProgress:
        """Return this rank's epoch: the shares of other ranks may be longer. How far it is in it is not known."""
        return EpochProgress(self._epoch, None)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position, and the tokens that were read and not yet taken."""
        state = {
            **self._identity,
            "next_position": self._next_position,
            "epoch": self._epoch,
            "stream": self._stream.position(),
            # As tokens: to read the document again would need the position before it, which `datasets` does not give.
            "rest": self._rest,
        }
        return pack(state, rank=self._rank, num_ranks=self._num_ranks)

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ConfigError for another number of ranks, CorpusChanged for other data. Changes nothing."""
        self._checked(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the next token of `state_dict`. Raises as `check_state` does."""
        state = self._checked(state_dict)
        self._stream.seek(state["stream"])
        self._documents = self._read()
        self._rest = [int(token) for token in state["rest"]]
        self._epoch = int(state["epoch"])
        self._next_position, self.last_positions = int(state["next_position"]), range(0)

    def _checked(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = unpack(state_dict, rank=self._rank, num_ranks=self._num_ranks)
        changed = [name for name in self._identity if state.get(name) != self._identity[name]]
        if changed:
            raise CorpusChanged([f"{name}: {state.get(name)} -> {self._identity[name]}" for name in changed])
        return state

    def _read(self) -> Iterator[list[int]]:
        """Yield the tokens of each document, epoch after epoch."""
        before, after = marks_of(self._tokenizer)
        while True:
            is_empty = not self._stream.is_in_epoch  # The end of an epoch may be all that is left after a resume.
            for example in self._stream:
                self._epoch, is_empty = self._stream.epoch, False
                (tokens,) = self._tokenizer.encode([self._text(example)])
                yield before + tokens + after
            if is_empty:
                raise ConfigError(
                    f"training.dataset_path: the share of data-parallel rank {self._rank} of {self._num_ranks} in "
                    f"{self._identity['source']} is empty. Use fewer ranks, or a dataset of more examples."
                )

    def _text(self, example: Mapping[str, Any]) -> str:
        if self._text_key in example and example[self._text_key] is None:
            return ""
        return text_under(example, self._text_key, str(self._identity["source"]))
