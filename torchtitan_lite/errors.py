"""The errors that this package raises.

    TorchtitanLiteError
    |- ConfigError (ValueError)                  wrong usage; the command line exits with 2
    |- CheckpointError
    |  |- CheckpointNotFound (FileNotFoundError) a step or path does not exist
    |  |- CheckpointMismatch (ValueError)        the checkpoint does not fit what it is loaded into
    |  |- CheckpointDamaged (ValueError)         a checkpoint is not what was committed
    |  |- AllCheckpointsDamaged (ValueError)     no checkpoint of a folder is what was committed
    |  |- CheckpointUnsafe (ValueError)          a checkpoint has something in it that no checkpoint needs
    |  |- PinsUnreadable (RuntimeError)         it is not known which steps are pinned, so none is removed
    |  |- UnknownFormat (RuntimeError)           a file has a format that this version does not read
    |  |  |- FormatTooNew                         a newer version of this package wrote it
    |  |  `- FormatTooOld                         a commit before the first release wrote it
    |  |- CheckpointUnreadable (RuntimeError)    the files of a checkpoint could not be read
    |  |- SaveFailed (RuntimeError)              a save did not become durable
    |  |- RanksDiffer (RuntimeError)             ranks hold different parameters under one name
    |  |- RunNotLoaded (RuntimeError)            a save would overwrite the checkpoints of a run that was not loaded
    |  |- WriterProcessDied (RuntimeError)       the writer process ended or was silent too long
    |  |- FolderUnusable (OSError)               the system refuses to use a folder for checkpoints
    |  |- FolderNotShared (RuntimeError)         some ranks see another folder of the same name
    |  |- FolderInUse (RuntimeError)             another job writes the folder
    |  |- LeaseLost (RuntimeError)               another job has taken the folder over
    |  `- UploadRefused (RuntimeError)           nothing can be uploaded into a folder
    |- HostsDiffer (RuntimeError)                ranks have other versions, configurations, data or clocks
    |- CorpusChanged (ValueError)                the data at resume is not the data of the run
    |- TokensNotWritten (RuntimeError)           a disk is full, or fails, while the tokens of a corpus are made
    |- ExtraMissing (ImportError)                an optional dependency is not installed
    |- KeeperUnavailable (RuntimeError)          there are no in-memory snapshots; training continues
    |- PeerLost (RuntimeError)                   another rank has ended, or does not answer
    `- TrainingDiverged (ArithmeticError)        a loss or gradient norm is not finite, or a loss far too high

Every message names the thing, what was expected, what was found, and the fix. Every error survives pickle with all its
fields: DCP and `Peers` send errors from rank to rank, and one that cannot be unpickled would leave the others waiting.
So the fields are exactly the arguments of the constructor, and the message is made from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = [
    "AllCheckpointsDamaged",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointUnreadable",
    "CheckpointUnsafe",
    "ConfigError",
    "CorpusChanged",
    "ExtraMissing",
    "FolderInUse",
    "FolderNotShared",
    "FolderUnusable",
    "FormatTooNew",
    "FormatTooOld",
    "HostsDiffer",
    "KeeperUnavailable",
    "LeaseLost",
    "PeerLost",
    "PinsUnreadable",
    "RanksDiffer",
    "RunNotLoaded",
    "SaveFailed",
    "TokensNotWritten",
    "TorchtitanLiteError",
    "TrainingDiverged",
    "UnknownFormat",
    "UploadRefused",
    "WriterProcessDied",
]


LAST_WITH_EARLIER_FORMATS = "24f7bada"
"""The last commit that reads the formats from before the first release."""


class TorchtitanLiteError(Exception):
    """Root of the tree."""

    reported_elsewhere: bool = False
    """Whether another rank reports this error, so that it is logged once."""

    origin_rank: int = 0
    """The rank that first raised the error, if the ranks agreed on it."""

    fact: str = ""
    """The message without the advice for a training job; empty if it has none."""

    def _say(self, fact: str, advice: str) -> None:
        self.fact = fact
        super().__init__(f"{fact}. {advice}.")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.__dict__ | {"args": self.args})


def _rebuild(kind: type[TorchtitanLiteError], fields: dict[str, Any]) -> TorchtitanLiteError:
    error = kind.__new__(kind)
    error.args = fields.pop("args")
    error.__dict__.update(fields)
    return error


def _clause(text: str) -> str:
    """Return `text` as a part of a sentence, without the full stop that other errors end with."""
    return text.strip().removesuffix(".")


class ConfigError(TorchtitanLiteError, ValueError):
    """Wrong usage: a config file, a key, a value or a combination of them."""


class CheckpointError(TorchtitanLiteError):
    """An error about a checkpoint."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """`folder` has `available` and not `step`; or, without a step, `folder` is no checkpoint: `finding`."""

    def __init__(self, folder: str, step: int | None, available: Sequence[int] = (), finding: str = "") -> None:
        self.folder, self.step, self.available, self.finding = folder, step, tuple(available), finding
        there = f"it has {', '.join(map(str, available))}" if available else "it has no checkpoint"
        fix = "one of these, or -1 for the latest" if available else "-1 to start from scratch"
        fix += "; in a loop of your own, load() takes it"
        if step is not None:
            self._say(f"step {step} is not in {folder} ({there})", f"Set --checkpoint.load_step to {fix}")
        else:
            super().__init__(f"{folder} {_predicate(finding)}.")


def _predicate(finding: str) -> str:
    """Return what is the matter with a folder that is no checkpoint, or does not exist."""
    if finding.startswith(("it does not exist", "it has no checkpoint of")):
        return _clause(finding).removeprefix("it ")
    return f"holds no checkpoint: {_clause(finding) or 'there is no .metadata file in it'}"


class CheckpointMismatch(CheckpointError, ValueError):
    """The checkpoint at `path` does not fit this run; `report` lists the differences by key."""

    def __init__(self, path: str, report: str) -> None:
        self.path, self.report = path, report
        super().__init__(f"{path} does not fit this run:\n{report}")


class CheckpointDamaged(CheckpointError, ValueError):
    """The checkpoint at `path` is not what was committed: `finding`, about `keys`."""

    def __init__(self, path: str, finding: str, keys: Sequence[str] = ()) -> None:
        self.path, self.finding, self.keys = path, finding, tuple(keys)
        self._say(f"{path} is damaged: {self.summary}", "Resume from another step with --checkpoint.load_step")

    @property
    def summary(self) -> str:
        """Return the finding with up to three of the keys."""
        more = f" and {len(self.keys) - 3} more" if len(self.keys) > 3 else ""
        return _clause(self.finding) + (f" (in it: {', '.join(self.keys[:3])}{more})" if self.keys else "")


def _key_of(folder: str) -> str:
    """Return the option that names another folder in place of `folder`."""
    return "--checkpoint.folder" if "://" in folder else "--job.dump_folder"


class AllCheckpointsDamaged(CheckpointError, ValueError):
    """No checkpoint in `folder` is what was committed; `findings` is by step. None was changed.

    `key` is the option that names the folder; empty for that of the checkpoints.
    """

    def __init__(self, folder: str, findings: Mapping[int, str], key: str = "") -> None:
        self.folder, self.findings, self.key = folder, dict(findings), key
        other = f"--job.dump_folder and {key}" if key else _key_of(folder)
        by_step = [f"step {step}: {finding}" for step, finding in sorted(findings.items())]
        self.fact = f"every checkpoint in {folder} is damaged: {'; '.join(by_step)}"
        each = "".join(f"\n  {finding}" for finding in reversed(by_step))
        super().__init__(
            f"every checkpoint in {folder} is damaged; none of them was changed:{each}\n"
            f"Restore one of them from a copy, or start from scratch with another {other}."
        )


class CheckpointUnsafe(CheckpointError, ValueError):
    """The file or folder at `path` contains what no checkpoint needs: `finding`. Nothing in it was run or followed."""

    def __init__(self, path: str, finding: str) -> None:
        self.path, self.finding = path, finding
        self._say(
            f"{path} is not read: {_clause(finding)}; nothing in it was run",
            "If you trust its origin, load it with torch's own tools and save it again; else choose another checkpoint "
            "with --checkpoint.load_step",
        )


class CheckpointUnreadable(CheckpointError, RuntimeError):
    """The files of the checkpoint at `path` could not be read: `cause`. Nothing was changed on disk."""

    def __init__(self, path: str, cause: str) -> None:
        self.path, self.cause = path, cause
        again = "Start the same command again once it can be read; only if the step is lost, choose another with "
        self._say(f"{path} could not be read: {_clause(cause)}", f"{again}--checkpoint.load_step")


@contextmanager
def reading(place: object) -> Iterator[None]:
    """Raise `CheckpointUnreadable`, about `place`, in place of an OSError of the system in the block."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TorchtitanLiteError):
            raise
        raise CheckpointUnreadable(str(place), f"{type(error).__name__}: {error}") from error


