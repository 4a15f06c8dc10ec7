"""Documents as windows of tokens.

A token is a byte, or one of two marks: each document stands between BOS and EOS, and the documents
stand one after the other. Window i is tokens i * w ... (i + 1) * w - 1 of that stream, for
w = seq_len + 1: windows do not overlap, documents may span several, and the rest of the stream that
fills no window is left out. `dataset[i]` is a function of i alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchtitan_lite.data.documents import Documents, Fingerprint
from torchtitan_lite.errors import ConfigError

BOS = 256
EOS = 257
VOCAB_SIZE = 258

Tokens = npt.NDArray[np.int64]


class WindowDataset:
    """`dataset[i]`, for i below `len(dataset)`, is seq_len + 1 tokens: inputs and, shifted by one, targets."""

    def __init__(self, documents: Documents, seq_len: int) -> None:
        self.seq_len = seq_len
        self._documents = documents
        self._ends = np.cumsum(documents.lengths + 2)
        num_tokens = int(self._ends[-1]) if len(self._ends) else 0
        self._length = num_tokens // (seq_len + 1)
        if self._length == 0:
            raise ConfigError(
                f"training.seq_len: the corpus has {num_tokens} tokens, less than one sequence of {seq_len} + 1. "
                "Lower --training.seq_len, or add files to --training.dataset_path."
            )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tokens:
        if not 0 <= index < self._length:
            raise IndexError(f"window {index} of {self._length}")
        width = self.seq_len + 1
        position, stop = index * width, (index + 1) * width
        document = int(np.searchsorted(self._ends, position, side="right"))
        pieces = []
        while position < stop:
            begin, end = int(self._ends[document - 1]) if document else 0, int(self._ends[document])
            pieces.append(self._tokens(document, position - begin, min(stop, end) - begin))
            position, document = end, document + 1
        return np.concatenate(pieces)

    @property
    def fingerprint(self) -> Fingerprint:
        """What identifies the documents."""
        return self._documents.fingerprint

    def _tokens(self, document: int, start: int, stop: int) -> Tokens:
        """Tokens start ... stop of one document, where 0 is BOS and the last one EOS."""
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
