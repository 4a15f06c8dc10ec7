"""The checkpoints in tests/golden/torch-X.Y/, one folder for each version that was tried: this torch reads all of them.

docs/versions.md has the outcome under each version; `scripts/test_versions.py --round-trips` makes it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.version_tables import VERSIONS
from tests.checkpoint.format.golden_of_torch import TOOLS, folder_of, folders, outcome
from torchtitan_lite.store.manifest import Manifest

MAX_BYTES = 100_000

each_folder = pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)


def test_every_version_that_was_tried_has_a_small_folder() -> None:
    """PYTHON scripts/make_golden_checkpoints.py --torch, with a Python that has the new torch, writes it."""
    assert folders() == [folder_of(version) for version in VERSIONS]
    for folder in folders():
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= MAX_BYTES


@each_folder
def test_a_folder_was_written_by_two_ranks_of_its_version(folder: Path) -> None:
    manifest = Manifest.of_folder(folder / "ours" / "step-7")
    assert manifest is not None
    assert (folder_of(manifest.versions["torch"]), manifest.world_size) == (folder, 2)


@each_folder
@pytest.mark.parametrize("tool", TOOLS["ours"])
def test_a_checkpoint_of_ours_that_a_version_wrote_is_read_by_ours_and_by_torch(folder: Path, tool: str) -> None:
    read, path = TOOLS["ours"][tool]
    assert outcome(read, folder / path) == "reads"


@each_folder
def test_a_checkpoint_that_dcp_of_a_version_wrote_is_read_by_ours(folder: Path) -> None:
    read, path = TOOLS["torch's"]["our reader"]
    assert outcome(read, folder / path) == "reads"
