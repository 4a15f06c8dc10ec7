"""A load into the memory of a GPU is exact, also while kernels run that write to memory freed before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.checkpoint.reading import mixed_state
from tests.checkpoint.reading.stored_boxes import numbers
from tests.checkpoint.small_run import same
from tests.checkpoint.with_manifest import add_manifest
from tests.store.filled import flip
from torchtitan_lite.checkpoint.reading.reader import CheckpointReader

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def saved() -> dict[str, torch.Tensor]:
    return mixed_state.saved() | {
        f"small{number}": numbers((number, 7), torch.float16, number) for number in range(100)
    }


def empty() -> dict[str, torch.Tensor]:
    """Memory for it, that of one tensor on the host."""
    small = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in saved().items() if "small" in name}
    return mixed_state.empty("cuda") | small | {"small50": torch.zeros(50, 7, dtype=torch.float16)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "c"
    dcp_save(saved(), checkpoint_id=folder, no_dist=True)
    add_manifest(folder)
    return folder


def load(folder: Path) -> dict[str, torch.Tensor]:
    state = empty()
    dcp_load(state, storage_reader=CheckpointReader(folder), no_dist=True)
    return state


def on_host(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().to(saved()[name].dtype) for name, tensor in state.items()}


def test_a_state_of_any_layout_is_loaded(folder: Path) -> None:
    assert same(on_host(load(folder)), saved())


def test_a_state_that_was_made_in_inference_mode_is_loaded(folder: Path) -> None:
    with torch.inference_mode():
        assert same(on_host(load(folder)), saved())


def test_fifty_loads_are_exact_while_kernels_write_to_memory_that_was_just_freed(folder: Path) -> None:
    for _ in range(50):
        room = [torch.empty(size, device="cuda") for size in (3000 * 700, 1 << 20, 1 << 18, 700)]
        torch.cuda._sleep(100_000_000)  # What follows is queued, and runs while the memory has another owner already.
        for each in room:
            each.normal_()
        del room, each
        assert same(on_host(load(folder)), saved())


def test_damage_is_found_and_leaves_no_copy_under_way(folder: Path) -> None:
    [file] = folder.glob("*.distcp")
    flip(file, 3_000_000)
    try:
        with pytest.raises(CheckpointException, match="is damaged"):
            load(folder)
    finally:
        flip(file, 3_000_000)
    assert same(on_host(load(folder)), saved())


def test_loads_leave_no_memory_of_the_device(folder: Path) -> None:
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        load(folder)
    assert torch.cuda.memory_allocated() == before