class PinsUnreadable(CheckpointError, RuntimeError):
    """The file of pinned steps at `path` is not what was written: `finding`. No checkpoint is removed meanwhile."""

    def __init__(self, path: str, finding: str) -> None:
        self.path, self.finding = path, finding
        super().__init__(
            f"{path} does not say which steps are pinned: {_clause(finding)}. No checkpoint is removed. "
            "Correct the file, or delete it to unpin all steps."
        )


class UnknownFormat(CheckpointError, RuntimeError):
    """A file has a format that this version does not read. This is not damage.

    Nothing is changed there, and no run starts from scratch in its place.
    """

    in_short: str = "its format is unknown"
    """What is wrong with the file, without its path."""


class FormatTooNew(UnknownFormat):
    """The file at `path` has format version `found`; this version reads up to `known`."""

    def __init__(self, path: str, found: int, known: int) -> None:
        self.path, self.found, self.known = path, found, known
        self.in_short = f"it has format version {found}, this version reads up to {known}"
        self.fact = f"{path}: {self.in_short}: upgrade torchtitan_lite"
        super().__init__(
            f"{path} has format version {found}, and this version of torchtitan_lite reads up to {known}. "
            "Upgrade torchtitan_lite, or set another --job.dump_folder."
        )


class FormatTooOld(UnknownFormat):
    """The file at `path` has format version `found`, from before the first release, whose version is `known`."""

    def __init__(self, path: str, found: int, known: int) -> None:
        self.path, self.found, self.known = path, found, known
        self.in_short = f"it has format version {found}, from before the first release, whose format is {known}"
        self.fact = f"{path}: {self.in_short}: commit {LAST_WITH_EARLIER_FORMATS} of torchtitan_lite reads it"
        super().__init__(
            f"{path} has format version {found}, from before the first release, whose format is {known}. "
            f"Commit {LAST_WITH_EARLIER_FORMATS} of torchtitan_lite reads it, and with this one you need another "
            "folder: --job.dump_folder, or --checkpoint.folder."
        )


