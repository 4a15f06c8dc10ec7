"""Which checkpoints belong together.

A run that was told to go back (`load_step`) starts a branch: it has a run id of its own, and with
its first commit it abandons what lies beyond the step it went back to. That commit names what it
abandons, so one rename decides: before it nothing is abandoned, after it nothing abandoned is
resumed from or counted, even if a crash comes before the abandoned folders got their new names.
Pure values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, TypeVar

MAX_ABANDONED = 100_000
"""Checkpoints that one commit sets aside."""
_RUN_ID_LETTERS = 64


@dataclass(frozen=True)
class Lineage:
    """Where a checkpoint comes from."""

    run_id: str
    """The same for all checkpoints of a run and its restarts; another for each branch."""
    parent_step: int | None = None
    """The checkpoint that training went on from or committed before this one; None for the first of a run."""
    branch_point: int | None = None
    """The step that `load_step` named when this branch began; None if the run was never told to go back."""
    abandons: tuple[tuple[int, str], ...] = ()
    """(step, run id) of what this commit sets aside."""
    counts_again: bool = False
    """Whether the run counts its steps from the start again: its first commit sets aside every step of another run.

    Not in the manifest: after that commit there is nothing left to set aside."""

    @property
    def last_kept(self) -> int | None:
        """The step beyond which another run's are set aside; None: none are."""
        return -1 if self.counts_again else self.branch_point

    def to_json(self) -> dict[str, Any]:
        """As it stands in the manifest."""
        return {
            "run_id": self.run_id,
            "parent_step": self.parent_step,
            "branch_point": self.branch_point,
            "abandons": [list(pair) for pair in self.abandons],
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Lineage:
        """The lineage in `document`; raises ValueError naming the field that is wrong."""
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
    """What has to be known of a checkpoint here."""

    @property
    def step(self) -> int: ...

    @property
    def lineage(self) -> Lineage: ...


T = TypeVar("T", bound=OfARun)


def without_abandoned(committed: Sequence[T]) -> list[T]:
    """Those of `committed` that no other one abandons."""
    abandoned = {pair for info in committed for pair in info.lineage.abandons}
    return [info for info in committed if (info.step, info.lineage.run_id) not in abandoned]


def abandoned_by(run_id: str, branch_point: int | None, committed: Iterable[OfARun]) -> tuple[tuple[int, str], ...]:
    """What a commit of this run sets aside: all beyond its branch point that is another run's."""
    if branch_point is None:
        return ()
    others = (info for info in committed if info.lineage.run_id != run_id)
    return tuple((info.step, info.lineage.run_id) for info in others if info.step > branch_point)


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and _is_step(pair[0]) and _is_run_id(pair[1])


def _is_run_id(value: object) -> TypeGuard[str]:
    # It is part of a folder's name once the checkpoint is abandoned.
    return isinstance(value, str) and len(value) <= _RUN_ID_LETTERS and value.isascii() and value.isalnum()


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _step(document: dict[str, Any], name: str) -> int | None:
    value = document.get(name)
    if value is not None and not _is_step(value):
        raise ValueError(f"lineage: {name}: expected a step or null, found {value!r:.100}")
    return value
