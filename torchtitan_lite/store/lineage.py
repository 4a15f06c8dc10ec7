"""Which checkpoints belong to which run and branch.

A run that rolls back (`load_step`, or by itself) starts a branch: it gets a run id of its own, and its first commit
abandons what lies beyond the step that it rolled back to. That commit lists what it abandons, so one rename decides:
before it nothing is abandoned; after it no run resumes from an abandoned checkpoint or counts it, even if a crash comes
before the abandoned folders are renamed. Pure values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeGuard

MAX_ABANDONED = 100_000
"""Checkpoints that one commit may abandon."""
MAX_ANCESTORS = 1000
"""Runs that a branch remembers, the last ones."""
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
    counts_again: bool = field(default=False, compare=False)
    """Whether the run counts its steps from the start again: its first commit abandons every step of other runs.

    Not in the manifest, which is equal without it: after that commit there is nothing left to abandon.
    """
    ancestors: tuple[tuple[int, str], ...] = ()
    """(last step kept, run id) of each run that this one left by rolling back, or by counting again (-1)."""
    rolls_back_to: int | None = field(default=None, compare=False)
    """The step to which the run rolled back by itself, because it diverged. Not in the manifest, as `counts_again`."""

    @property
    def last_kept(self) -> int | None:
        """Return the step beyond which checkpoints of other runs are abandoned; None if none are."""
        if self.counts_again:
            return -1
        if self.rolls_back_to is not None:
            return self.rolls_back_to
        # A branch that has rolled back since keeps what it has saved up to there.
        return None if self.branch_point is None else self.began_at

    @property
    def began_at(self) -> int | None:
        """Return the step of another run at which this one began, by rolling back; None if it did not."""
        began = self.ancestors[0][0] if self.ancestors else self.branch_point
        return None if began == -1 else began

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object for the manifest."""
        return {
            "run_id": self.run_id,
            "parent_step": self.parent_step,
            "branch_point": self.branch_point,
            "abandons": [list(pair) for pair in self.abandons],
            **({"ancestors": [list(pair) for pair in self.ancestors]} if self.ancestors else {}),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Lineage:
        """Return the lineage in `document`. Raise ValueError that names the wrong field."""
        abandons = _pairs(document, "abandons", MAX_ABANDONED)
        run_id = document.get("run_id")
        if not _is_run_id(run_id):
            raise ValueError(
                f"lineage: run_id: expected letters and digits, {_RUN_ID_LETTERS} at most, found {run_id!r:.100}"
            )
        return cls(
            run_id=run_id,
            parent_step=_step_or_none(document, "parent_step"),
            branch_point=_step_or_none(document, "branch_point"),
            abandons=abandons,
            ancestors=_pairs(document, "ancestors", MAX_ANCESTORS, lowest_step=-1),
        )

    def branch(self, last_kept: int) -> tuple[tuple[int, str], ...]:
        """Return the ancestors of a run that leaves this one after step `last_kept`."""
        return ((last_kept, self.run_id), *self.ancestors)[:MAX_ANCESTORS]

    def rolled_back(self, run_id: str, step: int) -> Lineage:
        """Return the lineage of the run `run_id`, with which this one rolls back to `step` by itself."""
        # The same `load_step` continues it at the next start, so that stays.
        earlier = tuple((min(kept, step), run) for kept, run in self.ancestors)
        return Lineage(
            run_id,
            parent_step=step,
            branch_point=self.branch_point,
            ancestors=((step, self.run_id), *earlier)[:MAX_ANCESTORS],
            rolls_back_to=step,
        )

    def leaves(self, step: int, run_id: str) -> bool:
        """Return whether this run has left the checkpoint of `step` of the run `run_id` behind."""
        return (step, run_id) in self.abandons or any(run_id == run and step > kept for kept, run in self.ancestors)

    def is_of(self, run_id: str) -> bool:
        """Return whether this is the run `run_id`, or began in it."""
        return run_id == self.run_id or self.comes_from(run_id)

    def comes_from(self, run_id: str) -> bool:
        """Return whether this run began in the run `run_id`."""
        return any(run_id == run for _, run in self.ancestors)


def _pairs(document: dict[str, Any], name: str, most: int, lowest_step: int = 0) -> tuple[tuple[int, str], ...]:
    """Return the field `name`, at most `most` pairs of a step and a run id. Raise ValueError for anything else."""
    pairs = document.get(name, [])
    if isinstance(pairs, list) and len(pairs) <= most and all(_is_pair(pair, lowest_step) for pair in pairs):
        return tuple((step, run) for step, run in pairs)
    raise ValueError(f"lineage: {name}: expected pairs of step and run id, {most} at most, found {pairs!r:.100}")


def _is_pair(pair: object, lowest_step: int) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and _is_step(pair[0], lowest_step) and _is_run_id(pair[1])


def _is_run_id(value: object) -> TypeGuard[str]:
    # It becomes part of the name of the folder when the checkpoint is abandoned.
    return isinstance(value, str) and len(value) <= _RUN_ID_LETTERS and value.isascii() and value.isalnum()


def _is_step(value: object, lowest: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value < 1 << 63


def _step_or_none(document: dict[str, Any], name: str) -> int | None:
    value = document.get(name)
    if value is not None and not _is_step(value):
        raise ValueError(f"lineage: {name}: expected a step or null, found {value!r:.100}")
    return value
