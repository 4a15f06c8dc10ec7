"""How many cases run: a tenth of hypothesis' examples in the fast tests; of a product, a part with --all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings

THOROUGH = "thorough"
"""The profile of `./run_tests.sh --all`."""
FAST_PART = 10


def examples(count: int) -> int:
    """Return `count` under the thorough profile, else a tenth of it."""
    return count if settings.get_current_profile_name() == THOROUGH else max(1, count // FAST_PART)


def mostly_slow(values: Iterable[Any], *, kept: Collection[Any]) -> list[Any]:
    """Return `values` as parameters of which only those in `kept` are for the fast tests."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]


def mostly_exhaustive(values: Iterable[Any], *, kept: Collection[Any]) -> list[Any]:
    """Return `values` as parameters of which only those in `kept` run without --exhaustive."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.exhaustive) for value in values]
