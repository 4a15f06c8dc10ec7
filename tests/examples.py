"""How many cases run: of hypothesis' examples a tenth in the fast tests, and half with --all; of a product, a part."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings

THOROUGH, EXHAUSTIVE = "thorough", "exhaustive"
"""The profiles of `./run_tests.sh --all` and `--exhaustive`."""
PARTS = {THOROUGH: 2, EXHAUSTIVE: 1}
FAST_PART = 10


def examples(count: int) -> int:
    """Return `count` with --exhaustive, half of it with --all, else a tenth."""
    return max(1, count // PARTS.get(settings.get_current_profile_name(), FAST_PART))


def mostly_slow(values: Iterable[Any], *, kept: Collection[Any]) -> list[Any]:
    """Return `values` as parameters of which only those in `kept` are for the fast tests."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]


def mostly_exhaustive(values: Iterable[Any], *, kept: Collection[Any]) -> list[Any]:
    """Return `values` as parameters of which only those in `kept` run without --exhaustive."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.exhaustive) for value in values]
