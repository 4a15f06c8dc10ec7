"""What `verify` found in each checkpoint, as JSON and on the screen."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lite.cli.exit_codes import sentence_of
from torchtitan_lite.log import counted, listed, readable_bytes
from torchtitan_lite.store.place import Place

if TYPE_CHECKING:
    from rich.console import RenderableType

    from torchtitan_lite.examining.file_digests import Finding
    from torchtitan_lite.examining.listed_tree import FileState
    from torchtitan_lite.examining.verification import Looked, Read

INTACT, DAMAGED, GONE, UNREADABLE, UNKNOWN = "intact", "damaged", "removed", "unreadable", "unknown format"
_SHOWN_FILES = 3
_SHOWN_FINDINGS = 10
_STYLES = {INTACT: "green", DAMAGED: "bold red", UNREADABLE: "bold red"}


@dataclass
class VerifyResult:
    """One checkpoint, and what is known of it so far."""

    folder: Place
    status: str = INTACT
    reason: str = ""
    """Why it is not verified; empty if it is."""
    looked: Looked | None = None
    read: Read | None = None
    findings: list[Finding] = field(default_factory=list)
    before: Mapping[str, FileState] | None = None
    """The states of its files before they were read, if a record is to be written."""
    recorded_in: Path | None = None
    """The record that was written."""

    @property
    def name(self) -> str:
        return self.folder.absolute().name

    def add(self, findings: Sequence[Finding]) -> None:
        """Add what was found wrong with it."""
        self.findings += findings
        if self.findings:
            self.status = DAMAGED

    def leave(self, status: str, error: Exception) -> None:
        """Give it this status, because `error` ended its verification."""
        self.status, self.reason, self.findings = status, sentence_of(error), []

    @property
    def compared_with(self) -> str:
        """Return what its bytes were compared with: "digests", "checksums" or, if they were not read, ""."""
        if self.read is None or self.looked is None:
            return ""
        return "digests" if self.looked.has_digests else "checksums"

    def to_json(self) -> dict[str, Any]:
        """Return all that is known of it."""
        looked = self.looked
        document: dict[str, Any] = {
            "name": self.name,
            "path": str(self.folder),
            "status": self.status,
            "reason": self.reason,
            "findings": [{"file": each.file, "finding": each.text, "keys": list(each.keys)} for each in self.findings],
        }
        if looked is not None:
            document |= {
                "has_manifest": looked.manifest is not None,
                "files": len(looked.sizes),
                "tensors": 0 if looked.contents is None else len(looked.contents.tensors),
                "bytes": looked.nbytes,
                "unknown_files": list(looked.unknown),
            }
            if looked.manifest is None and (self.recorded_in is not None or looked.recorded is not None):
                document["record"] = {
                    "written": str(self.recorded_in) if self.recorded_in is not None else None,
                    "compared_with_that_of": looked.recorded.created_at if looked.recorded is not None else None,
                }
        if self.read is not None:
            document |= {"compared_with": self.compared_with, "without_checksum": self.read.num_without_checksum}
            document |= {"nan_in": list(self.read.nan_in)}
        return document


def rendered(results: Sequence[VerifyResult], full: bool, seconds: float) -> RenderableType:
    """Return the table, the findings and the summary of `results`, read in `seconds` if in `full`."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 3, 0, 0))
    for column in ("name", "status"):
        table.add_column(column, no_wrap=True)
    for column in ("files", "tensors", "size"):
        table.add_column(column, no_wrap=True, justify="right")
    parts: list[RenderableType] = [Padding(table, (0, 0, 0, 2))]
    for result in results:
        status = Text(result.status.upper() if result.status == DAMAGED else result.status)
        status.stylize(_STYLES.get(result.status, ""))
        table.add_row(result.name, status, *_figures(result))
        if result.findings or result.reason:
            parts += ["", result.name, *_details(result)]
    return Group(*parts, "", *_verify_summary(results, full, seconds))


def _figures(result: VerifyResult) -> list[str]:
    looked = result.looked
    if looked is None or looked.contents is None:
        return ["", "", ""]
    num_files, num_tensors = len(looked.sizes), len(looked.contents.tensors)
    return [counted(num_files, "file"), counted(num_tensors, "tensor"), readable_bytes(looked.nbytes)]


def _details(result: VerifyResult) -> list[RenderableType]:
    from rich.padding import Padding

    lines: list[tuple[int, str]] = [(2, result.reason)] if result.reason else []
    for finding in result.findings[:_SHOWN_FINDINGS]:
        lines.append((2, f"{finding.file}: {finding.text}" if finding.file else finding.text))
        if finding.keys:
            lines.append((4, f"in it: {listed(finding.keys)}"))
    if result.findings and result.looked is not None and result.looked.recorded is not None:
        since = _date(result.looked.recorded.created_at)
        lines.append(
            (2, f"Recorded on {since}. If it was saved again since, replace the record with --record --again.")
        )
    if len(result.findings) > _SHOWN_FINDINGS:
        lines.append((2, f"... and {len(result.findings) - _SHOWN_FINDINGS} more; --json has all of them"))
    return [Padding(text, (0, 0, 0, indent)) for indent, text in lines]


def _verify_summary(results: Sequence[VerifyResult], full: bool, seconds: float) -> list[str]:
    verified = [result for result in results if not result.reason]
    num_damaged = sum(result.status == DAMAGED for result in verified)
    what = counted(len(verified), "checkpoint")
    if not full:
        end = f"{num_damaged} damaged" if num_damaged else "nothing is missing or truncated"
        lines = [f"{what}, sizes only: {end}. No byte was read."]
    else:
        end = f"{num_damaged} damaged" if num_damaged else "nothing is damaged"
        nbytes = sum(result.looked.nbytes for result in verified if result.read is not None and result.looked)
        speed = f" ({seconds:.1f} s, {readable_bytes(int(nbytes / seconds))}/s)" if seconds >= 0.1 else ""
        lines = [f"{what}, every byte{speed}: {end}."]
    for result in verified:
        name = result.name
        if result.recorded_in is not None:
            num_files = counted(len(result.before or ()), "file")
            lines.append(f"{name}: the digests of {num_files} are recorded now, in {result.recorded_in}.")
        elif result.before is not None and result.findings:
            lines.append(f"{name}: no record is written, because it is damaged.")
        elif result.looked is not None and result.looked.recorded is not None and full:
            lines.append(f"{name}: compared with the digests recorded on {_date(result.looked.recorded.created_at)}.")
        elif result.compared_with == "checksums":
            lines.append(f"{name} has no digests: compared with the checksums that torch.save wrote.")
        if result.read is not None and result.read.num_without_checksum:
            count, of = result.read.num_without_checksum, result.read.num_items
            lines.append(f"{name}: {count} of {counted(of, 'item')} without a checksum, so not compared by value.")
        if result.read is not None and result.read.nan_in:
            lines.append(f"{name}: NaN is in {listed(result.read.nan_in)}.")
        if result.looked is not None and result.looked.unknown:
            lines.append(f"{name} has other files, too: {', '.join(result.looked.unknown[:_SHOWN_FILES])}.")
    return lines


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
