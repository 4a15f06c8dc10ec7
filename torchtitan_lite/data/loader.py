"""Which windows each rank trains on at each step.

The run has one global order of samples: position p is window `shuffled(p % n)` of epoch p // n, for n windows. A step
takes the next `global_batch_size` positions, and each rank takes an equal, contiguous share of them. A resume needs
only the next position, so the state is the same on every rank and fits any number of ranks and any batch size.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchtitan_lite.config.job_config import JobConfig, Training
from torchtitan_lite.data.batch_size import global_batch_size
from torchtitan_lite.data.documents import TextFiles, build_documents
from torchtitan_lite.data.stream import EpochProgress, StreamLoader, open_share
from torchtitan_lite.data.token_corpus import TokenCorpus
from torchtitan_lite.data.tokenizer import BOS, BYTES, EOS, Tokenizer
from torchtitan_lite.distributed.host_mismatch import HostView, Kind
from torchtitan_lite.errors import ConfigError, CorpusChanged
from torchtitan_lite.log import counted, logger


def build_dataloader(config: JobConfig, tokenizer: Tokenizer, *, seed: int, rank: int, num_ranks: int) -> Loader:
    """Return this rank's loader, prepared unless this is a dry run, which takes no step.

    `rank` and `num_ranks` count the ranks that take different data.
    """
    training = config.training
    total = global_batch_size(training, num_ranks)
    if rank == 0 and tokenizer.bos is None and tokenizer.eos is None:
        logger.warning(
            "%s has neither BOS nor EOS: no token separates documents. Name them in tokenizer_config.json next to it",
            config.model.tokenizer_path,
        )
    loader: Loader
    if training.dataset == "huggingface":
        share = open_share(training, rank=rank, num_ranks=num_ranks)
        loader = StreamLoader(share, tokenizer, training, rank=rank, num_ranks=num_ranks, global_batch_size=total)
    else:
        loader = TokenLoader(
            _build_corpus(config, tokenizer),
            training,
            seed=seed,
            rank=rank,
            num_ranks=num_ranks,
            global_batch_size=total,
        )
    if not config.checkpoint.dry_run:
        loader.prepare()
    return loader


def _build_corpus(config: JobConfig, tokenizer: Tokenizer) -> Corpus:
    training, checkpoint = config.training, config.checkpoint
    documents = build_documents(training)
    # To find a line of JSON, or a row of Parquet, much around it has to be read, so its bytes are kept as tokens, too.
    if tokenizer.fingerprint == BYTES and isinstance(documents, TextFiles):
        return ByteCorpus(documents)
    folder = Path(config.job.dump_folder).absolute() / Path(training.tokens_folder).expanduser()
    only_loads = checkpoint.enable_checkpoint and checkpoint.load_only
    return TokenCorpus(documents, tokenizer, folder, writes=not only_loads)


class TokenLoader:
    """Iterator over this rank's share of each step: int64 [accumulation, local_batch, seq_len + 1] on the CPU.

    Window i is tokens i * w ... (i + 1) * w - 1 of the corpus, for w = seq_len + 1. Windows do not overlap, a document
    may span several, and the end of the corpus that fills no window is left out. Until `prepare`, only `check_state`
    and the state of a loader that took nothing are quick.
    """

    def __init__(
        self,
        corpus: Corpus,
        config: Training,
        *,
        seed: int,
        rank: int,
        num_ranks: int,
        global_batch_size: int,
    ) -> None:
        assert global_batch_size % (config.batch_size * num_ranks) == 0, "build_dataloader checks this"
        self._corpus, self._seq_len = corpus, config.seq_len
        self._seed = seed
        self._share = global_batch_size // num_ranks
        self._first = rank * self._share
        self._local_batch_size = config.batch_size
        self._global_batch_size = global_batch_size
        self._max_epochs = config.max_epochs
        self._next_position = 0
        self.last_positions = range(0)
        """Positions of this rank's last step in the run's order, before the shuffle; empty before the first step."""

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        if self.has_ended:
            raise StopIteration
        start, stop = self._next_position, self._next_position + self._global_batch_size
        first = start + self._first
        positions = range(first, first + self._share)
        windows = [self._window(position) for position in positions]
        self._next_position, self.last_positions = stop, positions
        return torch.from_numpy(np.stack(windows)).view(-1, self._local_batch_size, self._seq_len + 1)

    def prepare(self) -> None:
        """Tokenise the corpus, or wait for who does. Raise ConfigError if it has less than one step, or sequence."""
        length = self._num_windows
        if self._max_epochs and self._max_epochs * length < self._global_batch_size:
            raise ConfigError(
                f"training.max_epochs: {self._max_epochs} x {counted(length, 'sequence')}, less than one step of "
                f"{self._global_batch_size}. Lower the batch size or --training.seq_len."
            )

    def view(self) -> HostView:
        """Return what of the data must be the same on all hosts. After `prepare`."""
        found, path = self._corpus.fingerprint, self._corpus.tokens_file
        data = f"{found.kind}, {counted(found.files, 'file')}, {counted(found.bytes, 'byte')}, digest {found.digest}"
        view = {(Kind.DATA, "the data"): data, (Kind.DATA, "the tokenizer"): self._corpus.tokenizer}
        if path is not None:
            stat = path.stat()
            view[Kind.TOKENS, f"the file of tokens {path}"] = f"inode {stat.st_ino} of {stat.st_mtime_ns} ns"
        return HostView(view)

    @property
    def has_ended(self) -> bool:
        """Whether less than one step of data is left."""
        end = self._next_position + self._global_batch_size
        return self._max_epochs > 0 and end > self._max_epochs * self._num_windows

    @property
    def progress(self) -> EpochProgress:
        """Return how far the run is in its data."""
        if self._next_position == 0:
            return EpochProgress(0, 0.0)
        epoch, place = divmod(self._next_position - 1, self._num_windows)
        return EpochProgress(epoch, (place + 1) / self._num_windows)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the run, as new ints and strings that are the same on every rank."""
        return {
            # One position for all ranks: the order is computed from it, so a resume on any number of ranks seeks in no
            # time.
            "next_position": self._next_position,
            "seed": self._seed,
            # At 0 without the length, which may not be known yet.
            "epoch": self._next_position and self._next_position // self._num_windows,
            "global_batch_size": self._global_batch_size,
            **self._identity,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise CorpusChanged if `state` belongs to another corpus, tokenizer or seq_len. Changes nothing."""
        mine, theirs = self._identity, {"tokenizer": BYTES, **state}  # Older checkpoints: there were bytes only.
        if changed := [name for name in mine if theirs.get(name) != mine[name]]:
            raise CorpusChanged(
                [f"{name.removeprefix('corpus_')}: {theirs.get(name)} -> {mine[name]}" for name in changed]
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
        self.last_positions = range(0)

    @property
    def _identity(self) -> dict[str, Any]:
        """What a state must have in common with this loader."""
        corpus = dataclasses.asdict(self._corpus.fingerprint)
        return {
            "seq_len": self._seq_len,
            "tokenizer": self._corpus.tokenizer,
            **{f"corpus_{name}": value for name, value in corpus.items()},
        }

    @cached_property
    def _num_windows(self) -> int:
        num_tokens = self._corpus.num_tokens
        if num_tokens <= self._seq_len:
            raise ConfigError(
                f"training.seq_len: the corpus has {num_tokens} tokens, less than one sequence of {self._seq_len} + 1. "
                "Lower --training.seq_len, or add files to --training.dataset_path."
            )
        return num_tokens // (self._seq_len + 1)

    def _window(self, position: int) -> npt.NDArray[np.int64]:
        epoch, place = divmod(position, self._num_windows)
        window = shuffled(place, size=self._num_windows, seed=self._seed, epoch=epoch)
        width = self._seq_len + 1
        return self._corpus.read(window * width, (window + 1) * width)


Loader = TokenLoader | StreamLoader


# Shuffle without a list.
#
# For every size, seed and epoch, `shuffled` is a bijection of range(size) that needs no memory and no history: a
# Feistel network over the next power of four, applied until the result is inside the range (Black and Rogaway, "Ciphers
# with arbitrary finite domains", 2002). Its values must never change: a checkpoint does not hold the order, so a
# resumed run computes it again.


_ROUNDS = 6
_MASK = (1 << 64) - 1


def shuffled(position: int, *, size: int, seed: int, epoch: int) -> int:
    """Return the element at `position` of the epoch's order; both are in range(size)."""
    assert 0 <= position < size, f"{position} is not in range({size})"
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    # Fewer than four steps on average: the network's domain is less than four times the range.
    while (position := _feistel(position, half_bits, keys)) >= size:
        pass
    return position


def _feistel(value: int, half_bits: int, keys: tuple[int, ...]) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(key ^ right) & mask)
    return left << half_bits | right


