"""`prune`: remove the checkpoints that no rule keeps.

The decision is that of a training job, by the same function; with --dry-run it is printed and nothing else.
`kept_by` in the JSON has the keys of the rules, and `pinned`, `latest`, `latest_without_nan`, `latest_of_equal_ranks`,
`weights_only`, `damaged` and `no_rule`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from torchtitan_lite.cli.exit_codes import ExitCode, sentence_of
from torchtitan_lite.cli.screen import Screen, plain_table
from torchtitan_lite.cli.writing_verbs import (
    has_only_others,
    holding,
    recover_with_notes,
    refuse_without_checkpoints,
    store_to_write,
)
from torchtitan_lite.config.address import is_address
from torchtitan_lite.config.argument_parser import Option, Positional
from torchtitan_lite.config.checks import at_least, not_negative
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.durable import DISK, Durable
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import counted, readable_bytes
from torchtitan_lite.store import retention
from torchtitan_lite.store.housekeeping import build_housekeeping
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.store.retention import Verdict, build_retention

if TYPE_CHECKING:
    from rich.console import RenderableType

    from torchtitan_lite.examining.others_outlook import OtherVerdict


@dataclass(frozen=True)
class Prune:
    """Remove the checkpoints that no rule keeps.

    The latest one, pinned ones and exported weights always stay. In a folder of
    another library it only prints, unless --yes is given; there also stay what
    is named as best or last, and what is young or not known to be complete.
    """

    folder: Annotated[str, Positional("FOLDER")]
    """A folder of checkpoints, or the dump folder of a run."""
    keep_latest: Annotated[int, Option("K")] = 0
    """Keep the latest K full checkpoints."""
    keep_every_n_steps: Annotated[int, Option("N")] = 0
    """Keep those whose step is a multiple of N."""
    keep_best: Annotated[int, Option("K")] = 0
    """Keep the K with the best value of --metric."""
    metric: Annotated[str, Option("NAME")] = "loss"
    """The metric for --keep-best, as the run recorded it: its lowest values are the best; with max:NAME its highest."""
    keep_for_hours: Annotated[float, Option("HOURS")] = 0.0
    """Keep those that were saved at most this many hours ago."""
    min_free_disk_gb: Annotated[float, Option("GB")] = 0.0
    """While the disk has less free, in 10^9 bytes, remove the oldest that only --keep-latest, or no rule, keeps."""
    dry_run: bool = False
    """Print what would be removed, and by which rule the others stay; change nothing."""
    yes: bool = False
    """Remove what is listed in a folder of another library, too."""
    min_age: Annotated[float, Option("HOURS")] = 1.0
    """In a folder of another library, keep what has a file that was written at most this many hours ago."""

    def run(self, screen: Screen) -> ExitCode:
        config = self.rules()
        store = store_to_write(self.folder, screen)
        if self.min_free_disk_gb and is_address(self.folder):
            raise ConfigError(f"--min-free-disk-gb: {store.address} is in an object store, which always has room")
        if has_only_others(store):
            return prune_others(self, store, screen)
        if self.yes:
            raise ConfigError(f"--yes is for checkpoints of other libraries: {store.address} has none, or others too")
        refuse_without_checkpoints(store)
        gone: set[int] = set()
        housekeeping = build_housekeeping(config, build_retention(config), lambda event: gone.add(event.step))
        if self.dry_run:
            self._show(housekeeping.verdicts(store), store, screen)
            return ExitCode.FINE
        with holding(store, "prune") as lease:
            verdicts = housekeeping.verdicts(store)
            housekeeping.remove([verdict.info for verdict in verdicts if verdict.goes], store)
            lease.check()
            recover_with_notes(store, screen)
            verdicts = _as_done(verdicts, gone, store)
        self._show(verdicts, store, screen)
        return ExitCode.FAILED if any(verdict.kept_by == (FAILED,) for verdict in verdicts) else ExitCode.FINE

    def rules(self) -> Checkpoint:
        """Return the rules as the keys of a run's configuration. Raise ConfigError for wrong values, and for none."""
        for flag, number in (
            ("--keep-latest", self.keep_latest),
            ("--keep-every-n-steps", self.keep_every_n_steps),
            ("--keep-best", self.keep_best),
        ):
            at_least(flag, number, 0)
        not_negative("--keep-for-hours", self.keep_for_hours)
        not_negative("--min-free-disk-gb", self.min_free_disk_gb)
        not_negative("--min-age", self.min_age)
        if self.yes and self.dry_run:
            raise ConfigError("--yes removes and --dry-run removes nothing: give one of them")
        if self.metric in ("", "min:", "max:"):
            raise ConfigError("--metric: expected the name of a metric, found an empty string.")
        rules = (self.keep_latest, self.keep_every_n_steps, self.keep_best, self.keep_for_hours, self.min_free_disk_gb)
        if not any(rules):
            raise ConfigError(
                "no rule is given, so every checkpoint would stay: set --keep-latest, --keep-every-n-steps, "
                "--keep-best, --keep-for-hours or --min-free-disk-gb"
            )
        return Checkpoint(
            keep_latest_k=self.keep_latest,
            keep_every_n_steps=self.keep_every_n_steps,
            keep_best_k=self.keep_best,
            keep_best_metric=self.metric,
            keep_for_hours=self.keep_for_hours,
            min_free_disk_gb=self.min_free_disk_gb,
        )

    def _show(self, verdicts: list[Verdict], store: StoresCheckpoints, screen: Screen) -> None:
        name, _ = self.rules().best_metric
        if self.keep_best and not any(name in verdict.info.metrics for verdict in verdicts):
            screen.note(f"note: no checkpoint records the metric {name!r}, so none is the best")
        skipped = {step: error.finding for step, error in store.damaged().items()}
        for step, reason in skipped.items():
            screen.note(f"note: step {step} is neither counted nor removed: {reason}")
        skipped |= {step: error.cause for step, error in store.unreadable().items()}  # The store warns of these.
        going = [verdict.info for verdict in verdicts if verdict.goes]
        data = {
            "folder": store.address,
            "dry_run": self.dry_run,
            "removed_bytes": sum(info.nbytes for info in going),
            "checkpoints": [_verdict_json(verdict) for verdict in verdicts],
            "not_counted": [{"step": step, "reason": reason} for step, reason in skipped.items()],
        }
        screen.show(data, lambda: self._table(verdicts))

    def _table(self, verdicts: list[Verdict]) -> RenderableType:
        from rich.console import Group

        table = plain_table("step", "size", "what happens", padding=(0, 1))
        for verdict in verdicts:
            what = removed(verdict.for_space, self.dry_run) if verdict.goes else kept(verdict.kept_by, self.words())
            table.add_row(str(verdict.info.step), readable_bytes(verdict.info.nbytes), what)
        going = [verdict.info.nbytes for verdict in verdicts if verdict.goes]
        return Group(table, total_removed(going, len(verdicts), self.dry_run))

    def words(self) -> dict[str, str]:
        """Return what each rule and reason that keeps a checkpoint is called on the screen."""
        return {
            retention.LATEST_K: f"latest {self.keep_latest}",
            retention.EVERY_N: f"every {self.keep_every_n_steps}",
            retention.BEST_K: f"best {self.keep_best} by {self.metric}",
            retention.FOR_HOURS: f"not older than {self.keep_for_hours:g} h",
            retention.NO_RULE: f"no {self.rules().best_metric[0]} to compare" if self.keep_best else "no rule",
            retention.PINNED: "pinned",
            retention.LATEST: "the latest",
            retention.WITHOUT_NAN: "the latest without NaN",
            retention.EQUAL_RANKS: "the latest whose ranks were equal",
            retention.WEIGHTS_ONLY: "weights only",
            retention.DAMAGED: "damaged: neither counted nor removed",
        }