class SaveFailed(CheckpointError, RuntimeError):
    """The save of `step` did not become durable: `cause`. Earlier checkpoints are untouched."""

    def __init__(self, step: int, cause: str) -> None:
        self.step, self.cause = step, cause
        super().__init__(f"the save of step {step} failed: {_clause(cause)}. Earlier checkpoints are untouched.")


class RanksDiffer(CheckpointError, RuntimeError):
    """Ranks hold different parameters or optimizer states under one name: `finding`, with its `fix`.

    Earlier checkpoints are untouched.
    """

    def __init__(self, finding: str, fix: str) -> None:
        self.finding, self.fix = finding, fix
        super().__init__(
            f"ranks hold different tensors under one name: {_clause(finding)}. Expected parameters and optimizer "
            "states that training keeps equal, as DDP and fully_shard do: a checkpoint has one value of each name. "
            f"{_clause(fix)}."
        )


class RunNotLoaded(CheckpointError, RuntimeError):
    """`folder` has `steps` of a run that this one did not load and would overwrite. Nothing was changed."""

    def __init__(self, folder: str, steps: Sequence[int]) -> None:
        self.folder, self.steps = folder, tuple(steps)
        there = ", ".join(map(str, self.steps[-8:]))
        super().__init__(
            f"{folder} has a run's checkpoints (step {there}), and this loop saves there without having called load(). "
            "Call manager.load() before the loop to resume that run, or give this loop another folder."
        )


