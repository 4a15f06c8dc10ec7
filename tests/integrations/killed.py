"""A run of another library's trainer that is killed, perhaps several times, and then ends."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Protocol, TypeVar

Kill = Mapping[str, Any]
"""The options of a run that have it kill itself."""
Losses = Counter[tuple[str, int, str]]


class Ended(Protocol):
    """What is looked at of `tests.integrations.served.Ended`."""

    @property
    def output(self) -> str: ...

    @property
    def codes(self) -> list[int]: ...

    @property
    def losses(self) -> Losses: ...


AnyEnded = TypeVar("AnyEnded", bound=Ended)


def twice(draw: random.Random, first: int, last: int) -> list[int]:
    """Draw the steps or batches at which a run is killed and its successor, which gets further, is killed again."""
    return sorted(draw.sample(range(first, last + 1), 2))


def run_until_it_ends(
    kills: Sequence[Kill], run: Callable[..., AnyEnded], folder: Path, ranks: int, **options: Any
) -> list[AnyEnded]:
    """Call `run`, a server's, with each of `kills`, then without one; return what each has returned.

    A rank may fail because another one is killed first.
    """
    runs = []
    for number, kill in enumerate(kills):
        log = folder.with_suffix(f".killed-{number}.log")
        runs.append(run(log, ranks, folder=folder, **options, **kill))
        assert -signal.SIGKILL in runs[-1].codes and 0 not in runs[-1].codes, f"{kill}: {runs[-1].output}"
    runs.append(run(folder.with_suffix(".ended.log"), ranks, folder=folder, **options))
    assert runs[-1].codes == [0] * ranks, f"{kills}: {runs[-1].output}"
    return runs


def all_losses(runs: Sequence[Ended]) -> Losses:
    """Return the losses of all `runs`, one that several have only once."""
    return reduce(or_, (each.losses for each in runs))
