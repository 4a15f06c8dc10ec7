"""How often a run rolled back by itself, and which batches of its data it skips since then.

Batches are counted from 1 in the order in which the data come. A run that never rolled back trains batch s in step s;
one that did skips some, and what it trains in a step follows from these alone. The record is one file in the
folder of checkpoints, replaced as a whole before the run rolls back: a start that finds a rollback of which no
checkpoint was saved rolls back once more. Pure values, and the record itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.disk.plain_file import read_plain
from torchtitan_lite.errors import CheckpointError, CheckpointUnreadable, CheckpointUnsafe
from torchtitan_lite.store import layout
from torchtitan_lite.store.format_version import FORMAT, check_format, unknown_fields
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest_fields import integer_field, json_bytes, json_object, value_of

_LIMIT_BYTES = 16 << 20
_NOT_YET = -1


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """A run rolled back, or is about to."""

    step: int
    """The step that was not to be kept."""
    reason: str
    """Why, in a few words."""
    skipped: int
    """The batch that is skipped from then on."""
    last: int
    """The last step that it may roll back to."""
    run_id: str
    """Of the branch that begins there."""
    left: Lineage
    """Of the run that rolled back."""
    target: int = _NOT_YET
    """The step that it rolled back to; -1 while it is on its way."""
    is_left: bool = False
    """Whether a checkpoint that it had left was brought back: it counts for no run, but stays on record."""
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """Fields that a later version added."""

    def __str__(self) -> str:
        to = f"to step {self.target}" if self.target != _NOT_YET else f"to step {self.last} or before"
        return f"from step {self.step} ({self.reason}) {to}, without batch {self.skipped}"


def of_run(found: Sequence[Rollback], lineage: Lineage) -> tuple[Rollback, ...]:
    """Return those of `found` that count for the run of `lineage`: of that run, and of all branches of one run."""
    runs = _run_ids(lineage)
    return tuple(e for e in found if not (e.is_left or runs.isdisjoint({e.run_id, *_run_ids(e.left)})))


def brought_back(found: Sequence[Rollback], step: int, lineage: Lineage) -> tuple[Rollback, ...]:
    """Return `found`, those that are left first, for when the checkpoint of `step` and `lineage` has its name again."""

    def is_left(each: Rollback) -> bool:
        branch = each.left.rolled_back(each.run_id, each.last if each.target == _NOT_YET else each.target)
        return not lineage.is_of(each.run_id) and (each.is_left or branch.leaves(step, lineage.run_id))

    marked = [replace(each, is_left=is_left(each)) for each in found]
    return tuple(sorted(marked, key=lambda each: not each.is_left))


def joint_rollbacks(found: Sequence[Rollback], others: Sequence[Rollback]) -> tuple[Rollback, ...]:
    """Return the rollbacks of the record `found`, and those that only the record of another folder has."""
    known = {each.run_id for each in found}
    return (*found, *(each for each in others if each.run_id not in known))


def _run_ids(lineage: Lineage) -> set[str]:
    """Return the ids of a run and of those that it came from, back to one that counted its steps from the start."""
    counted_again = (number for number, (kept, _) in enumerate(lineage.ancestors) if kept < 0)
    return {lineage.run_id, *(run for _, run in lineage.ancestors[: next(counted_again, None)])}


def unfinished(found: Sequence[Rollback], run_id: str) -> Rollback | None:
    """Return the last of `found` that is not left if no checkpoint was saved since; None if one was.

    None was if `run_id`, that of the latest one, is of the run that rolled back, or of one that this came from.
    """
    last = next((each for each in reversed(found) if not each.is_left), None)
    return last if last is not None and last.left.is_of(run_id) else None


def batch_of(step: int, skipped: Collection[int]) -> int:
    """Return the batch that a run trains in `step` if it skips those in `skipped`; 0 for step 0."""
    batch = step
    for each in sorted(skipped):
        if each > batch:
            break
        batch += 1
    return batch if step else 0


def batches_to_skip(step: int, found: Iterable[Rollback]) -> int:
    """Return how many batches are skipped between that of the step before `step` and that of `step`."""
    skipped = {each.skipped for each in found}
    return batch_of(step, skipped) - batch_of(step - 1, skipped) - 1


def next_rollback(step: int, reason: str, found: Sequence[Rollback], left: Lineage, run_id: str) -> Rollback | None:
    """Return how a run that is not to keep `step` rolls back; None if there is no batch left to skip.

    It skips the batch of `step`; if it rolled back from there before, the one before those that it skipped then.
    """
    skipped = {each.skipped for each in found}
    again = [each.skipped for each in found if each.step == step]
    batch = batch_of(step, skipped)
    if again:
        batch = min(again) - 1
        while batch in skipped:
            batch -= 1
    if batch < 1:
        return None
    trained_in = batch - sum(each < batch for each in skipped)
    return Rollback(step=step, reason=reason, skipped=batch, last=trained_in - 1, run_id=run_id, left=left)


def within(step: int, num_steps: int, found: Iterable[Rollback]) -> list[Rollback]:
    """Return those of `found` that began less than `num_steps` steps before `step`, or after it."""
    return [each for each in found if each.step > step - num_steps]


_FIELDS = frozenset(each.name for each in fields(Rollback))


class RollbackRecord:
    """The record at the address `path`, which `read` and `write` get and replace, durably. **Coordinator only**."""

    def __init__(self, path: str, read: Callable[[], bytes], write: Callable[[bytes], None]) -> None:
        self._path, self._read, self._write = path, read, write

    @classmethod
    def in_folder(cls, root: Path, durable: Durable) -> RollbackRecord:
        """Return that of the folder of checkpoints `root`, on a disk."""
        path = root / layout.ROLLBACKS
        return cls(str(path), partial(read_plain, path, _LIMIT_BYTES), partial(durable.write_atomically, path))

    def read(self) -> tuple[Rollback, ...]:
        """Return the rollbacks, the first one first. Raises `CheckpointUnreadable`, and as `parse_rollbacks`."""
        try:
            return parse_rollbacks(self._read(), self._path)
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except CheckpointUnsafe as error:
            raise _no_record(self._path, error.finding) from error
        except OSError as error:
            raise CheckpointUnreadable(self._path, error.strerror or str(error)) from error

    def write(self, rollbacks: Sequence[Rollback]) -> None:
        """Replace the record, durably. Under the lease. Raises OSError."""
        self._write(to_json(rollbacks))

    def bring_back(self, step: int, lineage: Lineage) -> None:
        """Do as `brought_back`, before it has its name: else the next start would roll back once more."""
        if found := self.read():
            self.write(brought_back(found, step, lineage))


def to_json(rollbacks: Sequence[Rollback]) -> bytes:
    """Return the bytes of the record."""
    found = []
    for each in rollbacks:
        entry = asdict(each) | {"left": each.left.to_json()}
        found.append(entry | entry.pop("unknown"))
    return json_bytes({**FORMAT, "rollbacks": found})


def parse_rollbacks(data: bytes, path: str) -> tuple[Rollback, ...]:
    """Return the rollbacks in `data`, read at `path`. Raises CheckpointError, `UnknownFormat` for another version."""
    try:
        document = json_object(data)
        check_format({"format_version": 1} | document if "version" in document else document, path)
        return tuple(map(_rollback, value_of(document, "rollbacks", list)))
    except (ValueError, RecursionError) as error:
        raise _no_record(path, str(error)) from error


def _no_record(path: str, finding: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is no record of rollbacks: {finding}. Without that file the run resumes from its latest step, and "
        "skips no batch of its data: move it away for that."
    )


def _rollback(document: Any) -> Rollback:
    if not isinstance(document, dict):
        raise ValueError(f"rollbacks: expected objects, found {document!r:.50}")
    return Rollback(
        step=integer_field(document, "step", 1),
        reason=value_of(document, "reason", str),
        skipped=integer_field(document, "skipped", 1),
        last=integer_field(document, "last", 0),
        run_id=value_of(document, "run_id", str),
        left=Lineage.from_json(value_of(document, "left", dict)),
        target=integer_field(document, "target", _NOT_YET),
        is_left=document.get("is_left") is True,
        unknown=unknown_fields(document, _FIELDS),
    )
