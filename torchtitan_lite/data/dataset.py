"""A corpus as windows of tokens.

The documents of a corpus follow one another in one stream of tokens, each between the marks BOS and EOS. Window i is
tokens i * w ... (i + 1) * w - 1 of that stream, for w = seq_len + 1. Windows do not overlap, a document may span
several, and the end of the stream that fills no window is left out. `dataset[i]` depends only on i.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchtitan_lite.data.byte_marks import BOS, EOS
from torchtitan_lite.data.documents import Documents, Fingerprint
from torchtitan_lite.data.tokenizer import BYTES
from torchtitan_lite.errors import ConfigError

Tokens = npt.NDArray[np.int64]


class Corpus(Protocol):
    """A stream of tokens, which never changes."""

    tokenizer: str
    """Fingerprint of the tokenizer."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the text."""

    @property
    def tokens_file(self) -> Path | None:
        """Return the file that holds the tokens; None if there is none that other processes read."""

    @property
    def num_tokens(self) -> int:
        """Return the length of the stream. May take long the first time."""

    def read(self, start: int, stop: int) -> Tokens:
        """Return tokens start ... stop - 1."""


class WindowDataset:
    """Windows of seq_len + 1 tokens, int64: `dataset[i]` holds the inputs and, shifted by one, the targets.

    The length raises ConfigError if the corpus has less than one window.
    """

    def __init__(self, corpus: Corpus, seq_len: int) -> None:
        self.seq_len = seq_len
        self._corpus = corpus

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tokens:
        if not 0 <= index < self._length:
            raise IndexError(f"window {index} of {self._length}")
        width = self.seq_len + 1
        return self._corpus.read(index * width, (index + 1) * width)

    @property
    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the text."""
        return self._corpus.fingerprint

    @property
    def tokens_file(self) -> Path | None:
        """Return the file that holds the tokens; None if there is none that other processes read."""
        return self._corpus.tokens_file

    @property
    def tokenizer(self) -> str:
        """Return the fingerprint of the tokenizer."""
        return self._corpus.tokenizer

    @cached_property
    def _length(self) -> int:
        num_tokens = self._corpus.num_tokens
        if num_tokens <= self.seq_len:
            raise ConfigError(
                f"training.seq_len: the corpus has {num_tokens} tokens, less than one sequence of {self.seq_len} + 1. "
                "Lower --training.seq_len, or add files to --training.dataset_path."
            )
        return num_tokens // (self.seq_len + 1)


class ByteCorpus:
    """Documents whose tokens are their bytes. Reads from the documents as they are, without a file of tokens."""

    tokenizer = BYTES
    tokens_file = None

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._ends = np.cumsum(documents.lengths + 2)

    @property
    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the documents."""
        return self._documents.fingerprint

    @property
    def num_tokens(self) -> int:
        """Return the bytes of all documents, and two marks for each of them."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, stop: int) -> Tokens:
        """Return tokens start ... stop - 1."""
        document = int(np.searchsorted(self._ends, start, side="right"))
        pieces, position = [], start
        while position < stop:
            begin, end = int(self._ends[document - 1]) if document else 0, int(self._ends[document])
            pieces.append(self._tokens(document, position - begin, min(stop, end) - begin))
            position, document = end, document + 1
        return np.concatenate(pieces)

    def _tokens(self, document: int, start: int, stop: int) -> Tokens:
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
