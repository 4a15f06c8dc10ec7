"""`prune`: remove the checkpoints that no rule keeps.

The decision is that of a training job, by the same function; with --dry-run it is printed and nothing else.
`kept_by` in the JSON has the keys of the rules, and `pinned`, `latest`, `latest_without_nan`, `latest_of_equal_ranks`,
`weights_only`, `damaged` and `no_rule`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from torchtitan_lite.cli.exit_codes import ExitCode
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
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import counted, readable_bytes
from torchtitan_lite.store import retention
from torchtitan_lite.store.housekeeping import build_housekeeping
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.store.retention import Verdict, build_retention

if TYPE_CHECKING:
    from rich.console import RenderableType

    from torchtitan_lite.cli.prune_others import PruneOthers


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
        config = self._config()
        store = store_to_write(self.folder, screen)
        if self.min_free_disk_gb and is_address(self.folder):
            raise ConfigError(f"--min-free-disk-gb: {store.address} is in an object store, which always has room")
        if has_only_others(store):
            return self._others(store, config).run(screen)
        if self.yes:
            raise ConfigError(f"--yes is for checkpoints of other libraries: {store.address} has none, or others too")
        refuse_without_checkpoints(store)
        removed: set[int] = set()
        housekeeping = build_housekeeping(config, build_retention(config), lambda event: removed.add(event.step))
        if self.dry_run:
            self._show(housekeeping.verdicts(store), store, screen)
            return ExitCode.FINE
        with holding(store, "prune") as lease:
            verdicts = housekeeping.verdicts(store)
            housekeeping.remove([verdict.info for verdict in verdicts if verdict.goes], store)
            lease.check()
            recover_with_notes(store, screen)
            verdicts = _as_done(verdicts, removed, store)
        self._show(verdicts, store, screen)
        return ExitCode.FAILED if any(verdict.kept_by == (FAILED,) for verdict in verdicts) else ExitCode.FINE

    def _config(self) -> Checkpoint:
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
        name, _ = self._config().best_metric
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
            table.add_row(str(verdict.info.step), readable_bytes(verdict.info.nbytes), self._in_words(verdict))
        going = [verdict.info.nbytes for verdict in verdicts if verdict.goes]
        would = "would be " if self.dry_run else ""
        freed = f" ({readable_bytes(sum(going))})" if going else ""
        return Group(table, f"\n{len(going)} of {counted(len(verdicts), 'checkpoint')} {would}removed{freed}")

    def _in_words(self, verdict: Verdict) -> str:
        if verdict.goes:
            done = "would be removed" if self.dry_run else "removed"
            return f"{done}, for free space" if verdict.for_space else done
        if verdict.kept_by == (FAILED,):
            return "could not be removed"
        words = self._words()
        implied = {retention.WITHOUT_NAN} if retention.LATEST in verdict.kept_by else set()
        return "kept: " + ", ".join(words[reason] for reason in verdict.kept_by if reason not in implied)

    def _words(self) -> dict[str, str]:
        """Return what each rule and reason that keeps a checkpoint is called on the screen."""
        return {
            retention.LATEST_K: f"latest {self.keep_latest}",
            retention.EVERY_N: f"every {self.keep_every_n_steps}",
            retention.BEST_K: f"best {self.keep_best} by {self.metric}",
            retention.FOR_HOURS: f"not older than {self.keep_for_hours:g} h",
            retention.NO_RULE: f"no {self._config().best_metric[0]} to compare" if self.keep_best else "no rule",
            retention.PINNED: "pinned",
            retention.LATEST: "the latest",
            retention.WITHOUT_NAN: "the latest without NaN",
            retention.EQUAL_RANKS: "the latest whose ranks were equal",
            retention.WEIGHTS_ONLY: "weights only",
            retention.DAMAGED: "damaged: neither counted nor removed",
        }

    def _others(self, store: StoresCheckpoints, config: Checkpoint) -> PruneOthers:
        from torchtitan_lite.cli.prune_others import PruneOthers  # numpy, to look for NaN.

        return PruneOthers(
            Path(store.address),
            build_retention(config),
            max(0, wanted - store.free_bytes()) if (wanted := round(config.min_free_disk_gb * 1e9)) else 0,
            self.min_age * 3600,
            self.yes,
            self._words(),
        )


FAILED = "could_not_be_removed"
"""What keeps a checkpoint that the disk would not remove."""


def _as_done(verdicts: list[Verdict], removed: set[int], store: StoresCheckpoints) -> list[Verdict]:
    """Return what became of `verdicts`: a checkpoint may have been pinned meanwhile, or the disk may have failed."""
    pinned = store.pins.read()
    done = []
    for verdict in verdicts:
        if verdict.goes and verdict.info.step not in removed:
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