def _mix(value: int) -> int:
    """Return splitmix64's finaliser of `value`: each bit of the result depends on each bit of `value`."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS))


class ByteCorpus:
    """Text files whose tokens are their bytes, between the marks BOS and EOS, in one stream that never changes.

    Reads from the files as they are, without a file of tokens.
    """

    tokenizer = BYTES
    tokens_file = None

    def __init__(self, documents: TextFiles) -> None:
        self._documents = documents
        self.fingerprint = documents.fingerprint
        self._ends = np.cumsum(documents.lengths + 2)

    @property
    def num_tokens(self) -> int:
        """Return the bytes of all documents, and two marks for each of them."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return tokens start ... stop - 1."""
        document = int(np.searchsorted(self._ends, start, side="right"))
        pieces, position = [], start
        while position < stop:
            begin, end = int(self._ends[document - 1]) if document else 0, int(self._ends[document])
            pieces.append(self._tokens(document, position - begin, min(stop, end) - begin))
            position, document = end, document + 1
        return np.concatenate(pieces)

    def _tokens(self, document: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return tokens start ... stop - 1 of one document, where token 0 is BOS and the last one is EOS."""
        length = int(self._documents.lengths[document])
        tokens = np.empty(stop - start, dtype=np.int64)
        first, last = max(start - 1, 0), min(stop - 1, length)
        if last > first:
            tokens[first + 1 - start : last + 1 - start] = np.frombuffer(
                self._documents.read(document, first, last), dtype=np.uint8
            )
        if start == 0:
            tokens[0] = BOS
        if stop == length + 2:
            tokens[-1] = EOS
        return tokens


Corpus = ByteCorpus | TokenCorpus