FAILED = "could_not_be_removed"
"""What keeps a checkpoint that the disk would not remove."""


def removed(for_space: bool, dry_run: bool) -> str:
    """Return what happens to a checkpoint that goes."""
    return ("would be removed" if dry_run else "removed") + (", for free space" if for_space else "")


def kept(reasons: Sequence[str], words: Mapping[str, str]) -> str:
    """Return why a checkpoint stays, in the `words` for its `reasons`."""
    if FAILED in reasons:
        return "could not be removed"
    implied = {retention.WITHOUT_NAN} if retention.LATEST in reasons else set()
    return "kept: " + ", ".join(words[reason] for reason in reasons if reason not in implied)


def total_removed(going: Sequence[int], count: int, dry_run: bool) -> str:
    """Return the last line: how many of `count` checkpoints go, of which `going` has the bytes."""
    freed = f" ({readable_bytes(sum(going))})" if going else ""
    return f"\n{len(going)} of {counted(count, 'checkpoint')} {'would be ' if dry_run else ''}removed{freed}"


def _as_done(verdicts: list[Verdict], gone: set[int], store: StoresCheckpoints) -> list[Verdict]:
    """Return what became of `verdicts`: a checkpoint may have been pinned meanwhile, or the disk may have failed."""
    pinned = store.pins.read()
    done = []
    for verdict in verdicts:
        if verdict.goes and verdict.info.step not in gone:
            reason = retention.PINNED if verdict.info.step in pinned else FAILED
            done.append(Verdict(verdict.info, (reason,)))
        else:
            done.append(verdict)
    return done


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    info = verdict.info
    return {
        "step": info.step,
        "path": str(info.path),
        "bytes": info.nbytes,
        "created_at": info.created_at,
        "metrics": dict(info.metrics),
        "kept_by": list(verdict.kept_by),
        "removed": verdict.goes,
        "for_space": verdict.for_space,
    }


