"""Documents as windows of tokens.

A token is a byte, or one of two marks, BOS before and EOS after each document; the documents follow one another in one
stream. Window i is tokens i * w ... (i + 1) * w - 1 of that stream, for w = seq_len + 1. Windows do not overlap, a
document may span several, and the end of the stream that fills no window is left out. `dataset[i]` depends only on i.
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
    """Windows of seq_len + 1 tokens, int64: `dataset[i]` holds the inputs and, shifted by one, the targets."""

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
        """Return the fingerprint of the documents."""
        return self._documents.fingerprint

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
