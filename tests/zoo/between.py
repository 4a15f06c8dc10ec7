"""The cells between ranks: a trick, saved in a mode, resumed from disk or from memory by other processes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.logged import logged_warnings
from tests.ranks import Ranks
from tests.zoo.outcome import DIFFERS, EQUAL, REFUSED, WARNED, Outcome, first_sentence, sentence
from tests.zoo.run import MODES, quiet
from tests.zoo.snapshot import difference, in_pieces
from tests.zoo.tricks import TRICKS, Trick
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.errors import ConfigError, RanksDiffer

SAVED_AT, LAST = 3, 8
FROM_MEMORY = [f"{mode}, from memory" for mode in MODES if mode != "disabled"]
COLUMNS = [*MODES, *FROM_MEMORY]


@dataclass(frozen=True)
class RanksCell:
    """A trick of `TRICKS` in a column of the page, on `world_size` ranks."""

    trick: str
    column: str
    world_size: int

    @property
    def mode(self) -> str:
        return self.column.partition(",")[0]

    @property
    def is_from_memory(self) -> bool:
        return self.column in FROM_MEMORY


def cells_between(world_sizes: tuple[int, ...] = (2, 4)) -> list[RanksCell]:
    """Return all cells; those of HSDP need four ranks."""
    return [
        RanksCell(trick, column, world_size)
        for trick in TRICKS
        for column in COLUMNS
        for world_size in world_sizes
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


def find_between(cell: RanksCell, folder: Path, group: Callable[[int, bool], Ranks]) -> Outcome:
    """Return the outcome of `cell`."""
    runtime = tempfile.mkdtemp(prefix="ttl-", dir="/tmp")  # The path of a socket must be short.
    arguments = {"cell": cell, "folder": folder, "runtime": runtime}
    try:
        saved = Outcome.of_reports(group(cell.world_size, False).reports(save_between, **arguments))
        if saved.kind != EQUAL:
            return saved
        return Outcome.of_reports(group(cell.world_size, True).reports(resume_between, **arguments))
    finally:
        shutil.rmtree(runtime)  # Ends the keepers.


def save_between(rank: int, cell: RanksCell, folder: Path, runtime: str) -> Outcome:
    """Train eight steps without a save; in a second run five, with a save or an image at the third. **Collective**."""
    with quiet():
        straight = TRICKS[cell.trick](rank, 0)
        losses = [straight.step(number, lambda: None) for number in range(1, LAST + 1)]
        end = snapshot(straight)
        run = TRICKS[cell.trick](rank, 0)
    held: Any = None
    with logged_warnings() as warned, _memory_in(runtime, cell), quiet():
        try:
            with _manager(run, cell, folder) as manager:
                manager.load()
                manager.reset()
                for number in range(1, SAVED_AT + 3):
                    run.step(number, manager.maybe_wait_for_staging)
                    held = snapshot(run) if number == SAVED_AT else held
                    manager.save(number)
                    _finish_images(manager)
        except (ConfigError, RanksDiffer) as refusal:
            return Outcome(REFUSED, first_sentence(refusal))
        except Exception as error:
            return Outcome(DIFFERS, f"the save raised {type(error).__name__}: {sentence(error)}")
    if warned:
        return Outcome(WARNED, first_sentence(warned[0]))
    torch.save({"losses": losses[SAVED_AT:], "end": end, "held": held}, folder / f"held-{rank}.pt")
    return Outcome(EQUAL)


def resume_between(rank: int, cell: RanksCell, folder: Path, runtime: str) -> Outcome:
    """Load what `save_between` saved, train to the end, and compare with the run that never stopped. **Collective**."""
    kind = TRICKS[cell.trick]
    expected = torch.load(folder / f"held-{0 if kind.gets_lowest else rank}.pt", weights_only=False)
    with logged_warnings() as warned, _memory_in(runtime, cell), quiet():
        try:
            again = kind(rank, 1)
            again.warm_up()
            with _manager(again, cell, folder) as manager:
                if not manager.load() or manager.loaded_step != SAVED_AT:
                    return Outcome(DIFFERS, f"step {SAVED_AT} was not loaded but {manager.loaded_step}")
                is_image = manager._maker.origin.image_of >= 0
            different = difference(expected["held"], snapshot(again), "after the load")
            resumed = []
            if not different and not kind.gets_lowest:
                resumed = [again.step(number, lambda: None) for number in range(SAVED_AT + 1, LAST + 1)]
                different = difference(expected["losses"], resumed, "losses")
                different = different or difference(expected["end"], snapshot(again), "at the end")
        except Exception as error:
            return Outcome(DIFFERS, f"the resume raised {type(error).__name__}: {sentence(error)}")
    if is_image != cell.is_from_memory:
        different = different or f"loaded from memory: {is_image}"
    if warned:
        different = different or f"warned although it is equal: {warned[0]}"
    return Outcome(DIFFERS, different) if different else Outcome(EQUAL)


def snapshot(run: Trick) -> dict[str, Any]:
    """Return a copy of what a resume must restore on this rank."""
    whole = {
        "model": {name: value.detach() for name, value in run.module.state_dict().items()},
        "optimizers": [
            [dict(each.state.get(parameter, {})) for group in each.param_groups for parameter in group["params"]]
            for each in run.optimizers
        ],
    }
    copied: dict[str, Any] = in_pieces(whole)
    return copied


def _finish_images(manager: CheckpointManager) -> None:
    """Wait until the next image finds an arena, and the last one is complete: a start in haste skips some."""
    if (images := getattr(manager._images, "images", None)) is not None:
        images.stager.finish_preparation()
        manager.maybe_wait_for_staging()
        assert images.wait(60)


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
