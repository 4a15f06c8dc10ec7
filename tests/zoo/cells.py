"""The cases of the zoo: for the page, one entry differs from the base case; and all pairs of entries.

In a case some processes save, and others resume, with the same wrapper or with another one.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.logged import logged_warnings
from tests.ranks import Ranks
from tests.zoo.extras import EXTRAS
from tests.zoo.models import ALONE, FSDP2, MODELS, PLAIN, WRAPPERS
from tests.zoo.outcome import DIFFERS, EQUAL, NOT_OFFERED, REFUSED, WARNED, Outcome, first_sentence, sentence
from tests.zoo.pairs import covering
from tests.zoo.run import MODES, OPTIMIZERS, Case, Run, quiet
from tests.zoo.schedules import RECIPES
from tests.zoo.snapshot import assembled, difference, of_flat_pieces
from torchtitan_lite.collection import freeze_imported
from torchtitan_lite.errors import CheckpointMismatch, ConfigError, SaveFailed

DEADLINE_SECONDS = 150
SAVED_AT, LAST = 3, 8
CLOSE = 1e-3
"""Relative tolerance of losses on another number of processes, where sums have another order."""

Group = Callable[[int, bool], Ranks]
"""Return a group of ranks for (world size, whether it resumes). Different processes save and resume."""


@dataclass(frozen=True)
class Cell:
    """A case that resumes under the same wrapper, or, with `loaded_under`, under another one."""

    case: Case
    loaded_under: str = ""


SAME = {PLAIN: "1 process", FSDP2: "FSDP2 on 2 ranks"}
ACROSS = {PLAIN: "1 process, then FSDP2 on 2", FSDP2: "FSDP2 on 2, then 1 process"}


def columns(kind: str, entry: str) -> dict[str, Cell]:
    """Return the cells of one row of the page, by column."""
    case = replace(_base(kind, entry), **{kind: entry})
    if kind == "wrapper":
        others = {f"then {under}": Cell(case, under) for under in WRAPPERS[entry].others}
        return {"as it was": Cell(case), **others}
    here = {name: Cell(replace(case, wrapper=wrapper)) for wrapper, name in SAME.items()}
    if kind in ("scheduler", "mode"):
        return here
    there = {
        name: Cell(replace(case, wrapper=wrapper), FSDP2 if wrapper == PLAIN else PLAIN)
        for wrapper, name in ACROSS.items()
    }
    return here | there


KINDS = {
    "optimizer": list(OPTIMIZERS),
    "scheduler": list(RECIPES),
    "model": list(MODELS),
    "wrapper": list(WRAPPERS),
    "extra": list(EXTRAS),
    "mode": list(MODES),
}


def pairs() -> list[Case]:
    """Return cases that combine every two entries; of optimizers, one for each class."""
    classes = {recipe.kind: name for name, recipe in OPTIMIZERS.items()}
    kinds = KINDS | {
        "optimizer": sorted(classes.values(), key=lambda name: not name.startswith("AdamW")),
        "wrapper": [name for name in WRAPPERS if name != "FSDP1"],  # always refused
        "model": [name for name in MODELS if name not in ALONE],
    }

    def case(row: tuple[str, ...]) -> Case:
        return Case(**dict(zip(kinds, row, strict=True)))

    return [case(row) for row in covering(kinds, lambda row: case(row).is_offered)]


def find(cell: Cell, folder: Path, group: Group) -> Outcome:
    """Return the outcome of `cell`, on as many ranks as it needs."""
    case = cell.case
    saved = _on(_ranks_of(group, case, False), "save", folder=folder, case=case)
    if saved.kind != EQUAL:
        return saved
    if not cell.loaded_under:
        return _on(_ranks_of(group, case, True), "resume", folder=folder, case=case)
    then = case.under(cell.loaded_under)
    return _on(_ranks_of(group, then, True), "load", folder=folder, case=then, saved_by=case.world_size)


def _ranks_of(group: Group, case: Case, resumes: bool) -> Ranks:
    """Return the ranks of a case.

    FSDP1 gets new processes: in processes that had run other cases and destroyed their groups, a load ended in a double
    free.
    """
    if case.wrapper.startswith("FSDP1"):
        return Ranks(case.world_size, once=True, deadline_seconds=DEADLINE_SECONDS)
    return group(case.world_size, resumes)


@contextmanager
def groups(deadline_seconds: float = DEADLINE_SECONDS) -> Iterator[Group]:
    """Yield a function that returns groups of ranks, and end them after the block. One rank has no process group."""
    with ExitStack() as stack:
        made: dict[tuple[int, bool], Ranks] = {}

        def group(world_size: int, resumes: bool) -> Ranks:
            which = (world_size, resumes)
            if which not in made:
                made[which] = Ranks(world_size, grouped=world_size > 1, deadline_seconds=deadline_seconds)
                stack.callback(made[which].close)
            return made[which]

        yield group


def _base(kind: str, entry: str) -> Case:
    return Case(model="sparse Embedding") if kind == "optimizer" and entry.startswith("SparseAdam") else Case()


def _on(ranks: Ranks, action: str, **arguments: Any) -> Outcome:
    return Outcome.of_reports(ranks.reports(on_rank, action=action, arguments=arguments))


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
        with logged_warnings() as warned, run.manager(folder) as manager:
            before = run.train(SAVED_AT, manager)
            held, shared = run.snapshot(), _shared(run)
            after = run.train(SAVED_AT + 2, manager)
    except (ConfigError, SaveFailed) as refusal:
        return Outcome(REFUSED, sentence(refusal))
    except Exception as error:
        return Outcome(DIFFERS, f"the save raised {type(error).__name__}: {sentence(error)}")
    different = difference(losses[: SAVED_AT + 2], before + after, "losses of the run that saved")
    if warned and not different:
        return Outcome(WARNED, first_sentence(warned[0]))
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
    """Load the checkpoint that `saved_by` ranks saved, and compare the complete state bit for bit. **Collective**.

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
