"""A run that is drawn from a seed, as a plain value: its configuration, its starts, and what befalls each of them.

Equal seeds give equal runs. Moments are random parts of a step, so two executions of one are not cut at the same
instruction; all else is the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

MODES = ("disabled", "async", "async", "async_with_pinned_mem", "async_with_pinned_mem")
INTERVALS: tuple[dict[str, Any], ...] = (
    {"interval": 3},
    {"interval": 7},
    {"interval": 100, "or_every_seconds": 0.1},
    {"interval_type": "seconds", "interval": 1},
    {"interval_type": "none", "or_every_seconds": 0.05},
    {"interval_type": "none", "at_steps": tuple(range(2, 400, 9))},
    {"interval_type": "auto", "max_lost_seconds": 0.3},
)
MEMORY_INTERVALS = (0, 1, 1, 2, 5)
KEPT = (0, 1, 2, 3)
WIDTHS = (16, 512)
"""Of the model: its files have 0.2 MB and 6 MB."""
ENDS = {
    "rank": 3,  # SIGKILL to one rank; the others get SIGTERM, as from torchrun, and soon SIGKILL.
    "ranks": 3,  # SIGKILL to all ranks at once.
    "keeper, then ranks": 1,
    "keeper and ranks": 1,
    "error": 1,  # The last rank raises an error.
    "signal": 1,  # SIGTERM to all ranks, which save and leave.
}
"""How a start may end, and how often it does."""
BETWEEN = ("delete latest", "delete one", "damage latest", "damage one", "damage image", "kill keeper")
"""What may happen to the disk and to the memory between two starts."""
LOADS = {
    "latest": 14,
    "load_step": 2,  # The key: it names a committed step.
    "load_step, new_branch": 1,
    "load(step)": 1,  # The argument of the manager's method.
    "the same": 2,  # The command of the start before.
}
"""Which step a start wants, and how often."""
MOST_STEPS = 12
LONGEST_MOMENT = 0.06
"""In seconds; longer than a step takes."""


@dataclass(frozen=True)
class Leg:
    """One start of a run: from its launch to its end, and what happens before the next one."""

    ranks: int
    load: str
    steps: int
    """How many steps it trains before its end; 0: it ends while it starts, or trains its first one."""
    moment: float
    """How many seconds later the end comes."""
    end: str
    between: tuple[str, ...]
    places: tuple[float, ...]
    """Where there is a choice: numbers from 0 to 1, used in turn."""


@dataclass(frozen=True)
class DrawnRun:
    """A run: its keys of [checkpoint], the size of its model, and its starts. After the last one it is finished."""

    seed: int
    keys: dict[str, Any] = field(hash=False)
    width: int
    legs: tuple[Leg, ...]
    last_ranks: int
    """The number of ranks of the start that finishes it."""

    @property
    def keeps_ranks(self) -> bool:
        """Return whether all starts have the same number of ranks."""
        return {leg.ranks for leg in self.legs} == {self.last_ranks}

    @property
    def dropout(self) -> float:
        """Return the model's: where ranks change, new generators begin, and losses with dropout have no reference."""
        return 0.1 if self.keeps_ranks else 0.0


def draw(seed: int, *, ranks: tuple[int, ...] = (1, 2), most_legs: int = 5) -> DrawnRun:
    """Return the run of `seed`."""
    drawn = random.Random(seed)
    keys: dict[str, Any] = {"async_mode": drawn.choice(MODES), **drawn.choice(INTERVALS)}
    keys["keep_latest_k"] = drawn.choice(KEPT)
    if keys["async_mode"] != "disabled":
        keys["memory_interval"] = drawn.choice(MEMORY_INTERVALS)
    changes_ranks = drawn.random() < 0.3
    first_ranks = drawn.choice(ranks)
    of_legs = [drawn.choice(ranks) if changes_ranks else first_ranks for _ in range(drawn.randint(2, most_legs) + 1)]
    legs = tuple(_draw_leg(drawn, count) for count in of_legs[:-1])
    return DrawnRun(seed, keys, drawn.choice(WIDTHS), legs, of_legs[-1])


def _draw_leg(drawn: random.Random, ranks: int) -> Leg:
    return Leg(
        ranks=ranks,
        load=drawn.choices(list(LOADS), list(LOADS.values()))[0],
        steps=0 if drawn.random() < 0.15 else drawn.randint(1, MOST_STEPS),
        moment=drawn.uniform(0.0, LONGEST_MOMENT),
        end=drawn.choices(list(ENDS), list(ENDS.values()))[0],
        between=tuple(drawn.sample(BETWEEN, drawn.choices((0, 1, 2), (5, 4, 1))[0])),
        places=tuple(round(drawn.random(), 3) for _ in range(6)),
    )
