"""What a soak does to a run, drawn from its seed: plain values. Equal seeds give equal draws."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

TOPOLOGIES: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "1": (1, 1, ()),
    "FSDP 2": (2, 2, ()),
    "DDP 2": (2, 2, ("data_parallel_replicate_degree=2", "data_parallel_shard_degree=1")),
    "TP 2": (2, 1, ("tensor_parallel_degree=2",)),
    "PP 2": (2, 1, ("pipeline_parallel_degree=2",)),
    "HSDP 2 x 2": (4, 4, ("data_parallel_replicate_degree=2",)),
}
"""Ranks, shares of a batch, and keys of [parallelism]."""
POISONED = ((), (), (37,), (37, 90))
"""Batches of a run whose loss is NaN."""
MODES = ("disabled", "async", "async_with_pinned_mem")
INTERVALS: tuple[dict[str, Any], ...] = (
    {"interval": 3},
    {"interval": 7},
    {"interval": 10},
    {"interval": 40, "or_every_seconds": 0.4},
    {"interval_type": "seconds", "interval": 1},
)
MOST_STARTS = 10
LASTING = {"full disk": (1.0, 6.0), "slow store": (2.0, 6.0), "hanging store": (2.0, 8.0)}
"""Seconds of what takes a while, besides stops."""
STOPS = ("stop rank", "stop helper", "stop keeper")
SECONDS_OF_STOP, CHANCE_OF_A_MINUTE = (0.5, 6.0), 0.05
IN_A_START = {
    **{"stop rank": 3, "stop helper": 2, "stop keeper": 1, "kill helper": 3, "kill keeper": 2, "full disk": 5},
    **{"slow store": 4, "hanging store": 4, "damage latest": 2, "damage one": 1, "remove latest": 2, "remove one": 1},
}
"""What may happen while ranks train, and how often it is drawn."""
ENDS = {"kill rank": 3, "kill ranks": 4, "kill torchrun": 2, "SIGTERM": 2, "SIGTERM to a rank": 1, "fault": 3, "": 1}
"""How a start is ended, and how often; empty: by nothing."""
BETWEEN = {
    **{"damage latest": 2, "damage one": 1, "remove latest": 2, "remove one": 1, "kill keeper": 1, "move folder": 2},
    **{"lose disk": 2, "change options": 4, "change topology": 3},
}
"""What may happen between two starts, and how often."""
POINTS = ("save", "plan", "open", "write", "fsync", "metadata", "manifest", "seal", "commit", "committed", "purge")
POINTS += ("load", "listing", "read", "lease", "heartbeat", "step", "stage")
KINDS_OF_FAULT = ("kill@{}:rank={},after={}",) * 4 + ("slow@{}:rank={},after={},seconds=1",)
ERRORS = ("EIO@write:rank={},after={}", "ENOSPC@open:rank={},after={}", "tear@write:rank={},after={}")


@dataclass(frozen=True)
class Happening:
    """Something that is done to a start while it runs."""

    kind: str
    steps: int
    """After how many more trained steps of any rank."""
    delay: float
    """Seconds after that."""
    which: float
    """From 0 to 1: where there is a choice."""
    seconds: float = 0.0
    """How long it lasts."""


@dataclass(frozen=True)
class Options:
    """The keys of [checkpoint] that may change between starts, and the rest of a start's choices."""

    mode: str
    interval: dict[str, Any] = field(hash=False)
    latest: int
    every: int
    best: int
    memory_interval: int
    uploads: str
    """`folder`, `bucket` or empty."""

    def keys(self) -> dict[str, Any]:
        """Return the keys, without those of the uploads."""
        return {
            **{"async_mode": self.mode, **self.interval, "keep_latest_k": self.latest},
            **{"keep_every_n_steps": self.every, "keep_best_k": self.best, "memory_interval": self.memory_interval},
        }


@dataclass(frozen=True)
class Start:
    """One start: what comes before it, and what happens to it."""

    before: tuple[tuple[str, float], ...]
    """What happens to the folder and the memory, each with a number from 0 to 1."""
    topology: str
    options: Options
    happenings: tuple[Happening, ...]
    fault: str
    """For the variable of faults."""
    restarts: int
    """That torchrun may make itself."""


