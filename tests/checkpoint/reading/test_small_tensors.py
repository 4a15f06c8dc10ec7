"""Hundreds of small tensors are read in columns where memory allows it, and one by one elsewhere, with one result."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.checkpoint.with_manifest import add_manifest
from tests.store.filled import flip
from torchtitan_lite.checkpoint.reading import regions
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.checkpoint.reading.regions import small_tensors
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointDamaged, CheckpointMismatch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

COUNT = 150
"""Of tensors of 4 KiB, and as many of 128 bytes: hundreds in each block."""


def saved() -> dict[str, Tensor]:
    state = {f"w{n}": torch.rand(32, 32) for n in range(COUNT)}
    state |= {f"b{n}": torch.rand(64).to(torch.bfloat16) for n in range(COUNT)}
    return state | {"scalar": torch.tensor(3), "empty": torch.empty(0, 3), "large": torch.rand(100, 200)}


def plain(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor)


def parameter(tensor: Tensor) -> Tensor:
    return torch.nn.Parameter(torch.zeros_like(tensor), requires_grad=tensor.is_floating_point())


def transposed(tensor: Tensor) -> Tensor:
    return torch.zeros(tuple(reversed(tensor.shape)), dtype=tensor.dtype).T if tensor.dim() == 2 else plain(tensor)


def strided(tensor: Tensor) -> Tensor:
    return torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)[..., 1]


def negative(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its elements with the other sign."""
    if tensor.dtype is not torch.float32:
        return plain(tensor)
    return torch.zeros(tensor.shape, dtype=torch.complex64).conj().imag


class Tagged(Tensor):
    """A subclass of which nothing is known."""


def subclass(tensor: Tensor) -> Tensor:
    return plain(tensor).as_subclass(Tagged)


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return saved()


@pytest.fixture
def folder(state: dict[str, Tensor], tmp_path: Path) -> Path:
    dcp_save(state, checkpoint_id=tmp_path, no_dist=True)
    add_manifest(tmp_path)
    return tmp_path


def stored(folder: Path) -> StoredCheckpoint:
    return StoredCheckpoint(folder, Peers(timedelta(seconds=9)))


@pytest.mark.parametrize("make", [plain, parameter, transposed, strided, negative, subclass])
@pytest.mark.parametrize("every", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_tensors_in_any_memory_get_what_was_saved(
    folder: Path, state: dict[str, Tensor], make: Callable[[Tensor], Tensor], every: int
) -> None:
    target = {key: (plain if n % every else make)(tensor) for n, (key, tensor) in enumerate(state.items())}
    stored(folder).read_model(target)
    for key, tensor in state.items():
        assert torch.equal(target[key], tensor), key


def test_only_small_whole_tensors_in_plain_memory_go_into_columns(folder: Path, state: dict[str, Tensor]) -> None:
    table = CheckpointFolder(folder).contents.table
    target = {key: plain(tensor) for key, tensor in state.items()}
    target |= {"w0": strided(state["w0"]), "w1": subclass(state["w1"]), "w2": negative(state["w2"])}
    target |= {"w3": state["w3"].double(), "w4": torch.zeros(1024), "unknown": torch.zeros(1)}
    tables, others = small_tensors(target, table)
    assert {*others} == {"w0", "w1", "w2", "w3", "w4", "unknown", "empty", "large"}
    [of_file] = tables.values()
    assert sorted(of_file.addresses) == sorted(target[key].data_ptr() for key in target if key not in others)


def test_a_load_is_the_same_without_columns(
    folder: Path, state: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "SMALL_BYTES", 0)
    target = {key: plain(tensor) for key, tensor in state.items()}
    stored(folder).read_model(target)
    assert all(torch.equal(target[key], tensor) for key, tensor in state.items())


def test_a_changed_byte_of_a_small_tensor_is_found_and_its_key_is_named(folder: Path, state: dict[str, Tensor]) -> None:
    [chunk] = CheckpointFolder(folder).contents.tensors["w77"].chunks
    assert chunk.at is not None
    flip(folder / chunk.file, chunk.at + 5)
    with pytest.raises(CheckpointDamaged) as caught:
        stored(folder).read_model({key: plain(tensor) for key, tensor in state.items()})
    assert "w77" in caught.value.keys


def test_a_small_tensor_of_another_shape_or_dtype_is_refused_before_any_is_read(
    folder: Path, state: dict[str, Tensor]
) -> None:
    target = {key: plain(tensor) for key, tensor in state.items()}
    wrong = target | {"w5": torch.zeros(1024), "w6": torch.zeros(32, 32, dtype=torch.float64)}
    with pytest.raises(CheckpointMismatch) as caught:
        stored(folder).read_model(wrong)
    assert "w5: shape [32, 32] in the checkpoint, [1024] expected" in str(caught.value)
    assert "w6: dtype torch.float32 in the checkpoint, torch.float64 expected" in str(caught.value)
    assert not any(tensor.any() for tensor in target.values() if tensor.numel())
