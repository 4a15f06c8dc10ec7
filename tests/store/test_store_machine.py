"""A folder on a disk over its complete life, with kills, power cuts and errors at any operation."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.examples import examples
from tests.store.disk_backend import DiskBackend
from tests.store.life import Life, live


class LifeOnDisk(Life):
    @initialize(exchanges=st.booleans(), crowded=st.booleans())
    def first(self, exchanges: bool, crowded: bool) -> None:
        backend = DiskBackend(exchanges=exchanges)
        if crowded:
            backend.crowd()
        self.begin(backend)


@pytest.mark.promise("A checkpoint that was reported as saved survives every later crash.", section="crash")
def test_every_acknowledged_save_loads_whatever_happens(caplog: pytest.LogCaptureFixture) -> None:
    live(LifeOnDisk, examples(500), caplog)