@dataclass(frozen=True)
class Life:
    """A run from its first start to its last step."""

    seed: str
    topologies: tuple[str, ...]
    """More than one: sums are taken in another order after a change, so losses are compared with a tolerance."""
    poisoned: tuple[int, ...]
    hang_seconds: int
    digests: str
    starts: tuple[Start, ...]


def draw(seed: str) -> Life:
    """Return the life of `seed`."""
    drawn = random.Random(seed)
    names = list(TOPOLOGIES)
    changes = drawn.random() < 0.4
    topologies = tuple(drawn.sample(names, drawn.randint(2, 4))) if changes else (drawn.choice(names[:-1]),)
    poisoned = drawn.choice(POISONED)
    options, topology = _options(drawn, changes=1.0), topologies[0]
    starts: list[Start] = []
    for number in range(drawn.randint(4, MOST_STARTS)):
        before: list[tuple[str, float]] = []
        if number:
            count = drawn.choices((0, 1, 2, 3), (2, 4, 2, 1))[0]
            before = [(_of(drawn, BETWEEN), drawn.random()) for _ in range(count)]
        if any(kind == "change options" for kind, _ in before):
            options = _options(drawn, options, 0.5)
        if any(kind == "change topology" for kind, _ in before):
            topology = drawn.choice(topologies)
        starts.append(_start(drawn, tuple(before), topology, options))
    hang_seconds, digests = drawn.choice((0, 0, 5)), drawn.choice(("save", "save,load"))
    return Life(seed, topologies, poisoned, hang_seconds, digests, tuple(starts))


def _options(drawn: random.Random, last: Options | None = None, changes: float = 1.0) -> Options:
    def one(name: str, values: Any) -> Any:
        chosen = drawn.choice(values)
        return chosen if last is None or drawn.random() < changes else getattr(last, name)

    mode = one("mode", MODES)
    memory = one("memory_interval", (0, 0, 1, 4))
    return Options(
        mode=mode,
        interval=one("interval", INTERVALS),
        latest=one("latest", (0, 1, 2, 3)),
        every=one("every", (0, 0, 20)),
        best=one("best", (0, 0, 1)),
        memory_interval=0 if mode == "disabled" else memory,
        uploads=one("uploads", ("", "folder", "bucket", "bucket")),
    )


def _start(drawn: random.Random, before: tuple[tuple[str, float], ...], topology: str, options: Options) -> Start:
    happenings = [_happening(drawn, _of(drawn, IN_A_START)) for _ in range(drawn.randint(1, 5))]
    end = _of(drawn, ENDS)
    ranks = TOPOLOGIES[topology][0]
    fault = ""
    if end == "fault":
        fault = drawn.choice(KINDS_OF_FAULT).format(drawn.choice(POINTS), drawn.randrange(ranks), drawn.randint(0, 6))
    elif end:
        happenings.append(_happening(drawn, end))
    if drawn.random() < 0.15:
        more = drawn.choice(ERRORS).format(drawn.randrange(ranks), drawn.randint(0, 3))
        fault = f"{fault};{more}" if fault else more
    return Start(before, topology, options, tuple(happenings), fault, drawn.choice((0, 0, 2)))


def _happening(drawn: random.Random, kind: str) -> Happening:
    seconds = 0.0
    if kind in STOPS:
        seconds = 60.0 if drawn.random() < CHANCE_OF_A_MINUTE else drawn.uniform(*SECONDS_OF_STOP)
    elif kind in LASTING:
        seconds = drawn.uniform(*LASTING[kind])
    # Every tenth comes while the start is still starting.
    steps = 0 if drawn.random() < 0.1 else drawn.randint(1, 10)
    return Happening(kind, steps, round(drawn.uniform(0, 0.1), 3), int(1000 * drawn.random()) / 1000, round(seconds, 2))


def _of(drawn: random.Random, weights: dict[str, int]) -> str:
    return drawn.choices(list(weights), list(weights.values()))[0]
