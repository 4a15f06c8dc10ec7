"""Which tensors stay the same from save to save, and so lie in the still files.

At first that is a guess: what has neither a gradient nor optimizer state. Then the block digests of two saves of one
plan show it. It decides only which bytes a save has to compare: a still file is shared with an earlier save if all of
its digests are the same, and written in full otherwise. The coordinator decides, tensor by tensor, for all ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem

from torchtitan_lite.checkpoint.format.file_data import FileLayout
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.format.torch_contents import DTYPES
from torchtitan_lite.checkpoint.planning.saves_of_plan import Moved, NoSavesOfPlan, SavesOfPlan
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout

LEAST_BYTES = 64 << 10
"""A smaller tensor always lies with the changes: to write it costs nothing."""
_OPTIMIZER_STATE = "optimizer.state."


class NoStillTensors:
    """Each rank has one file, which every save writes in full."""

    is_due = False
    """Whether tensors are to move between the files, with the next plan. Coordinator only."""

    def guess(self, state: State, items: Sequence[WriteItem], flat: State) -> Collection[str]:
        """Return the keys of those `items` of the state that may be still. Any rank."""
        return ()

    def is_still(self, key: str, is_guessed: bool) -> bool:
        """Return whether the tensor `key` lies in the still files; the ranks that have it guess. Coordinator only."""
        return False

    def planned(self, placed: FileLayout, keys: Sequence[str]) -> NoSavesOfPlan:
        """Note that saves follow a new plan, by which this rank writes `keys` as `placed`; return their record."""
        return NoSavesOfPlan()


class StillTensors(NoStillTensors):
    """Of the states named `states`, all that `trained` does not name is guessed to be still; of others nothing.

    A still file is shared at most `full_every` times in a row.
    """

    def __init__(self, trained: Callable[[], Collection[str]], states: Collection[str], full_every: int) -> None:
        self._trained, self._states = trained, frozenset(states)
        self._full_every = full_every
        self._has_warned = False
        self._is_still: dict[str, bool] = {}
        """What saves have shown, by key."""
        self._equal: dict[str, int] = {}
        """How many saves in a row had the same bytes of a tensor as the save before them, by key."""
        self._patience: dict[str, int] = {}
        """How many must, before a tensor is taken for still; twice as many after each time that it was not."""

    def guess(self, state: State, items: Sequence[WriteItem], flat: State) -> Collection[str]:
        if not isinstance(state.get("model"), Mapping):  # Exported weights.
            return ()
        moving = {*self._trained()}
        moving |= {
            f"model.{key.removeprefix(_OPTIMIZER_STATE).rpartition('.')[0]}"
            for key in flat
            if key.startswith(_OPTIMIZER_STATE)
        }
        keys = (item.index.fqn for item in items if _is_large(item))
        return {key for key in keys if key.partition(".")[0] in self._states and key not in moving}

    def is_still(self, key: str, is_guessed: bool) -> bool:
        return self._is_still.get(key, is_guessed)

    def planned(self, placed: FileLayout, keys: Sequence[str]) -> NoSavesOfPlan:
        self.is_due = False
        return SavesOfPlan(placed, keys, LEAST_BYTES, self._full_every, self)

    def note_refusal(self, step: int, refusal: str) -> None:
        """Log, once, why still files that had not changed were written in full. Coordinator only."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Step %d is written in full, although parts have not changed: %s. checkpoint.incremental needs a file "
                "system with hard links",
                step,
                refusal,
            )

    def note(self, moved: Sequence[Moved], tensors: Mapping[str, Any]) -> None:
        """Move tensors between the files, with the next plan, where that is worth it. Coordinator only."""
        changed: set[str] = set()
        equal: Counter[str] = Counter()
        for of_rank in moved:
            changed.update(of_rank.changed)
            equal.update(of_rank.unchanged)
        # On all ranks that have a part of it.
        whole = {key for key, pieces in equal.items() if pieces == _num_chunks(tensors[key])}
        self._equal = {key: self._equal.get(key, 0) + 1 for key in whole}
        ready = [key for key in whole if self._equal[key] >= self._patience.get(key, 1)]
        for key in changed:
            self._patience[key] = 2 * self._patience.get(key, 1)
            self._is_still[key] = False
        # A move writes all still files in full: it has to save as much until they are written in full anyway.
        if ready and (changed or self._full_every * _bytes_of(ready, tensors) >= _bytes_of(_still(tensors), tensors)):
            self._is_still |= dict.fromkeys(ready, True)
            changed.update(ready)
        self.is_due = self.is_due or bool(changed)


def _is_large(item: WriteItem) -> bool:
    data = item.tensor_data
    return data is not None and data.size.numel() * data.properties.dtype.itemsize >= LEAST_BYTES


def _num_chunks(entry: Mapping[str, Any]) -> int:
    return sum(run[0] for run in entry["runs"]) if "runs" in entry else len(entry["chunks"])


def _still(tensors: Mapping[str, Any]) -> list[str]:
    return [key for key, entry in tensors.items() if _lies_still(entry)]


def _lies_still(entry: Mapping[str, Any]) -> bool:
    if "runs" in entry:
        return len(entry["runs"][0][1]) > 2
    return any(layout.is_still(file) for file, *_ in entry["chunks"])


def _bytes_of(keys: Iterable[str], tensors: Mapping[str, Any]) -> int:
    return sum(math.prod(tensors[key]["shape"]) * DTYPES[tensors[key]["dtype"]].itemsize for key in keys)
