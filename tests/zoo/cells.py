"""The cases of the zoo: for the page, one entry differs from the base case; and all pairs of entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.ranks import Ranks, Report
from tests.zoo import outcome
from tests.zoo.extras import EXTRAS
from tests.zoo.models import MODELS
from tests.zoo.outcome import DIFFERS, Outcome
from tests.zoo.pairs import covering
from tests.zoo.run import MODES, OPTIMIZERS, Case
from tests.zoo.schedules import RECIPES
from tests.zoo.wrappers import FSDP2, PLAIN, WRAPPERS

DEADLINE_SECONDS = 150

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
    }

    def case(row: tuple[str, ...]) -> Case:
        return Case(**dict(zip(kinds, row, strict=True)))

    return [case(row) for row in covering(kinds, lambda row: case(row).is_offered)]


def find(cell: Cell, folder: Path, group: Group) -> Outcome:
    """Return the outcome of `cell`, on as many ranks as it needs."""
    case = cell.case
    saved = _on(_ranks_of(group, case, False), "save", folder=folder, case=case)
    if saved.kind != outcome.EQUAL:
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
def groups() -> Iterator[Group]:
    """Yield a function that returns groups of ranks, and end them after the block. One rank has no process group."""
    with ExitStack() as stack:
        made: dict[tuple[int, bool], Ranks] = {}

        def group(world_size: int, resumes: bool) -> Ranks:
            which = (world_size, resumes)
            if which not in made:
                made[which] = Ranks(world_size, grouped=world_size > 1, deadline_seconds=DEADLINE_SECONDS)
                stack.callback(made[which].close)
            return made[which]

        yield group


def _base(kind: str, entry: str) -> Case:
    return Case(model="sparse Embedding") if kind == "optimizer" and entry.startswith("SparseAdam") else Case()


def _on(ranks: Ranks, action: str, **arguments: Any) -> Outcome:
    return joint_outcome(ranks.reports(outcome.on_rank, action=action, arguments=arguments))


def joint_outcome(reports: Sequence[Report]) -> Outcome:
    """Return the outcome of all ranks together."""
    found = [
        Outcome(DIFFERS, f"a rank failed: {report.failure.strip().splitlines()[-1]}")
        if report.failure
        else report.value
        for report in reports
    ]
    return Outcome.of_ranks(found)
