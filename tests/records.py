"""What tests of drawn kills and losses drew, and what came of it: kept in .pytest_cache/d/records after the run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Record = Callable[..., None]


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """Append a line of JSON to the file of this test; the runs before it stay in it."""
    path = Path(request.config.cache.mkdir("records")) / f"{request.node.name}.jsonl"

    def append(**what: Any) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": time.strftime("%Y-%m-%dT%H:%M:%S"), **what}) + "\n")

    return append
