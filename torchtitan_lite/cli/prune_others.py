"""`prune` in a folder of another library: print what no rule keeps, and remove it only with --yes.

There is no lease that its writer would heed. So nothing goes but the files that were listed, as they were then, and
only while the checkpoint that makes it superfluous is still there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lite.cli.exit_codes import ExitCode, sentence_of
from torchtitan_lite.cli.screen import Screen, plain_table
from torchtitan_lite.disk.durable import DISK, Durable
from torchtitan_lite.examining import others_outlook
from torchtitan_lite.examining.others_outlook import OthersOutlook, OtherVerdict
from torchtitan_lite.log import counted, readable_bytes
from torchtitan_lite.store import retention
from torchtitan_lite.store.retention import RetentionPolicy

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class PruneOthers:
    """What is to stay, and whether the rest is removed."""

    root: Path
    policy: RetentionPolicy
    missing_bytes: int
    min_age_seconds: float
    removes: bool
    words: Mapping[str, str]
    """What the rules are called on the screen."""

    def run(self, screen: Screen, durable: Durable = DISK) -> ExitCode:
        """Print what becomes of each checkpoint, and if it `removes`, remove those that no rule keeps."""
        outlook = OthersOutlook(self.policy, self.min_age_seconds, time.time(), self.missing_bytes, screen.progress)
        verdicts = outlook.verdicts(self.root)
        going = [verdict for verdict in verdicts if verdict.goes]
        removed, stopped = self._remove(going, durable) if self.removes else ([], "")
        done = removed if self.removes else going
        data = {
            "folder": str(self.root),
            "dry_run": not self.removes,
            "removed_bytes": sum(verdict.checkpoint.nbytes for verdict in done),
            "checkpoints": [_other_verdict_json(verdict, verdict in done, self.removes) for verdict in verdicts],
            "stopped": stopped,
        }
        screen.show(data, lambda: self._table(verdicts, done, stopped))
        return ExitCode.FAILED if stopped else ExitCode.FINE

    def _remove(self, going: Sequence[OtherVerdict], durable: Durable) -> tuple[list[OtherVerdict], str]:
        """Remove those that go, the oldest first; return those that are gone, and why it stopped, if it did."""
        removed: list[OtherVerdict] = []
        for verdict in going:
            other, stays = verdict.checkpoint, verdict.stays
            try:
                if stays is not None and (finding := stays.tree.change()):
                    return removed, f"{stays.name}, which was to stay, is another one: {finding}"
                if finding := other.tree.remove(other.first_to_go(), durable):
                    return removed, f"{other.name}: {finding}"
            except OSError as error:
                return removed, f"{other.name} could not be removed: {sentence_of(error)}"
            removed.append(verdict)
        return removed, ""

    def _table(self, verdicts: Sequence[OtherVerdict], done: Sequence[OtherVerdict], stopped: str) -> RenderableType:
        from rich.console import Group

        table = plain_table("name", "files", "size", "what happens", padding=(0, 1))
        words = self._words(any(retention.DAMAGED in verdict.kept_by for verdict in verdicts))
        for verdict in verdicts:
            other = verdict.checkpoint
            num_files = str(len(other.tree.files) or "")
            what = self._in_words(verdict, verdict in done, words)
            table.add_row(other.name, num_files, readable_bytes(other.nbytes), what)
        size = f" ({readable_bytes(sum(verdict.checkpoint.nbytes for verdict in done))})" if done else ""
        would = "" if self.removes else "would be "
        end = f"\n{len(done)} of {counted(len(verdicts), 'checkpoint')} {would}removed{size}"
        end += ": nothing is removed without --yes" if done and not self.removes else ""
        end += f"\nStopped: {stopped}. Run it again for what is there now." if stopped else ""
        return Group(table, end)

    def _in_words(self, verdict: OtherVerdict, is_done: bool, words: Mapping[str, str]) -> str:
        if verdict.goes and not is_done:
            left, listed = verdict.checkpoint.tree.num_left, len(verdict.checkpoint.tree.files)
            return "not removed" if left == listed else f"removed in part: {left} of its {listed} files are left"
        if verdict.goes:
            return ("" if self.removes else "would be ") + "removed" + (", for free space" if verdict.for_space else "")
        implied = {retention.WITHOUT_NAN} if retention.LATEST in verdict.kept_by else set()
        reasons = ", ".join(words[reason] for reason in verdict.kept_by if reason not in implied)
        return f"kept: {reasons}" + (f": {verdict.finding}" if verdict.finding else "")

    def _words(self, has_damaged: bool) -> dict[str, str]:
        return {
            **self.words,
            retention.LATEST: "the latest that is intact" if has_damaged else "the latest",
            retention.DAMAGED: "damaged",
            others_outlook.INCOMPLETE: "not known to be complete",
            others_outlook.NO_STEP: "no step in its name",
            others_outlook.NAMED: "named as best or last",
            others_outlook.NOT_KNOWN: "which is the best is not known",
            others_outlook.YOUNG: f"younger than {self.min_age_seconds / 3600:g} h",
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
