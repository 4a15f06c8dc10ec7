"""A fixture for tests of uploads: the folder that they go to."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return tmp_path / "other"
