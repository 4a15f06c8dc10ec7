"""How many examples hypothesis draws: a part of them in the fast tier, all of them in the slow one."""

from __future__ import annotations

from hypothesis import settings

THOROUGH = "thorough"
"""The profile of `./run_tests.sh --all`."""
FAST_PART = 5


def examples(count: int) -> int:
    """Return `count` under the thorough profile, else a fifth of it."""
    return count if settings.get_current_profile_name() == THOROUGH else max(1, count // FAST_PART)
