"""`load_model` where nothing can be loaded: damaged checkpoints alone, and a folder that cannot be listed."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from tests.store.filled import flip
from torchtitan_lite.checkpoint import CheckpointManager, load_model
from torchtitan_lite.errors import AllCheckpointsDamaged, FolderUnusable


@pytest.mark.parametrize("file", ["__0_0.distcp", "manifest.json"], ids=["found by reading", "found by listing"])
def test_a_folder_whose_only_checkpoint_is_damaged_is_not_called_empty(file: str, tmp_path: Path) -> None:
    with CheckpointManager.for_loop(model=nn.Linear(2, 3), folder=tmp_path, preemption_signals=()) as manager:
        manager.load()
        manager.save(1, force=True)
    flip(tmp_path / "step-1" / file, 40)
    with pytest.raises(AllCheckpointsDamaged, match=rf"step 1: .*{file}"):
        load_model(nn.Linear(2, 3), tmp_path)


def test_a_folder_that_cannot_be_listed_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(FolderUnusable, match="loop cannot be used for checkpoints"):
        load_model(nn.Linear(2, 3), tmp_path / "loop")
