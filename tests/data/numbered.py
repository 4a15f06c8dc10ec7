"""A corpus whose windows contain their own number, and loaders of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchtitan_lite.config.job_config import Training
from torchtitan_lite.data.documents import Fingerprint
from torchtitan_lite.data.loader import ByteCorpus, TokenLoader


class Numbered:
    """Documents whose window i of length 4 is [BOS, i // 256, i % 256, EOS]."""

    def __init__(self, count: int, digest: str = "same") -> None:
        self.lengths = np.full(count, 2, dtype=np.int64)
        self.fingerprint = Fingerprint("numbered", count, 2 * count, digest)

    def read(self, document: int, start: int, stop: int) -> bytes:
        return bytes(divmod(document, 256))[start:stop]


def loader(
    windows: int = 40, *, rank: int = 0, num_ranks: int = 1, batch: int = 8, local: int = 1, **others: Any
) -> TokenLoader:
    made = TokenLoader(
        ByteCorpus(others.pop("documents", None) or Numbered(windows)),
        Training(seq_len=3, batch_size=local, max_epochs=others.pop("max_epochs", 0)),
        seed=others.pop("seed", 0),
        rank=rank,
        num_ranks=num_ranks,
        global_batch_size=batch,
        **others,
    )
    made.prepare()
    return made


def ids(batch: torch.Tensor) -> list[int]:
    return (batch[..., 1] * 256 + batch[..., 2]).flatten().tolist()
