"""The rows of queries and keys, reordered while they are read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.reading.foreign_folders import save_plain
from torchtitan_lite.examining.opened import OpenedCheckpoint, open_checkpoint
from torchtitan_lite.examining.tensor_stream import Cut, TensorStream
from torchtitan_lite.hugging_face.rotary_rows import Order, ReorderedStream, rows_in_order

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def in_order(tensor: torch.Tensor, head_dim: int, order: Order) -> torch.Tensor:
    """Return what transformers' own conversion of Llama's weights computes, or its inverse."""
    pair = (head_dim // 2, 2) if order == "halves" else (2, head_dim // 2)
    return (
        tensor.reshape(len(tensor) // head_dim, *pair, *tensor.shape[1:])
        .transpose(1, 2)
        .reshape(tensor.shape)
        .contiguous()
    )


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[OpenedCheckpoint, dict[str, torch.Tensor]]:
    """Return a checkpoint, and its tensors."""
    tensors = {
        "q": torch.randn(24, 5),
        "k": torch.randn(8, 5).to(torch.bfloat16),
        "bias": torch.randn(16),
        "v": torch.randn(24, 5),
        "nothing": torch.randn(0, 5),
        "narrow": torch.randn(16, 0),
    }
    folder = tmp_path_factory.mktemp("checkpoint")
    save_plain(dict(tensors), folder / "c")
    return open_checkpoint(folder / "c"), tensors


def reordered(opened: OpenedCheckpoint, head_dims: dict[str, int], order: Order) -> TensorStream:
    return ReorderedStream(opened.folder, opened.contents, {}, {}, head_dims, order)


def read(stream: TensorStream, key: str, like: torch.Tensor, most: int | None = None) -> torch.Tensor:
    found = bytearray()
    for data in stream.slices(key, most):
        assert most is None or len(data) <= most * like.element_size()
        found += data
    return torch.frombuffer(found, dtype=like.dtype).reshape(like.shape) if found else torch.empty_like(like)


@pytest.mark.parametrize("order", ["halves", "pairs"])
@pytest.mark.parametrize("head_dim", [2, 4, 8])
@pytest.mark.parametrize("most", [None, 1, 3, 5, 7, 10, 20, 21, 64])
def test_rows_of_each_head_are_reordered_and_other_tensors_are_not(
    order: Order, head_dim: int, most: int | None, stored: tuple[OpenedCheckpoint, dict[str, torch.Tensor]]
) -> None:
    opened, tensors = stored
    head_dims = dict.fromkeys(("q", "k", "bias", "nothing", "narrow"), head_dim)
    stream = reordered(opened, head_dims, order)
    for key, tensor in tensors.items():
        expected = tensor if key == "v" else in_order(tensor, head_dim, order)
        assert torch.equal(read(stream, key, tensor, most), expected), key


@pytest.mark.parametrize("head_dim", [2, 8])
def test_one_order_undoes_the_other(head_dim: int) -> None:
    rows = np.arange(24)
    assert [*rows_in_order(rows_in_order(rows, head_dim, "halves"), head_dim, "pairs")] == [*rows]


@given(rows=st.tuples(st.integers(0, 23), st.integers(1, 24)), most=st.integers(1, 130))
def test_any_rows(rows: tuple[int, int], most: int, stored: tuple[OpenedCheckpoint, dict[str, torch.Tensor]]) -> None:
    opened, tensors = stored
    begin, end = rows[0], min(rows[0] + rows[1], 24)
    cut = Cut(begin * 5, (begin, 0), (end - begin, 5))
    slices = reordered(opened, {"q": 8}, "halves").slices("q", most, cut)
    found = b"".join(bytes(each) for each in slices)
    assert found == in_order(tensors["q"], 8, "halves")[begin:end].contiguous().numpy().tobytes()
