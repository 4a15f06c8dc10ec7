"""The errors that this package raises.

    TorchtitanLiteError
    |- ConfigError (ValueError)                  wrong usage; the command line ends with 2
    |- CheckpointError
    |  |- CheckpointNotFound (FileNotFoundError) a step or path that is not there
    |  |- CheckpointMismatch (ValueError)        the checkpoint does not fit what it is loaded into
    |  |- CheckpointDamaged (ValueError)         a checkpoint that is not what was committed
    |  |- AllCheckpointsDamaged (ValueError)     none of a folder's checkpoints is what was committed
    |  |- CheckpointUnsafe (ValueError)          a checkpoint with something in it that no checkpoint needs
    |  |- FormatTooNew (RuntimeError)            a checkpoint that a newer version of this package wrote
    |  |- CheckpointUnreadable (RuntimeError)    a checkpoint whose files could not be read
    |  |- SaveFailed (RuntimeError)              a save that did not become durable
    |  |- RunNotLoaded (RuntimeError)            a save over another run's checkpoints, which were not loaded
    |  |- WriterProcessDied (RuntimeError)       the writer process ended or was silent too long
    |  |- FolderUnusable (OSError)               a folder of checkpoints that the system refuses
    |  |- FolderInUse (RuntimeError)             another job writes the folder
    |  `- LeaseLost (RuntimeError)               another job has taken the folder over
    |- CorpusChanged (ValueError)                the data at resume is not the data of the run
    |- ExtraMissing (ImportError)                a package that only some need is not installed
    `- TrainingDiverged (ArithmeticError)        a loss or gradient norm that is not finite

Every message names the thing, what was expected, what was found and the mend. Every error is
rebuilt whole, fields included, by pickle: DCP and the ranks' agreements send errors from rank to
rank, and one that does not unpickle would leave the others waiting. So the fields are exactly the
constructor's arguments, and the message is made from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class TorchtitanLiteError(Exception):
    """Root of the tree."""

    reported_elsewhere: bool = False
    """Whether another rank reports this very error, so that a person reads it once."""

    origin_rank: int = 0
    """The rank on which it came up, where the ranks agreed on it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.__dict__ | {"args": self.args})


def _rebuild(kind: type[TorchtitanLiteError], fields: dict[str, Any]) -> TorchtitanLiteError:
    error = kind.__new__(kind)
    error.args = fields.pop("args")
    error.__dict__.update(fields)
    return error


def _clause(text: str) -> str:
    """`text` as a part of a sentence: what another error says ends with a full stop of its own."""
    return text.strip().removesuffix(".")


class ConfigError(TorchtitanLiteError, ValueError):
    """Wrong usage: a config file, a key, a value or a combination of them."""


