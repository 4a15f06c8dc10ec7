"""Where the time of a run went, over all its starts: what a ledger says. Pure, without torch.

The parts are disjoint, and those of a start sum to the time from its start to its last beat. The time between two
starts is `down`, or `idle` if the run had finished before. So all parts together sum to the time from the first start
to the last beat. `ledger` writes the lines; docs/watching.md describes the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan_lite.events import Committed, Finished, Loaded, Preempted, is_figure
from torchtitan_lite.json_lines import object_in

LEDGER_FILE = "ledger.jsonl"
LATEST_BEAT_FILE = "ledger.now"
"""The beat of the last step, overwritten at each step."""

PARTS = (
    *("starting", "loading", "compiling", "productive", "redone", "saving", "waiting_for_data", "leaving", "other"),
    *("down", "idle"),
)
"""Every part: those of a start, and `down` and `idle` between two starts."""
PARTS_OF_A_START = PARTS[:-2]
START, LOADED, ROLLED_BACK, COMMITTED, BEAT, END = "start", Loaded.name, "rolled_back", Committed.name, "beat", "end"
"""The records of a ledger. Where one is an event, too, it has its name.

Each has the id of its `start` and the `time` in Unix seconds. `start` also has host, pid, world_size, topology and
version; `loaded` has step, from, seconds, durable_step and at_risk_seconds; `committed` has step, blocked, seconds,
bytes, slowest_rank and slowest_seconds; `rolled_back` has step and from_step; `beat` has step, durable_step,
at_risk_seconds and seconds by part; `end` has the same and why, and for `preempted` the signal.
"""
FAILED = "failed"
CLEAN_ENDS = (Finished.name, Preempted.name)
"""How a start ended, in the last record of it."""


@dataclass(frozen=True)
class Start:
    """One start of a run, as far as its lines go."""

    id: str
    began: float
    """Unix seconds."""
    last_beat: float
    """Unix seconds of its last sign of life."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By part, up to the last beat."""
    loaded_step: int | None = None
    """The step before the first one that it trained; None if it did not come so far."""
    loaded_from: str = ""
    """checkpoint, memory, seed, initial or fresh."""
    last_step: int = 0
    """The last step that it trained."""
    durable_step: int = 0
    """The step from which the next start resumes."""
    at_risk_seconds: float = 0.0
    """Seconds since that step, at the last beat."""
    rollbacks: tuple[tuple[int, int], ...] = ()
    """Of each roll-back by itself: the last step that it had trained, and the one that it loaded."""
    end: str = ""
    """finished, preempted or failed; empty if it was killed, or is running."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """The other fields of its first line: host, pid, world_size, topology, version."""

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The steps that it trained, in their order: each span is after its first number, up to its second."""
        if self.loaded_step is None:
            return ()
        loaded = (self.loaded_step, *(step for _, step in self.rollbacks))
        return tuple(zip(loaded, (*(step for step, _ in self.rollbacks), self.last_step), strict=True))

    @property
    def is_clean(self) -> bool:
        """Whether it finished or left for a signal."""
        return self.end in CLEAN_ENDS


