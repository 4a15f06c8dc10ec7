"""Documents as windows of byte tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lite.config.job_config import Training
from torchtitan_lite.data.documents import Fingerprint, TextFiles
from torchtitan_lite.data.loader import ByteCorpus, TokenLoader, shuffled
from torchtitan_lite.data.tokenizer import BOS, EOS, ByteTokenizer
from torchtitan_lite.errors import ConfigError


class InMemory:
    """Documents in memory."""

    def __init__(self, *contents: bytes) -> None:
        self.contents = contents
        self.lengths = np.array([len(content) for content in contents], dtype=np.int64)
        self.fingerprint = Fingerprint("memory", len(contents), sum(map(len, contents)), "")

    def read(self, document: int, start: int, stop: int) -> bytes:
        return self.contents[document][start:stop]


def windows(documents: InMemory | TextFiles, seq_len: int) -> list[list[int]]:
    """Return the windows that a loader takes in one epoch, in the order of the stream."""
    training = Training(seq_len=seq_len, batch_size=1, max_epochs=1)
    loader = TokenLoader(ByteCorpus(documents), training, seed=5, rank=0, num_ranks=1, global_batch_size=1)
    loader.prepare()
    taken = list(loader)
    assert all(batch.dtype == torch.int64 for batch in taken)
    places = [shuffled(position, size=len(taken), seed=5, epoch=0) for position in range(len(taken))]
    return [batch.flatten().tolist() for _, batch in sorted(zip(places, taken, strict=True), key=lambda each: each[0])]


def test_a_document_is_between_bos_and_eos() -> None:
    (window,) = windows(InMemory(b"ab", b"", b"c"), seq_len=8)
    assert window == [BOS, 97, 98, EOS, BOS, EOS, BOS, 99, EOS]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=12), min_size=1), st.integers(1, 9))
def test_windows_are_the_stream_cut_without_overlap(contents: list[bytes], seq_len: int) -> None:
    stream = [token for content in contents for token in (BOS, *content, EOS)]
    width = seq_len + 1
    expected = [stream[start : start + width] for start in range(0, len(stream) - width + 1, width)]
    if not expected:
        with pytest.raises(ConfigError):
            windows(InMemory(*contents), seq_len)
        return
    assert windows(InMemory(*contents), seq_len) == expected


def test_every_token_is_in_the_vocabulary() -> None:
    (window,) = windows(InMemory(bytes(range(256))), seq_len=257)
    assert sorted(window) == list(range(ByteTokenizer.vocab_size))


def test_a_corpus_below_one_sequence_is_an_error_with_both_sizes() -> None:
    with pytest.raises(ConfigError, match="the corpus has 4 tokens, less than one sequence of 16"):
        windows(InMemory(b"ab"), seq_len=16)


def test_windows_of_real_files_are_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"0123456789")
    assert windows(TextFiles([tmp_path / "a.txt"]), seq_len=3)[1] == list(b"3456")