# In a folder of another library: print what no rule keeps, and remove it only with --yes.
#
# There is no lease that its writer would heed. So nothing goes but the files that were listed, as they were then, and
# only while the checkpoint that makes it superfluous is still there.


def prune_others(verb: Prune, store: StoresCheckpoints, screen: Screen, durable: Durable = DISK) -> ExitCode:
    """Print what becomes of each checkpoint in `store`, and with --yes remove those that no rule keeps."""
    from torchtitan_lite.examining.others_outlook import OthersOutlook  # numpy, to look for NaN.

    rules, root = verb.rules(), Path(store.address)
    missing_bytes = max(0, wanted - store.free_bytes()) if (wanted := round(rules.min_free_disk_gb * 1e9)) else 0
    policy, min_age_seconds = build_retention(rules), verb.min_age * 3600
    outlook = OthersOutlook(policy, min_age_seconds, time.time(), missing_bytes, screen.progress)
    verdicts = outlook.verdicts(root)
    going = [verdict for verdict in verdicts if verdict.goes]
    done, stopped = _remove_listed(going, durable) if verb.yes else (going, "")
    data = {
        "folder": str(root),
        "dry_run": not verb.yes,
        "removed_bytes": sum(verdict.checkpoint.nbytes for verdict in done),
        "checkpoints": [_other_verdict_json(verdict, verdict in done, verb.yes) for verdict in verdicts],
        "stopped": stopped,
    }
    screen.show(data, lambda: _table_of_others(verb, verdicts, done, stopped))
    return ExitCode.FAILED if stopped else ExitCode.FINE


def _remove_listed(going: Sequence[OtherVerdict], durable: Durable) -> tuple[Sequence[OtherVerdict], str]:
    """Remove those that go, the oldest first; return those that are gone, and why it stopped, if it did."""
    for at, verdict in enumerate(going):
        other, stays = verdict.checkpoint, verdict.stays
        try:
            if stays is not None and (finding := stays.tree.change()):
                return going[:at], f"{stays.name}, which was to stay, is another one: {finding}"
            if finding := other.tree.remove(other.first_to_go(), durable):
                return going[:at], f"{other.name}: {finding}"
        except OSError as error:
            return going[:at], f"{other.name} could not be removed: {sentence_of(error)}"
    return going, ""


def _table_of_others(
    verb: Prune, verdicts: Sequence[OtherVerdict], done: Sequence[OtherVerdict], stopped: str
) -> RenderableType:
    from rich.console import Group

    table = plain_table("name", "files", "size", "what happens", padding=(0, 1))
    words = _words_of_others(verb, any(retention.DAMAGED in verdict.kept_by for verdict in verdicts))
    for verdict in verdicts:
        other = verdict.checkpoint
        num_files, left = len(other.tree.files), other.tree.num_left
        if not verdict.goes:
            what = kept(verdict.kept_by, words) + (f": {verdict.finding}" if verdict.finding else "")
        elif verdict in done:
            what = removed(verdict.for_space, dry_run=not verb.yes)
        else:
            what = "not removed" if left == num_files else f"removed in part: {left} of its {num_files} files are left"
        table.add_row(other.name, str(num_files or ""), readable_bytes(other.nbytes), what)
    end = total_removed([verdict.checkpoint.nbytes for verdict in done], len(verdicts), dry_run=not verb.yes)
    end += ": nothing is removed without --yes" if done and not verb.yes else ""
    end += f"\nStopped: {stopped}. Run it again for what is there now." if stopped else ""
    return Group(table, end)


def _words_of_others(verb: Prune, has_damaged: bool) -> dict[str, str]:
    from torchtitan_lite.examining import others_outlook  # as above

    return {
        **verb.words(),
        retention.LATEST: "the latest that is intact" if has_damaged else "the latest",
        retention.DAMAGED: "damaged",
        others_outlook.INCOMPLETE: "not known to be complete",
        others_outlook.NO_STEP: "no step in its name",
        others_outlook.NAMED: "named as best or last",
        others_outlook.NOT_KNOWN: "which is the best is not known",
        others_outlook.YOUNG: f"younger than {verb.min_age:g} h",
    }


def _other_verdict_json(verdict: OtherVerdict, is_done: bool, removes: bool) -> dict[str, Any]:
    other = verdict.checkpoint
    return {
        "name": other.name,
        "path": str(other.path),
        "written_by": other.origin.value if other.origin is not None else None,
        "step": other.step,
        "bytes": other.nbytes,
        "created_at": other.created_at,
        "files": sorted(other.tree.files),
        "files_left": 0 if is_done and removes else other.tree.num_left,
        "kept_by": list(verdict.kept_by),
        "finding": verdict.finding,
        "removed": is_done,
        "for_space": verdict.for_space,
    }