class WriterProcessDied(CheckpointError, RuntimeError):
    """The writer process `pid` ended, or was silent for too long, while `doing`."""

    def __init__(self, pid: int, doing: str, finding: str) -> None:
        self.pid, self.doing, self.finding = pid, doing, finding
        super().__init__(f"writer process {pid} {finding} while {doing}. The next save starts a new one.")


class FolderUnusable(CheckpointError, OSError):
    """The system refuses to list, create or write `folder`: `cause`. No step was trained.

    `key` is the option that names the folder; empty for that of the checkpoints. `fix` is what helps against the cause,
    where that is known.
    """

    def __init__(self, folder: str, cause: str, key: str = "", fix: str = "") -> None:
        self.folder, self.cause, self.key, self.fix = folder, cause, key, fix
        other = key or _key_of(folder)
        advice = f"{fix}, or set another {other}" if fix else f"Set another {other} if that cannot be put right"
        self._say(f"{folder} cannot be used for checkpoints: {_clause(cause)}", advice)


class FolderNotShared(CheckpointError, RuntimeError):
    """What rank 0 on `host` wrote into `folder` is not seen by `blind`, ranks in words. No step was trained.

    The folder is on `mount` there, empty where the system does not say.
    """

    def __init__(self, folder: str, host: str, blind: Sequence[str], mount: str = "") -> None:
        self.folder, self.host, self.blind, self.mount = folder, host, tuple(blind), mount
        super().__init__(
            f"the ranks do not share one folder for checkpoints: what rank 0 on {host} wrote into {folder}"
            f"{mount and f' ({mount})'} is not seen by {', '.join(self.blind)}. Name one that all hosts share: "
            "--job.dump_folder, or folder in a loop of your own."
        )


class FolderInUse(CheckpointError, RuntimeError):
    """Another job, `holder`, is alive and writes `folder`. Nothing was changed on disk."""

    def __init__(self, folder: str, holder: str) -> None:
        self.folder, self.holder = folder, holder
        another = f"A job may have another folder, with {_key_of(folder)}"
        self._say(f"{folder} is in use by {holder}: end that job, or wait for it", another)


class LeaseLost(CheckpointError, RuntimeError):
    """`folder` now belongs to another job, `holder`, empty for none; this one may not write it any more."""

    def __init__(self, folder: str, holder: str) -> None:
        self.folder, self.holder = folder, holder
        if holder:
            what = f"was taken from this job, which was silent for too long; it is now with {holder}"
            fix = f"Let the other job run, or end it and start this one again, or use another {_key_of(folder)}"
        else:
            what = "is no longer this job's, because its lock file is gone: it, or the folder, was moved or removed"
            fix = "If the folder was moved, move it back; then start this job again"
        self._say(f"{folder} {what}, so nothing more is committed there", fix)


class UploadRefused(CheckpointError, RuntimeError):
    """Nothing can be uploaded into the folder `address`: `finding`. What was saved on disk is unchanged."""

    def __init__(self, address: str, finding: str) -> None:
        self.address, self.finding = address, finding
        super().__init__(
            f"Nothing is uploaded to {address}: {_clause(finding)}. Name another --checkpoint.upload_folder, "
            f"or send what is missing later, with torchtitan-lite upload FOLDER {address}."
        )