class CheckpointError(TorchtitanLiteError):
    """Anything about a checkpoint."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """`step` is not in `folder`, which has `available`; or, without a step, `folder` is no checkpoint: `finding`."""

    def __init__(self, folder: str, step: int | None, available: Sequence[int] = (), finding: str = "") -> None:
        self.folder, self.step, self.available, self.finding = folder, step, tuple(available), finding
        there = f"it has {', '.join(map(str, available))}" if available else "it has no checkpoint"
        mend = "one of these, or -1 for the latest" if available else "-1 to start afresh"
        super().__init__(
            f"step {step} is not in {folder} ({there}). Set --checkpoint.load_step to {mend}."
            if step is not None
            else f"{folder} holds no checkpoint: {_clause(finding) or 'there is no .metadata file in it'}."
        )


class CheckpointMismatch(CheckpointError, ValueError):
    """The checkpoint at `path` does not fit; `report` says key by key how."""

    def __init__(self, path: str, report: str) -> None:
        self.path, self.report = path, report
        super().__init__(f"{path} does not fit this run:\n{report}")


class CheckpointDamaged(CheckpointError, ValueError):
    """The checkpoint at `path` is not what was committed: `finding`, which concerns `keys`."""

    def __init__(self, path: str, finding: str, keys: Sequence[str] = ()) -> None:
        self.path, self.finding, self.keys = path, finding, tuple(keys)
        super().__init__(f"{path} is damaged: {self.summary}. Resume from another step with --checkpoint.load_step.")

    @property
    def summary(self) -> str:
        """The finding with some of the keys."""
        more = f" and {len(self.keys) - 3} more" if len(self.keys) > 3 else ""
        return _clause(self.finding) + (f" (in it: {', '.join(self.keys[:3])}{more})" if self.keys else "")


class AllCheckpointsDamaged(CheckpointError, ValueError):
    """None of the checkpoints in `folder` is what was committed; `findings` says of each step how. None was changed."""

    def __init__(self, folder: str, findings: Mapping[int, str]) -> None:
        self.folder, self.findings = folder, dict(findings)
        each = "".join(f"\n  step {step}: {finding}" for step, finding in sorted(findings.items(), reverse=True))
        super().__init__(
            f"every checkpoint in {folder} is damaged, and all of them were left as they are:{each}\n"
            "Put a copy of one of them back, or start anew with another --job.dump_folder."
        )


class CheckpointUnsafe(CheckpointError, ValueError):
    """The file or folder at `path` holds what no checkpoint needs: `finding`. Nothing of it was run or followed."""

    def __init__(self, path: str, finding: str) -> None:
        self.path, self.finding = path, finding
        super().__init__(
            f"{path} is not read: {_clause(finding)}. Nothing in it was run. If you know where it comes from, load it "
            "with torch's own tools and save it again; else choose another checkpoint with --checkpoint.load_step."
        )


class CheckpointUnreadable(CheckpointError, RuntimeError):
    """The files of the checkpoint at `path` could not be read: `cause`. Nothing was changed on disk."""

    def __init__(self, path: str, cause: str) -> None:
        self.path, self.cause = path, cause
        super().__init__(
            f"{path} could not be read: {_clause(cause)}. Choose another step with --checkpoint.load_step."
        )


class FormatTooNew(CheckpointError, RuntimeError):
    """The manifest at `path` has format version `found`; this version reads up to `known`. It is not damage."""

    def __init__(self, path: str, found: int, known: int) -> None:
        self.path, self.found, self.known = path, found, known
        super().__init__(
            f"{path} has format version {found}, this version of torchtitan_lite reads up to {known}. "
            "Upgrade torchtitan_lite, or point dump_folder elsewhere."
        )


class SaveFailed(CheckpointError, RuntimeError):
    """The save of `step` did not become durable: `cause`. Earlier checkpoints are untouched."""

    def __init__(self, step: int, cause: str) -> None:
        self.step, self.cause = step, cause
        super().__init__(f"the save of step {step} failed: {_clause(cause)}. Earlier checkpoints are untouched.")


class RunNotLoaded(CheckpointError, RuntimeError):
    """`folder` has the `steps` of a run that this one did not load, and would save over. Nothing was changed."""

    def __init__(self, folder: str, steps: Sequence[int]) -> None:
        self.folder, self.steps = folder, tuple(steps)
        there = ", ".join(map(str, self.steps[-8:]))
        super().__init__(
            f"{folder} has a run's checkpoints (step {there}), and this loop saves there without having called load(). "
            "Call manager.load() before the loop to go on with that run, or set another --job.dump_folder."
        )


class WriterProcessDied(CheckpointError, RuntimeError):
    """The writer process `pid` ended, or was silent for too long, while `doing`."""

    def __init__(self, pid: int, doing: str, finding: str) -> None:
        self.pid, self.doing, self.finding = pid, doing, finding
        super().__init__(f"writer process {pid} {finding} while {doing}. The next save starts a new one.")


class FolderUnusable(CheckpointError, OSError):
    """The system refuses to list, make or write `folder`: `cause`. Nothing was trained."""

    def __init__(self, folder: str, cause: str) -> None:
        self.folder, self.cause = folder, cause
        super().__init__(
            f"{folder} cannot be used for checkpoints: {_clause(cause)}. "
            "Make it a folder that this user may write, with room, or set another --job.dump_folder."
        )


class FolderInUse(CheckpointError, RuntimeError):
    """Another job, `holder`, writes `folder` and lives. Nothing was changed on disk."""

    def __init__(self, folder: str, holder: str) -> None:
        self.folder, self.holder = folder, holder
        super().__init__(
            f"{folder} is in use by {holder}. End that job, or give this one another folder with --job.dump_folder."
        )


class LeaseLost(CheckpointError, RuntimeError):
    """`folder` is no longer this job's to write; it is now with `holder`."""

    def __init__(self, folder: str, holder: str) -> None:
        self.folder, self.holder = folder, holder
        super().__init__(
            f"{folder} was taken from this job, which was silent for too long; it is now with {holder}. "
            "This job commits nothing more there. "
            "Let the other one go on, or end it and start this one again, or use another --job.dump_folder."
        )


class CorpusChanged(TorchtitanLiteError, ValueError):
    """The data at resume is not the data of the run; `changes` says what differs."""

    def __init__(self, changes: Sequence[str]) -> None:
        self.changes = tuple(changes)
        super().__init__(
            "the corpus is not the one that this run was trained on: "
            + "; ".join(self.changes)
            + ". Put the old data back, "
            "or start its order anew with --checkpoint.exclude_from_loading=dataloader."
        )


class ExtraMissing(TorchtitanLiteError, ImportError):
    """The package of the optional dependency `extra` is not installed."""

    def __init__(self, extra: str) -> None:
        self.extra = extra
        super().__init__(f"{extra} is not installed. Install it with: pip install 'torchtitan-lite[{extra}]'")


class TrainingDiverged(TorchtitanLiteError, ArithmeticError):
    """`name` was not finite at `step`; nothing was updated with it."""

    def __init__(self, step: int, name: str, value: float) -> None:
        self.step, self.name, self.value = step, name, value
        super().__init__(
            f"step {step}: {name} is {value}; stopped before it was applied. "
            "Go back with --checkpoint.load_step, and lower optimizer.lr or training.max_norm."
        )
