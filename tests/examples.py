"""How many examples hypothesis draws: a fifth of them in the fast tests, all of them with --all."""

from __future__ import annotations

from hypothesis import settings

THOROUGH = "thorough"
"""The profile of `./run_tests.sh --all`."""
FAST_PART = 5


def examples(count: int) -> int:
    """Return `count` under the thorough profile, else a fifth of it."""
    return count if settings.get_current_profile_name() == THOROUGH else max(1, count // FAST_PART)
