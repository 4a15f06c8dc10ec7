"""With "staging" in `digest_tensors` a changed byte of a tensor that is being staged fails the save; else none does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torchtitan_lite.checkpoint.format.file_data import FileData, FileLayout
from torchtitan_lite.checkpoint.staging.copiers import HostCopier
from torchtitan_lite.checkpoint.staging.stager import Stager, StagingWatch, build_staging_watch, watch
from torchtitan_lite.config.job_config import Checkpoint

LARGE = (9 << 20) + 3
"""Bytes of a tensor that is digested in several pieces, the last one short."""


@pytest.fixture
def stager() -> Iterator[Stager]:
    stager = Stager(HostCopier())
    yield stager
    stager.close()


def compare(stager: Stager, watch: StagingWatch, tensors: list[torch.Tensor], changed: dict[int, int]) -> None:
    """Watch `tensors`, change the elements `changed` (number of the tensor to element), and compare the copies."""
    image = FileData(FileLayout([(each.dtype, tuple(each.shape)) for each in tensors]), tensors)
    finish = watch(image, [f"t{number}" for number in range(len(tensors))])
    for number, element in changed.items():
        tensors[number][element] += 1
    finish(stager.take(image))


@pytest.mark.parametrize("element", [0, 1, 2 << 20, 4 << 20, 5 << 20, 8 << 20, LARGE - 1])
def test_a_change_of_one_byte_is_found_wherever_it_is(stager: Stager, element: int) -> None:
    with pytest.raises(RuntimeError, match=r"^t1 changed while being staged"):
        compare(stager, watch, [torch.zeros(3), torch.zeros(LARGE, dtype=torch.uint8)], {1: element})


@pytest.mark.parametrize("element", range(4))
def test_all_elements_of_a_wide_type_are_compared(stager: Stager, element: int) -> None:
    with pytest.raises(RuntimeError, match=r"^t0 changed"):
        compare(stager, watch, [torch.zeros(4, dtype=torch.float64)], {0: element})


@pytest.mark.parametrize(
    ("count", "finding"),
    [
        (1, "t0 changed"),
        (5, "t0, t1, t2, t3, t4 changed"),
        (6, "t0, t1, t2, t3, t4 and 1 more changed"),
        (7, "t0, t1, t2, t3, t4 and 2 more changed"),
    ],
)
def test_at_most_five_of_the_changed_tensors_are_named(stager: Stager, count: int, finding: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{finding} while being staged"):
        compare(stager, watch, [torch.zeros(1) for _ in range(8)], dict.fromkeys(range(count), 0))


def test_tensors_are_compared_if_the_configuration_says_so(stager: Stager) -> None:
    compare(stager, build_staging_watch(Checkpoint()), [torch.zeros(1)], {0: 0})
    compare(stager, build_staging_watch(Checkpoint(digest_tensors=("staging",))), [torch.zeros(1), torch.zeros(0)], {})
    with pytest.raises(RuntimeError, match="t0 changed"):
        compare(stager, build_staging_watch(Checkpoint(digest_tensors=("staging",))), [torch.zeros(1)], {0: 0})
