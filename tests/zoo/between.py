"""The cells between ranks: a trick, saved in a mode, resumed from disk or from memory by other processes.

Those of other libraries are like them: a class of a package in place of a trick, if it trains without a checkpoint.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.checkpoint.companions import kept
from tests.logged import logged_warnings
from tests.ranks import Ranks
from tests.zoo.apart import APART, LATE, POSITIONS, last_rank
from tests.zoo.library_runs import LibraryRun
from tests.zoo.outcome import DIFFERS, EQUAL, NOT_OFFERED_THERE, REFUSED, WARNED, Outcome, first_sentence, sentence
from tests.zoo.run import MODES, quiet
from tests.zoo.snapshot import difference, in_pieces
from tests.zoo.tricks import TRICKS, Trick
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.errors import ConfigError, RanksDiffer, SaveFailed

SAVED_AT, SAVED_AGAIN, LAST = 3, 6, 8
ALL: dict[str, type[Trick]] = TRICKS | APART | LATE
FROM_MEMORY = [f"{mode}, from memory" for mode in MODES if mode != "disabled"]
COLUMNS = [*MODES, *FROM_MEMORY]
COLUMNS_OF_LIBRARIES = {
    "1 process": (1, "async"),
    "1 process, from memory": (1, "async, from memory"),
    "FSDP2 on 2 ranks": (2, "async"),
    "FSDP2 on 2 ranks, from memory": (2, "async, from memory"),
}
"""By the name of each, the number of ranks and the column."""
Group = Callable[[int, bool], Ranks]


@dataclass(frozen=True)
class RanksCell:
    """A trick of `ALL` in a column of the page, on `world_size` ranks; of a `package`, one of its classes."""

    trick: str
    column: str
    world_size: int
    positions: tuple[int, ...] = ()
    """Of a trick of `LATE`, the tensors that differ, one after another."""
    package: str = ""

    @property
    def mode(self) -> str:
        return self.column.partition(",")[0]

    @property
    def is_from_memory(self) -> bool:
        return self.column in FROM_MEMORY

    @property
    def gets_lowest(self) -> bool:
        return not self.package and ALL[self.trick].gets_lowest

    def run(self, rank: int, seed: int) -> Trick:
        """Return a run of this cell on `rank`. **Collective**."""
        return LibraryRun(self.package, self.trick, rank, seed) if self.package else ALL[self.trick](rank, seed)


def cells_between(
    world_sizes: tuple[int, ...] = (2, 4), positions: Sequence[int] = range(POSITIONS)
) -> list[RanksCell]:
    """Return all cells; those of HSDP need four ranks. Each of the `positions` is in one of the cells of a trick."""
    every = [(column, world_size) for column in COLUMNS for world_size in world_sizes]
    return [
        RanksCell(trick, column, world_size, (*positions[at :: len(every)],) if trick in LATE else ())
        for trick in ALL
        for at, (column, world_size) in enumerate(every)
        if world_size == 4 or not trick.startswith("HSDP")
    ]


def rows_between(outcomes: Mapping[RanksCell, Outcome]) -> dict[str, dict[str, Outcome]]:
    """Return the rows of the page: one outcome a column, or if numbers of ranks differ in it, a sentence with both."""
    rows: dict[str, dict[str, Outcome]] = {}
    for cell, outcome in outcomes.items():
        row = rows.setdefault(cell.trick, {})
        before = row.setdefault(cell.column, outcome)
        if before.kind != outcome.kind:
            row[cell.column] = Outcome(DIFFERS, f"{before.kind} on fewer ranks than {cell.world_size}, {outcome.kind}")
    return rows


def find_between(cell: RanksCell, folder: Path, group: Group) -> Outcome:
    """Return the outcome of `cell`."""
    runtime = tempfile.mkdtemp(prefix="ttl-", dir="/tmp")  # The path of a socket must be short.
    arguments = {"cell": cell, "folder": folder, "runtime": runtime}
    try:
        saves = differ_late if cell.trick in LATE else save_between
        outcome = Outcome.of_reports(group(cell.world_size, False).reports(saves, **arguments))
        # Each start is in other processes than the one before.
        for loaded in (SAVED_AT, SAVED_AGAIN) if not cell.gets_lowest else (SAVED_AT,):
            if outcome.kind == EQUAL:
                ranks = group(cell.world_size, loaded == SAVED_AT)
                outcome = Outcome.of_reports(ranks.reports(resume_between, loaded=loaded, **arguments))
        return outcome
    finally:
        shutil.rmtree(runtime)  # Ends the keepers.


def find_entry(package: str, name: str, folder: Path, group: Group) -> dict[str, Outcome]:
    """Return the outcome of each of `COLUMNS_OF_LIBRARIES` for the class `name` of an installed package."""
    found: dict[str, Outcome] = {}
    offered: dict[int, Outcome] = {}
    for column, (world_size, in_mode) in COLUMNS_OF_LIBRARIES.items():
        cell = RanksCell(name, in_mode, world_size, package=package)
        if world_size not in offered:
            reports = group(world_size, False).reports(train_alone, cell=cell)
            failed = [Outcome(NOT_OFFERED_THERE, _last_line(each.failure)) for each in reports if each.failure]
            raised = [each.value for each in reports if not each.failure and each.value.kind != EQUAL]
            offered[world_size] = [*raised, *failed, Outcome(EQUAL)][0]
        found[column] = offered[world_size]
        if found[column].kind == EQUAL:
            within = folder / str(len(found))
            within.mkdir()
            found[column] = find_between(cell, within, group)
    return found


def train_alone(rank: int, cell: RanksCell) -> Outcome:
    """Train twice without any checkpoint; return whether the library can, and both are equal. **Collective**."""
    losses, why = [], ""
    with quiet():
        for _ in range(2):
            try:
                run = cell.run(rank, 0)
                trained = [each for each in run.module.parameters() if each.requires_grad]
                before = in_pieces(trained)
                losses.append([run.step(number, lambda: None) for number in range(1, LAST + 1)])
                why = why or ("" if difference(before, in_pieces(trained)) else "its steps change no parameter")
                run.contents()
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1].line
                said = first_sentence(error) if str(error) else f"{type(error).__name__}: {where}"
                return Outcome(NOT_OFFERED_THERE, said)
    if repr(losses[0]) != repr(losses[1]):
        why = "two runs differ without any checkpoint"
    return Outcome(NOT_OFFERED_THERE, why) if why else Outcome(EQUAL)


def _last_line(failure: str) -> str:
    line = failure.strip().splitlines()[-1].partition("; its stderr says")[0]
    return first_sentence(f"a rank {line}" if line.startswith(("came to no end", "ended with")) else line)


def differ_late(rank: int, cell: RanksCell, folder: Path, runtime: str) -> Outcome:
    """Save equal states, then others, for each position; return the outcome of the last. **Collective**."""
    with quiet():
        run = LATE[cell.trick](rank, 0)
        run.step(1, lambda: None)
    outcome = Outcome(EQUAL)
    for position in cell.positions:
        tensor = run.at(position)
        before = tensor.clone()

        def change(number: int, manager: CheckpointManager, tensor: Tensor = tensor) -> None:
            manager.maybe_wait_for_staging()
            tensor.add_(int(number == SAVED_AGAIN and rank == last_rank()))

        outcomes: list[Any] = [None] * cell.world_size
        own = _outcome_of(run, cell, folder / str(position), runtime, SAVED_AGAIN, change)
        dist.all_gather_object(outcomes, own)
        outcome = Outcome.of_ranks(outcomes)
        tensor.copy_(before)
        if outcome.kind not in (REFUSED, WARNED):
            return Outcome(DIFFERS, f"position {position}: {outcome}")
    return outcome


def save_between(rank: int, cell: RanksCell, folder: Path, runtime: str) -> Outcome:
    """Train eight steps without a save; in a second run five, with a save or an image at the third. **Collective**."""
    held: dict[int, Any] = {}
    with quiet():
        straight = cell.run(rank, 0)
        losses = []
        for number in range(1, LAST + 1):
            losses.append(straight.step(number, lambda: None))
            held |= {number: snapshot(straight)} if number in (SAVED_AGAIN, LAST) else {}
        run = cell.run(rank, 0)

    def train(number: int, manager: CheckpointManager) -> None:
        run.step(number, manager.maybe_wait_for_staging)
        held.update({number: snapshot(run)} if number == SAVED_AT else {})

    outcome = _outcome_of(run, cell, folder, runtime, SAVED_AT + 2, train)
    torch.save({"losses": losses, "held": held}, folder / f"held-{rank}.pt")
    return outcome


def _outcome_of(
    run: Trick, cell: RanksCell, folder: Path, runtime: str, last: int, train: Callable[[int, CheckpointManager], None]
) -> Outcome:
    """Return what becomes of saves of `run` to step `last`, before each of which `train` is called."""
    with logged_warnings() as warned, _memory_in(runtime, cell), quiet():
        try:
            with _manager(run, cell, folder) as manager:
                manager.load()
                manager.reset()
                for number in range(1, last + 1):
                    train(number, manager)
                    manager.save(number)
                    _finish_images(manager)
        except (ConfigError, RanksDiffer, SaveFailed) as refusal:
            return Outcome(REFUSED, first_sentence(refusal))
        except Exception as error:
            return Outcome(DIFFERS, f"the save raised {type(error).__name__}: {sentence(error)}")
    return Outcome(WARNED, first_sentence(warned[0])) if warned else Outcome(EQUAL)


def resume_between(rank: int, cell: RanksCell, folder: Path, runtime: str, loaded: int) -> Outcome:
    """Load step `loaded`, train to the end, and compare with the run that never stopped. **Collective**.

    The first time it saves, too, for the next start.
    """
    expected = torch.load(folder / f"held-{0 if cell.gets_lowest else rank}.pt", weights_only=False)
    with logged_warnings() as warned, _memory_in(runtime, cell), quiet():
        try:
            again = cell.run(rank, 1)
            again.warm_up()
            with _manager(again, cell, folder) as manager:
                if not manager.load() or manager.loaded_step != loaded:
                    return Outcome(DIFFERS, f"step {loaded} was not loaded but {manager.loaded_step}")
                manager.reset()
                is_image = manager._maker.origin.memory_step >= 0
                different = difference(expected["held"][loaded], snapshot(again), "after the load")
                resumed = []
                for number in range(loaded + 1, LAST + 1) if not different and not cell.gets_lowest else ():
                    resumed.append(again.step(number, manager.maybe_wait_for_staging))
                    if loaded == SAVED_AT:
                        manager.save(number)
                        _finish_images(manager)
            if resumed:
                different = difference(expected["losses"][loaded:], resumed, "losses")
                different = different or difference(expected["held"][LAST], snapshot(again), "at the end")
        except Exception as error:
            return Outcome(DIFFERS, f"the resume from {loaded} raised {type(error).__name__}: {sentence(error)}")
    if is_image != cell.is_from_memory:
        different = different or f"loaded from memory: {is_image}"
    if warned:
        different = different or f"warned although it is equal: {warned[0]}"
    return Outcome(DIFFERS, f"start from {loaded}: {different}") if different else Outcome(EQUAL)


def snapshot(run: Trick) -> dict[str, Any]:
    """Return a copy of what a resume must restore on this rank."""
    copied: dict[str, Any] = in_pieces(run.contents())
    return copied


def _finish_images(manager: CheckpointManager) -> None:
    """Wait until the next image finds an arena, and the last one is complete: a start in haste skips some."""
    if (found := kept(manager)) is not None:
        found.stager.finish_preparation()
        manager.maybe_wait_for_staging()
        assert found.marker.wait(60)


def _manager(run: Trick, cell: RanksCell, folder: Path) -> CheckpointManager:
    interval = {"interval": 1000, "memory_interval": SAVED_AT} if cell.is_from_memory else {"interval": SAVED_AT}
    return CheckpointManager.for_loop(
        model=run.module,
        optimizer=run.optimizers,
        states=run.states,
        folder=folder / "checkpoint",
        async_mode=cell.mode,
        memory_ttl_seconds=60,
        **(interval | run.options),
    )


@contextmanager
def _memory_in(runtime: str, cell: RanksCell) -> Iterator[None]:
    """Turn the memory tier of this rank on for a cell that is about it, else off."""
    before = {name: os.environ.get(name, "") for name in ("TORCHTITAN_LITE_MEMORY", "XDG_RUNTIME_DIR")}
    os.environ.update({"TORCHTITAN_LITE_MEMORY": "on" if cell.is_from_memory else "off", "XDG_RUNTIME_DIR": runtime})
    try:
        yield
    finally:
        os.environ.update(before)
