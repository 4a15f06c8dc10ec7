"""The outcome of a case: some processes save, and others resume, with the same wrapper or with another one."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.zoo.run import Case, Run, quiet
from tests.zoo.snapshot import assembled, difference, of_flat_pieces
from torchtitan_lite.collection import freeze_imported
from torchtitan_lite.errors import CheckpointMismatch, ConfigError, SaveFailed

EQUAL, WARNED, REFUSED, NOT_OFFERED, DIFFERS = "equal", "warned", "refused", "not offered by torch", "DIFFERS"
IN_ORDER = (DIFFERS, NOT_OFFERED, REFUSED, WARNED, EQUAL)
SAVED_AT, LAST = 3, 8
CLOSE = 1e-3
"""Relative tolerance of losses on another number of processes, where sums have another order."""


@dataclass(frozen=True)
class Outcome:
    """One of the kinds, and the sentence that gives its reason."""

    kind: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}" if self.why else self.kind

    @staticmethod
    def of_ranks(outcomes: Sequence[Outcome]) -> Outcome:
        """Return the outcome of all ranks together: equal only if every rank found it equal. One rank warns for all."""
        kinds = {outcome.kind for outcome in outcomes}
        worst = min(outcomes, key=lambda outcome: IN_ORDER.index(outcome.kind))
        if len(kinds) > 1 and worst.kind not in (DIFFERS, WARNED):
            return Outcome(DIFFERS, "; ".join(f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes)))
        return worst


def on_rank(rank: int, action: str, arguments: dict[str, Any]) -> Outcome:
    """Return the outcome of `save`, `resume` or `load` in this process. **Collective**."""
    _freeze()
    gc.collect()  # Ends the threads of the process groups that the managers of the last case made.
    found: Outcome = {"save": save, "resume": resume, "load": load}[action](rank, **arguments)
    return found


@cache
def _freeze() -> None:
    """Exclude torch's objects from garbage collection: a load collects twice, half of the time of a small case."""
    freeze_imported()


def save(rank: int, folder: Path, case: Case) -> Outcome:
    """Train eight steps; in a second run train five, with a save at the third. **Collective**.

    Each rank writes the states of both runs to a file.
    """
    try:
        straight = Run(case, rank, seed=0)
        losses = straight.train(LAST)
        end = straight.snapshot()  # Before the second run: both use the generators of this process.
    except Exception as error:
        return Outcome(NOT_OFFERED, first_sentence(error))
    try:
        run = Run(case, rank, seed=0)
        with run.manager(folder) as manager:
            before = run.train(SAVED_AT, manager)
            held, shared = run.snapshot(), _shared(run)
            after = run.train(SAVED_AT + 2, manager)
    except (ConfigError, SaveFailed) as refusal:
        return Outcome(REFUSED, sentence(refusal))
    except Exception as error:
        return Outcome(DIFFERS, f"the save raised {type(error).__name__}: {sentence(error)}")
    different = difference(losses[: SAVED_AT + 2], before + after, "losses of the run that saved")
    of_the_two = {"losses": losses[SAVED_AT:], "end": end, "held": held, "shared": shared}
    torch.save(of_the_two, folder / f"held-{rank}.pt")
    return Outcome(DIFFERS, different) if different else Outcome(EQUAL)


def resume(rank: int, folder: Path, case: Case) -> Outcome:
    """Load the checkpoint of `save` in another process, train five steps and compare with its eight. **Collective**."""
    expected = torch.load(folder / f"held-{rank}.pt", weights_only=False)
    try:
        again = Run(case, rank, seed=1)
        with again.manager(folder, load_only=True, digest_tensors=("load",)) as manager:
            if not manager.load() or manager.loaded_step != SAVED_AT:
                return Outcome(DIFFERS, f"nothing of step {SAVED_AT} was loaded")
        different = difference(expected["held"], again.snapshot(), "after the load")
        again.step = SAVED_AT
        resumed = [] if different else again.train(LAST)
    except Exception as error:
        return Outcome(DIFFERS, f"the resume raised {type(error).__name__}: {sentence(error)}")
    different = different or difference(expected["losses"], resumed, "losses")
    different = different or difference(expected["end"], again.snapshot(), "at the end")
    return Outcome(DIFFERS, different) if different else Outcome(EQUAL)


def load(rank: int, folder: Path, case: Case, saved_by: int) -> Outcome:
    """Load the checkpoint that `saved_by` ranks saved, and compare the whole state bit for bit. **Collective**.

    The losses of the next steps must be close.
    """
    try:
        Run(case, rank, seed=0).train(LAST)
    except Exception as error:
        return Outcome(NOT_OFFERED, first_sentence(error))
    again = Run(case, rank, seed=1)
    fresh = again.snapshot()
    try:
        with again.manager(folder, load_only=True, digest_tensors=("load",)) as manager:
            if not manager.load():
                return Outcome(DIFFERS, "nothing was loaded")
        again.step = SAVED_AT
        held = [torch.load(folder / f"held-{each}.pt", weights_only=False) for each in range(saved_by)]
        different = difference(assembled([each["shared"] for each in held]), _shared(again), "after the load")
        losses = again.train(LAST)
        if case.model != "Dropout":  # Each rank has its own dropout.
            different = different or _apart(held[0]["losses"], losses)
    except (ConfigError, CheckpointMismatch) as refusal:  # The ranks that saved cannot know what other ranks need.
        trained = ("model", "optimizer")
        now = again.snapshot()
        touched = difference([fresh[key] for key in trained], [now[key] for key in trained], "after the refusal")
        return Outcome(DIFFERS, touched) if touched else Outcome(REFUSED, sentence(refusal))
    except Exception as error:
        return Outcome(DIFFERS, f"the resume raised {type(error).__name__}: {sentence(error)}")
    return Outcome(DIFFERS, different) if different else Outcome(EQUAL)


def _shared(run: Run) -> dict[str, Any]:
    """Return the part of the state that does not depend on the topology."""
    snapshot = run.snapshot()
    if isinstance(run.module, FullyShardedDataParallel):
        with quiet():
            parameters, states = of_flat_pieces(run.module, snapshot)
        snapshot["model"]["parameters"], snapshot["optimizer"]["state"] = parameters, states
    snapshot["extra"].pop("mine", None)
    return {key: value for key, value in snapshot.items() if key not in ("all buffers", "random")}


def _apart(expected: list[float], found: list[float]) -> str:
    is_close = all(math.isclose(*pair, rel_tol=CLOSE, abs_tol=1e-6) for pair in zip(expected, found, strict=True))
    return "" if is_close else f"losses: expected {expected}, found {found}"


def first_sentence(error: BaseException | str) -> str:
    """Return the first sentence of a message."""
    return re.split(r"(?<=\.) ", sentence(error), maxsplit=1)[0]


def sentence(error: BaseException | str) -> str:
    """Return a message in one line of at most 400 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:397]}..."
