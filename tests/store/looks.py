"""Which manifests a process parses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.store import known_manifests


def parsed_from_now_on(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the folders whose manifests are parsed from now on, in order."""
    parsed: list[Path] = []
    look_into = known_manifests._look_into

    def noted(folder: Path, *given: Any) -> Any:
        parsed.append(folder)
        return look_into(folder, *given)

    monkeypatch.setattr(known_manifests, "_look_into", noted)
    return parsed
