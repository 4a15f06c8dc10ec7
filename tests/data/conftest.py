"""A fixture for tests of loaders that draw from the process's own generators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.data.resumed_loaders import seeded_generators


@pytest.fixture
def seeded() -> Iterator[None]:
    with seeded_generators():
        yield
