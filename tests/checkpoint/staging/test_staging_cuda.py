"""A staged copy from devices has the values at the start of the save, whatever kernels are queued before and after."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torchtitan_lite.checkpoint.devices.page_lock import CudaPageLock
from torchtitan_lite.checkpoint.format.file_data import FileData, FileLayout
from torchtitan_lite.checkpoint.staging.copiers import CudaCopier
from torchtitan_lite.checkpoint.staging.stager import StagedCopy, Stager

pytestmark = pytest.mark.cuda


@pytest.fixture
def stager() -> Iterator[Stager]:
    stager = Stager(CudaCopier(), page_lock=CudaPageLock())
    yield stager
    stager.close()


def image_of(tensors: list[torch.Tensor], volatile: frozenset[int] = frozenset()) -> FileData:
    return FileData(FileLayout([(t.dtype, tuple(t.shape)) for t in tensors]), tensors, volatile=volatile)


def assert_holds(staged: StagedCopy, tensors: list[torch.Tensor]) -> None:
    for found, expected in zip(staged.tensors(), tensors, strict=True):
        assert found.contiguous().view(-1).view(torch.uint8).tolist() == (
            expected.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).tolist()
        )


def keep_busy(device: torch.device) -> None:
    """Queue work on the device for a while, so that later kernels on this stream wait."""
    a = torch.ones(4096, 4096, device=device)
    for _ in range(20):
        a = a @ a * 1e-4


def test_tensors_of_every_kind_on_the_device_and_on_the_host_are_staged_as_they_are(stager: Stager) -> None:
    base = torch.arange(12.0, device="cuda").view(3, 4)
    numbers = torch.randn(50, dtype=torch.complex64, device="cuda")
    tensors = [
        *(base.T, base[:, 1], torch.ones(1, device="cuda").expand(5), torch.empty(0, device="cuda")),
        *(torch.rand(70_000, device="cuda"), torch.rand(33, device="cuda").to(torch.float8_e4m3fn), numbers.conj()),
        *(numbers.conj().imag, torch.rand(5, device="cuda").bfloat16(), torch.tensor(3), torch.rand(1000)),
    ]
    staged = stager.take(image_of(tensors))
    staged.wait()
    assert_holds(staged, tensors)


@pytest.mark.parametrize("device", [torch.device("cuda", n) for n in range(max(1, torch.cuda.device_count()))], ids=str)
def test_a_copy_runs_after_the_kernels_that_computed_the_values_and_before_those_that_change_them(
    stager: Stager, device: torch.device
) -> None:
    parameter, buffer = torch.zeros(1 << 20, device=device), torch.zeros(1000, device=device)
    torch.cuda.synchronize(device)
    keep_busy(device)
    parameter.fill_(1)
    buffer.fill_(1)
    staged = stager.take(image_of([parameter, buffer], volatile=frozenset({1})))
    buffer.fill_(2)  # Forward may change a buffer at once.
    staged.wait()
    parameter.fill_(2)  # An optimizer waits first.
    torch.cuda.synchronize(device)
    assert_holds(staged, [torch.ones(1 << 20), torch.ones(1000)])


def test_the_arena_is_pinned_and_the_host_does_not_wait_for_the_device(stager: Stager) -> None:
    parameter = torch.zeros(1 << 20, device="cuda")
    stager.take(image_of([parameter])).wait()
    keep_busy(parameter.device)
    busy = torch.cuda.Event()
    busy.record()
    staged = stager.take(image_of([parameter]))
    assert not busy.query(), "the caller waited for the device"
    assert staged.tensors()[0].is_pinned()
    staged.wait()
