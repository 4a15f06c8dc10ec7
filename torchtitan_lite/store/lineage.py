"""Which checkpoints belong to which run and branch.

A run that rolls back (`load_step`) starts a branch: it gets a run id of its own, and its first commit abandons what
lies beyond the step that it rolled back to. That commit lists what it abandons, so one rename decides: before it
nothing is abandoned; after it no run resumes from an abandoned checkpoint or counts it, even if a crash comes before
the abandoned folders are renamed. Pure values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, TypeVar

MAX_ABANDONED = 100_000
"""Checkpoints that one commit may abandon."""
_RUN_ID_LETTERS = 64


@dataclass(frozen=True)
class Lineage:
    """The run and branch of a checkpoint."""

    run_id: str
    """The same for all checkpoints of a run and its restarts; another for each branch."""
    parent_step: int | None = None
    """The step that this run loaded or committed before this one; None for the first of a run."""
    branch_point: int | None = None
    """The `load_step` with which this branch began; None if the run never rolled back."""
    abandons: tuple[tuple[int, str], ...] = ()
    """(step, run id) of each checkpoint that this commit abandons."""
    counts_again: bool = False
    """Whether the run counts its steps from the start again: its first commit abandons every step of other runs.

    Not in the manifest: after that commit there is nothing left to abandon.
    """

    @property
    def last_kept(self) -> int | None:
        """Return the step beyond which checkpoints of other runs are abandoned; None if none are."""
        return -1 if self.counts_again else self.branch_point

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object for the manifest."""
        return {
            "run_id": self.run_id,
            "parent_step": self.parent_step,
            "branch_point": self.branch_point,
            "abandons": [list(pair) for pair in self.abandons],
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Lineage:
        """Return the lineage in `document`. Raise ValueError that names the wrong field."""
        pairs = document.get("abandons", [])
        if not isinstance(pairs, list) or len(pairs) > MAX_ABANDONED or not all(_is_pair(pair) for pair in pairs):
            raise ValueError(
                f"lineage: abandons: expected pairs of step and run id, {MAX_ABANDONED} at most, found {pairs!r:.100}"
            )
        run_id = document.get("run_id")
        if not _is_run_id(run_id):
            raise ValueError(
                f"lineage: run_id: expected letters and digits, {_RUN_ID_LETTERS} at most, found {run_id!r:.100}"
            )
        return cls(
            run_id=run_id,
            parent_step=_step(document, "parent_step"),
            branch_point=_step(document, "branch_point"),
            abandons=tuple((step, run) for step, run in pairs),
        )


class OfARun(Protocol):
    """What this module needs to know of a checkpoint."""

    @property
    def step(self) -> int: ...

    @property
    def lineage(self) -> Lineage: ...


T = TypeVar("T", bound=OfARun)


def without_abandoned(committed: Sequence[T]) -> list[T]:
    """Return the checkpoints of `committed` that no other one abandons."""
    abandoned = {pair for info in committed for pair in info.lineage.abandons}
    return [info for info in committed if (info.step, info.lineage.run_id) not in abandoned]


def abandoned_by(run_id: str, branch_point: int | None, committed: Iterable[OfARun]) -> tuple[tuple[int, str], ...]:
    """Return what a commit of this run abandons: all steps of other runs beyond the branch point."""
    if branch_point is None:
        return ()
    others = (info for info in committed if info.lineage.run_id != run_id)
    return tuple((info.step, info.lineage.run_id) for info in others if info.step > branch_point)


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and _is_step(pair[0]) and _is_run_id(pair[1])


def _is_run_id(value: object) -> TypeGuard[str]:
    # It becomes part of the name of the folder when the checkpoint is abandoned.
    return isinstance(value, str) and len(value) <= _RUN_ID_LETTERS and value.isascii() and value.isalnum()


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _step(document: dict[str, Any], name: str) -> int | None:
    value = document.get(name)
    if value is not None and not _is_step(value):
        raise ValueError(f"lineage: {name}: expected a step or null, found {value!r:.100}")
    return value
