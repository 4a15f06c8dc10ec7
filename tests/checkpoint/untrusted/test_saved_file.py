"""A file of torch.save by another library: its tensors are located within their storages, or it is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchtitan_lite.checkpoint.untrusted.saved_file import SavedFile
from torchtitan_lite.errors import CheckpointDamaged


@pytest.mark.parametrize("rows", [1, 2])
def test_a_tensor_that_reaches_beyond_its_storage_is_damage(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"w": torch.zeros(rows, 8)}, path)
    saved = SavedFile(path)
    assert saved.layout((saved.mapping(saved.root) or {})["w"]) is not None
    shape = b"K" + bytes([rows]) + b"K\x08\x86"
    data = path.read_bytes()
    assert data.count(shape) == 1
    path.write_bytes(data.replace(shape, shape.replace(b"\x08", b"\x40")))
    damaged = SavedFile(path)
    with pytest.raises(CheckpointDamaged):
        damaged.layout((damaged.mapping(damaged.root) or {})["w"])