@dataclass(frozen=True)
class Accounts:
    """All starts of a run, in their order."""

    starts: tuple[Start, ...] = ()
    _before: Accounts | None = field(default=None, repr=False, compare=False)
    """Those of all starts but the last, if they are at hand: sums over them are not made again."""

    @cached_property
    def _sums(self) -> tuple[dict[str, float], int, Steps]:
        """The seconds by part, the steps that were trained again, and all that were trained."""
        seconds, redone, steps = self._before._sums if self._before else (dict.fromkeys(PARTS, 0.0), 0, Steps())
        seconds, last = dict(seconds), self._before.starts[-1:] if self._before else ()
        for start in self.starts[len(self._before.starts) if self._before else 0 :]:
            for part in PARTS_OF_A_START:
                seconds[part] += start.seconds.get(part, 0.0)
            for earlier in last:
                seconds["idle" if earlier.end == Finished.name else "down"] += max(0.0, start.began - earlier.last_beat)
            for span in start.spans:
                redone, steps = redone + steps.overlap(*span), steps.and_also(*span)
            last = (start,)
        return seconds, redone, steps

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by part, each of `PARTS`, over all starts."""
        return dict(self._sums[0])

    @property
    def steps(self) -> Steps:
        """The steps that any start trained."""
        return self._sums[2]

    @property
    def wall_seconds(self) -> float:
        """Seconds from the first start to the last beat."""
        return self.starts[-1].last_beat - self.starts[0].began if self.starts else 0.0

    @property
    def hours(self) -> float:
        """Hours that the starts ran, all together."""
        return sum(start.last_beat - start.began for start in self.starts) / 3600

    @property
    def goodput(self) -> float:
        """The share of the time that went into productive steps, without the time after the run had finished."""
        seconds = self.seconds
        counted = sum(seconds.values()) - seconds["idle"]
        return seconds["productive"] / counted if counted > 0 else 0.0

    @property
    def redone_steps(self) -> int:
        """Steps that were trained again, that an earlier start had trained, or the same one before it rolled back."""
        return self._sums[1]

    @property
    def unclean_ends(self) -> int:
        """Starts that trained and neither finished nor left for a signal; the last one, if it may run, is not in."""
        return sum(
            start.loaded_step is not None and not start.is_clean
            for start in self.starts
            if start.end or start is not self.starts[-1]
        )


@dataclass(frozen=True)
class Steps:
    """Steps that were trained, as disjoint spans in their order; each is after its first number, up to its second."""

    spans: tuple[tuple[int, int], ...] = ()

    def __contains__(self, step: int) -> bool:
        return any(low < step <= high for low, high in self.spans)

    def overlap(self, low: int, high: int) -> int:
        """Return how many of the steps after `low` up to `high` are in."""
        return sum(max(0, min(high, other_high) - max(low, other_low)) for other_low, other_high in self.spans)

    def and_also(self, low: int, high: int) -> Steps:
        """Return these steps and those after `low` up to `high`."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted((*self.spans, (low, high))) if high > low else self.spans:
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], last))
            else:
                merged.append((first, last))
        return Steps(tuple(merged))


def read_accounts(dump_folder: Path) -> Accounts:
    """Return the accounts of the run in `dump_folder`; empty if it has no ledger. Raises OSError.

    Lines that are torn or unknown are skipped. The run may be under way.
    """
    lines: list[bytes] = []
    for name in (LEDGER_FILE, LATEST_BEAT_FILE):
        try:
            lines += (dump_folder / name).read_bytes().splitlines()
        except FileNotFoundError:
            continue
    found = (object_in(line) for line in lines)
    return accounts(record for record in found if record is not None and _is_complete_record(record))


def accounts(records: Iterable[Mapping[str, Any]]) -> Accounts:
    """Return what `records` say. A beat that is older than the last one of its start changes nothing."""
    starts: dict[str, dict[str, Any]] = {}
    for record in records:
        kind, found = record["record"], starts.get(record["start"])
        if kind == START:
            about = {key: value for key, value in record.items() if key not in ("record", "start", "time")}
            begun = {"id": record["start"], "began": record["time"], "last_beat": record["time"], "about": about}
            starts[record["start"]] = begun
        elif found is None:
            continue
        elif kind in (LOADED, ROLLED_BACK, BEAT, END):
            _add(found, record)
    return Accounts(tuple(Start(**found) for found in starts.values()))


def _add(found: dict[str, Any], record: Mapping[str, Any]) -> None:
    """Add a loaded, went-back, beat or end line to what is known of its start."""
    if record["time"] < found["last_beat"]:
        return
    if record["record"] == LOADED:
        found |= {"loaded_step": record["step"], "loaded_from": str(record.get("from", ""))}
        found |= {"last_step": record["step"], "durable_step": record["step"]} | _durable(record)
        return
    if record["record"] == ROLLED_BACK:
        trained = record["from_step"] - 1 if isinstance(record.get("from_step"), int) else record["step"]
        found["rollbacks"] = (*found.get("rollbacks", ()), (trained, record["step"]))
        found |= {"last_step": record["step"], "durable_step": record["step"]}
        return
    if not isinstance(record.get("seconds"), dict):
        return
    values = record["seconds"].items()
    seconds = {part: float(value) for part, value in values if part in PARTS_OF_A_START and is_figure(value)}
    found |= {"last_beat": record["time"], "seconds": seconds, "last_step": record["step"]}
    found |= {"at_risk_seconds": 0.0} | _durable(record)
    if record["record"] == END:
        found["end"] = str(record.get("why", FAILED))


def _durable(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the record says of the disk, as far as it is of the right type."""
    step, seconds = record.get("durable_step"), record.get("at_risk_seconds")
    said = {"durable_step": step} if isinstance(step, int) else {}
    return said | ({"at_risk_seconds": seconds} if is_figure(seconds) else {})


def _is_complete_record(record: Mapping[str, Any]) -> bool:
    if not isinstance(record.get("record"), str) or not isinstance(record.get("start"), str):
        return False
    return is_figure(record.get("time")) and isinstance(record.get("step", 0), int)
