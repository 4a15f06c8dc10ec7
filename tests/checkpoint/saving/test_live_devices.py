"""A save of live tensors that are on a device: through a ring, and the file is that of any other tensors."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.checkpoint.devices.late_link import LateLink
from torchtitan_lite.checkpoint.devices.link import CudaLink, Link
from torchtitan_lite.checkpoint.format import file_data
from torchtitan_lite.checkpoint.planning.plan_cache import PlanCache
from torchtitan_lite.checkpoint.saving.content import live_content
from torchtitan_lite.disk.block_writer import NewFileOnDisk
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord
from torchtitan_lite.distributed.peers import Peers


def state(device: str) -> dict[str, object]:
    """Return tensors of all layouts on `device`, the same on each."""
    torch.manual_seed(0)
    base, wide = torch.rand(40, 50, 60).to(device), torch.rand(3000, 700).to(device)
    complex_numbers = torch.view_as_complex(torch.rand(30, 2)).to(device)
    return {
        "large": torch.rand(3, BLOCK_BYTES // 4 + 5).to(device),
        "columns": wide[:, 100:300],
        "wide": wide.T,
        "turned": base.permute(2, 0, 1),
        "some": base[:, 1:3, ::2],
        "expanded": torch.ones(1, device=device).expand(9, 3),
        "conj": complex_numbers.conj(),
        "neg": complex_numbers.conj().imag,
        "number": torch.tensor(7, device=device),
        "empty": torch.empty(3, 0, 2, device=device),
        "bool": torch.rand(1001).to(device) > 0.5,
        "half": torch.rand(5, 5).to(device).bfloat16().T,
        "parameter": torch.nn.Parameter(torch.rand(100).to(device)),
        **{f"small{number}": torch.rand(number).to(device) for number in range(300)},
        "text": "no tensor",
    }


def write(path: Path, link: Link, device: str = "cpu") -> FileRecord:
    file = PlanCache(Peers(timedelta(seconds=60))).plan(state(device)).file()
    return live_content(file, make_link=lambda: link).write(NewFileOnDisk(path))


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no processor read the memory of tensors as it lies: it is that of a device."""
    monkeypatch.setattr(file_data, "_lies_in_a_row", lambda tensor: False)


@pytest.mark.parametrize("eager", [range(0), range(0, 1000, 3), range(1000)], ids=["late", "some at once", "at once"])
def test_the_file_has_the_bytes_of_the_tensors(eager: range, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    expected = write(tmp_path / "expected", CudaLink())
    request.getfixturevalue("far")
    link = LateLink(eager)
    assert write(tmp_path / "file", link) == expected
    assert (tmp_path / "file").read_bytes() == (tmp_path / "expected").read_bytes()
    assert link.begun
    assert (link.locked, link.most_locked) == (0, 16 << 20)


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("failing", [0, 3])
def test_a_copy_that_fails_fails_the_write(failing: int, tmp_path: Path) -> None:
    link = LateLink(failing=failing)
    with pytest.raises(RuntimeError, match="the device is lost"):
        write(tmp_path / "file", link)
    assert link.locked == 0


@pytest.mark.cuda
def test_the_file_of_a_gpu_is_that_of_the_host(tmp_path: Path) -> None:
    expected = write(tmp_path / "expected", CudaLink())
    for number in range(10):
        assert write(tmp_path / f"file-{number}", CudaLink(), "cuda") == expected
        assert (tmp_path / f"file-{number}").read_bytes() == (tmp_path / "expected").read_bytes()