class HostsDiffer(TorchtitanLiteError, RuntimeError):
    """The ranks do not fit together: `findings`, a sentence with its fix for each thing. No step was trained."""

    def __init__(self, findings: Sequence[str]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n  ".join(["the hosts of this job do not fit together:", *self.findings]))


class CorpusChanged(TorchtitanLiteError, ValueError):
    """The data at resume is not the data of the run; `changes` lists the differences."""

    def __init__(self, changes: Sequence[str]) -> None:
        self.changes = tuple(changes)
        # With another tokenizer, a new order of samples would not help: the weights belong to the old tokens.
        fix = (
            "Put the old tokenizer back (--model.tokenizer_path), or start a new run in another --job.dump_folder"
            if any(change.startswith("tokenizer:") for change in self.changes)
            else "Put the old data back, or start its sample order from scratch with "
            "--checkpoint.exclude_from_loading=dataloader"
        )
        super().__init__(f"the corpus is not the one that this run was trained on: {'; '.join(self.changes)}. {fix}.")


class TokensNotWritten(TorchtitanLiteError, RuntimeError):
    """The tokens of the corpus could not be written in `folder`: `cause`. No step was trained."""

    def __init__(self, folder: str, cause: str) -> None:
        self.folder, self.cause = folder, cause
        super().__init__(
            f"the tokens of the corpus could not be written in {folder}: {_clause(cause)}. Make room there, or set "
            "--training.tokens_folder to a folder on another disk."
        )


class ExtraMissing(TorchtitanLiteError, ImportError):
    """The `package` of the optional dependency `extra`, by default of the same name, is not installed.

    With a `finding` it is, and cannot be imported.
    """

    def __init__(self, extra: str, package: str = "", finding: str = "") -> None:
        self.extra, self.package, self.finding = extra, package or extra, finding
        what = f"cannot be imported: {_clause(finding)}" if finding else "is not installed"
        super().__init__(f"{self.package} {what}. Install it with: pip install 'torchtitan-lite[{extra}]'")

    @classmethod
    def of(cls, error: ImportError, extra: str, package: str = "") -> ExtraMissing:
        """Return what `error` of an import of the package means: it is missing, or something that it needs."""
        is_missing = isinstance(error, ModuleNotFoundError)
        missing = (error.name or "").partition(".")[0] if is_missing else ""
        return cls(extra, package, "" if missing == (package or extra) else str(error) or type(error).__name__)


class KeeperUnavailable(TorchtitanLiteError, RuntimeError):
    """No process keeps checkpoints in memory, because of `reason`. Training continues, and resumes from the disk."""

    def __init__(self, reason: str) -> None:
        self.reason, self.fact = reason, f"what is kept in memory is not known: {reason}"
        super().__init__(f"there are no in-memory snapshots: {_clause(reason)}")


class PeerLost(TorchtitanLiteError, RuntimeError):
    """`rank` noticed in an exchange that another rank has ended or does not answer: `finding`."""

    def __init__(self, rank: int, finding: str) -> None:
        self.rank, self.finding = rank, finding
        super().__init__(
            f"rank {rank} {_clause(finding)}: see the first error in the output of the other ranks, or look for an "
            "out-of-memory kill in the logs of their hosts."
        )


class TrainingDiverged(TorchtitanLiteError, ArithmeticError):
    """`step` is not to be kept, for `reason`; no update was made with it.

    `tried` has the last rollbacks of the run, and `obstacle` says why it does not roll back; empty if it is not to roll
    back by itself.
    """

    def __init__(self, step: int, reason: str, tried: Sequence[str] = (), obstacle: str = "") -> None:
        self.step, self.reason, self.tried, self.obstacle = step, reason, tuple(tried), obstacle
        text = f"step {step}: {_clause(reason)}; stopped before it was applied. "
        if obstacle:
            text += f"The run does not roll back{' again' if tried else ''}: {_clause(obstacle)}. "
        if tried:
            times = "once" if len(tried) == 1 else f"{len(tried)} times"
            text += f"It rolled back {times}: {'; '.join(tried)}. "
        super().__init__(f"{text}Roll back with --checkpoint.load_step, and lower optimizer.lr or training.max_norm.")
