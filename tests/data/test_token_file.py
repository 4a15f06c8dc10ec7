"""A file of tokens: what is written is read, and damage anywhere in it is found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchtitan_lite.data.token_corpus import TokenFile, TokensDamaged, write_tokens
from torchtitan_lite.disk.digest import BLOCK_BYTES


def write(path: Path, *arrays: np.ndarray, token_bytes: int = 2) -> Path:
    with path.open("wb") as file:
        write_tokens(file, arrays, token_bytes=token_bytes, description={"of": "a test"})
    return path


def opened(path: Path) -> TokenFile:
    with path.open("rb") as file:
        return TokenFile(file)


@pytest.mark.parametrize("count", [0, 1, BLOCK_BYTES // 2 - 1, BLOCK_BYTES // 2, BLOCK_BYTES // 2 + 1, BLOCK_BYTES + 7])
@pytest.mark.parametrize("token_bytes", [2, 4])
def test_what_is_written_in_any_portions_is_read(tmp_path: Path, count: int, token_bytes: int) -> None:
    tokens = np.random.default_rng(count).integers(0, 256**token_bytes, count, dtype=np.uint32)
    found = opened(write(tmp_path / "tokens", *np.array_split(tokens, 3), token_bytes=token_bytes))
    assert found.num_tokens == count
    assert found.description == {"of": "a test"}
    assert found.read(0, count).tolist() == tokens.tolist()
    assert found.read(count // 3, count // 2).tolist() == tokens[count // 3 : count // 2].tolist()
    assert found.read(0, count).dtype == np.int64


@settings(deadline=None, max_examples=examples(100))
@given(cut=st.integers(0, 200))
def test_a_file_that_was_cut_off_is_damaged(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = write(tmp_path_factory.mktemp("cut") / "tokens", np.arange(60))
    data = path.read_bytes()
    path.write_bytes(data[: min(cut, len(data) - 1)])
    with pytest.raises(TokensDamaged):
        opened(path)


@settings(deadline=None, max_examples=examples(200))
@given(at=st.integers(0, 10_000))
def test_a_changed_byte_anywhere_is_found_before_a_token_of_it_is_used(
    tmp_path_factory: pytest.TempPathFactory, at: int
) -> None:
    path = write(tmp_path_factory.mktemp("flip") / "tokens", np.arange(60))
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1
    path.write_bytes(data)
    with pytest.raises(TokensDamaged):
        opened(path).read(0, 60)


def test_damage_does_not_hinder_reads_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens", np.zeros(BLOCK_BYTES))
    data = bytearray(path.read_bytes())
    data[-100 - BLOCK_BYTES // 2] ^= 1
    path.write_bytes(data)
    found = opened(path)
    assert found.read(0, BLOCK_BYTES // 2).tolist() == [0] * (BLOCK_BYTES // 2)
    with pytest.raises(TokensDamaged, match="bytes 1048576 to 2097152 have another digest"):
        found.read(BLOCK_BYTES // 2 - 1, BLOCK_BYTES // 2 + 1)
