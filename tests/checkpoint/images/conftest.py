"""A fixture of the tests of images: no run of one stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoint.images.image_runs import close_runs
from torchtitan_lite import faults


@pytest.fixture(autouse=True)
def _no_run_stays() -> Iterator[None]:
    yield
    faults.install("", rank=0)
    close_runs()
