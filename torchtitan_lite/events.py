"""The events of a run: what becomes of its saves and loads, a closed set of frozen values. Without torch.

Other people's scripts read the name of an event, declared with its class, and its figures, the fields of the class:
neither changes without an entry in CHANGELOG.md. Units are in the names of the figures. They are text at two borders
only, in events.jsonl (`event_lines`) and in a caller's `on_event`; in between the package passes values.
scripts/generate_event_reference.py makes the table in docs/watching.md from the docstrings here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Protocol, TypeGuard

from torchtitan_lite.log import in_one_line, logger

LARGEST = 1e100
"""A larger number is none: sums, differences and ratios must be finite."""
EVENTS: dict[str, type[Event]] = {}
"""All events by name, in the order of their definitions below."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a checkpoint, or to the run."""

    step: int
    """The step of the checkpoint, or the one that the run has reached."""

    name: ClassVar[str] = ""

    def __init_subclass__(cls, *, name: str = "") -> None:
        cls.name = name
        if name:
            EVENTS[name] = cls

    @property
    def figures(self) -> dict[str, Any]:
        """The fields after the step, by name, as JSON has them; those that are None are left out."""
        values = {field.name: getattr(self, field.name) for field in figures_of(type(self))}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None
        }


@dataclass(frozen=True, kw_only=True)
class SaveStarted(Event, name="save_started"):
    """A save began."""

    kind: str
    """`full` or `weights_only`."""
    at_risk_steps: int
    """Training that the disk lacked then."""
    at_risk_seconds: float
    """The same in seconds."""


@dataclass(frozen=True, kw_only=True)
class SaveStaged(Event, name="staged"):
    """The state may change again; training continues."""

    stall_seconds: float
    """How long the save has blocked training."""


@dataclass(frozen=True, kw_only=True)
class Committed(Event, name="committed"):
    """The checkpoint is durable."""

    kind: str
    """`full` or `weights_only`."""
    bytes: int
    """Of all ranks' files."""
    seconds: float
    """From the beginning of the save to the commit."""
    stall_seconds: float
    """How long the save has blocked training."""
    slowest_rank: int | None = None
    """The rank that took longest to write its file."""
    slowest_seconds: float | None = None
    """How long it took."""


@dataclass(frozen=True, kw_only=True)
class SaveFailure(Event, name="save_failed"):
    """The save failed; earlier checkpoints are unchanged."""

    reason: str
    """The error."""
    in_a_row: int
    """Saves that failed since the last durable one."""


@dataclass(frozen=True, kw_only=True)
class SaveSkipped(Event, name="save_skipped"):
    """A due save was skipped because another one was in flight."""

    in_flight: int
    """The step of that one."""


@dataclass(frozen=True, kw_only=True)
class ImageReady(Event, name="image_ready"):
    """A copy in memory is complete on this rank; `events.jsonl` has the first one of each start."""

    seconds: float
    """From the beginning of the copy until it is complete."""
    stall_seconds: float
    """How long it has blocked training."""
    at_risk_steps: int
    """Training that the disk lacked."""
    at_risk_seconds: float
    """The same in seconds."""


@dataclass(frozen=True, kw_only=True)
class ImageMissed(Event, name="image_missed"):
    """This step gets no copy in memory; `events.jsonl` has the first one of each start."""

    reason: str
    """The memory is still being made, earlier copies are being read, or no more are made."""


@dataclass(frozen=True, kw_only=True)
class ReplicaReady(Event, name="replica_ready"):
    """A copy in memory of this rank is on another host, too; `events.jsonl` has the first one of each start."""

    seconds: float
    """From the beginning of the copy until it is complete there."""
    bytes: int
    """That were sent; 0 if the other host had it."""


@dataclass(frozen=True, kw_only=True)
class ReplicaMissed(Event, name="replica_missed"):
    """A copy in memory of this rank did not get to another host; `events.jsonl` has the first one of each start."""

    reason: str
    """What failed."""


@dataclass(frozen=True, kw_only=True)
class IntervalChosen(Event, name="interval_chosen"):
    """With `interval_type = "auto"`: the interval from now on changed by a quarter, or has another reason."""

    seconds: float
    """The interval."""
    reason: str
    """What determined it."""
    cost_seconds: float
    """What a save adds to the run."""
    stall_seconds: float
    """How much of that blocks training."""
    save_seconds: float
    """From the beginning of a save until it is durable."""
    mtbf_hours: float
    """From one failure to the next, as configured or estimated."""


@dataclass(frozen=True, kw_only=True)
class Purged(Event, name="purged"):
    """An older checkpoint was removed."""

    bytes: int
    """Of its files, without those that other checkpoints have, too."""


@dataclass(frozen=True, kw_only=True)
class Uploaded(Event, name="uploaded"):
    """The checkpoint is complete in `upload_folder`, too."""

    path: str
    """That folder."""
    bytes: int
    """That this start sent of it."""
    seconds: float
    """How long that took, tries that failed included."""
    failures: int
    """Tries that failed since the last upload."""


@dataclass(frozen=True, kw_only=True)
class UploadFailed(Event, name="upload_failed"):
    """The upload of this step failed and will be retried; one event for each reason."""

    path: str
    """The folder that it goes to."""
    reason: str
    """The error."""


@dataclass(frozen=True, kw_only=True)
class UploadsEnded(Event, name="uploads_ended"):
    """This start uploads nothing more: another job or run has that folder. Saves continue; the end is no success."""

    path: str
    """That folder."""
    reason: str
    """The error."""


@dataclass(frozen=True, kw_only=True)
class WeightsImported(Event, name="imported"):
    """Published weights became `step-0`."""

    path: str
    """Where the weights are."""
    bytes: int
    """Of the checkpoint."""
    seconds: float
    """How long it took."""


@dataclass(frozen=True, kw_only=True)
class WeightsExported(Event, name="exported"):
    """The weights of the last step were written in Hugging Face's format."""

    path: str
    """The folder that has them."""
    bytes: int
    """Of its files."""
    seconds: float
    """How long it took."""


@dataclass(frozen=True, kw_only=True)
class LoadStarted(Event, name="load_started"):
    """A load began."""

    path: str
    """The folder of the checkpoint."""
    origin: str
    """`disk` or `memory`."""


@dataclass(frozen=True, kw_only=True)
class Loaded(Event, name="loaded"):
    """The load ended."""

    path: str
    """The folder of the checkpoint."""
    seconds: float
    """How long it took."""
    bytes: int
    """Of the checkpoint, all ranks."""
    origin: str
    """`disk` or `memory`."""
    at_risk_steps: int
    """Training in it that the disk lacks."""
    at_risk_seconds: float
    """The same in seconds."""


@dataclass(frozen=True, kw_only=True)
class ImageSkipped(Event, name="image_skipped"):
    """The in-memory snapshot of this step is damaged; the load continued with another one or the disk."""

    finding: str
    """What is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class LoadFailed(Event, name="load_failed"):
    """A checkpoint that was named by its step or path is damaged, or one could not be read; the run ends."""

    path: str
    """The file or folder."""
    finding: str
    """What is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Fallback(Event, name="fallback"):
    """This step was loaded because a newer one is damaged."""

    damaged_step: int
    """The newer one."""
    finding: str
    """What is wrong with it."""
    keys: tuple[str, ...]
    """The tensors and objects concerned, 100 at most."""


@dataclass(frozen=True, kw_only=True)
class Quarantined(Event, name="quarantined"):
    """The damaged checkpoint was set aside."""

    path: str
    """Where it is now."""


@dataclass(frozen=True, kw_only=True)
class Resumed(Event, name="resumed"):
    """Training continues from this step."""

    down_seconds: float | None = None
    """Since the last start ended."""
    redone_steps: int | None = None
    """Those that it trained and that are trained again."""


@dataclass(frozen=True, kw_only=True)
class Hung(Event, name="hung"):
    """A rank hung in this step, and all ranks were killed; one for each of them if it is not known which."""

    rank: int
    """The rank."""
    host: str
    """Its host."""
    seconds: float
    """For how long the step had taken."""
    reason: str
    """How that is known."""


@dataclass(frozen=True, kw_only=True)
class Diverged(Event, name="diverged"):
    """This step is not kept: the run rolls back to what is loaded next, or stops."""

    reason: str
    """Why."""
    skipped_batch: int | None = None
    """The batch of the data that is skipped from then on; none if the run stops."""


@dataclass(frozen=True, kw_only=True)
class CleanEnd(Event):
    """The end of a start that was not cut off, with what rank 0 has counted of the whole run. No event by itself."""

    goodput: float | None = None
    """The share of the run's time that went into productive steps."""
    time_seconds: Mapping[str, float] | None = None
    """Of the run, by part."""
    redone_steps: int | None = None
    """Of the run, trained again."""
    starts: int | None = None
    """Of the run."""


@dataclass(frozen=True, kw_only=True)
class Preempted(CleanEnd, name="preempted"):
    """The ranks exit for a signal; the step is the one to continue from."""

    signal: int
    """The number of the signal."""
    given_up_steps: int
    """Later ones, which the next start trains again."""


@dataclass(frozen=True, kw_only=True)
class Finished(CleanEnd, name="finished"):
    """The run has ended."""


class EventListener(Protocol):
    """A caller's `on_event`: it gets the name of an event, its step and its figures, from any thread."""

    def __call__(self, event: str, step: int, /, **figures: Any) -> None: ...


Emit = Callable[[Event], None]
"""Passes an event on. Any thread; raises nothing."""


def ignore(event: Event) -> None:
    """Do nothing with an event."""


def emit_to(listener: EventListener | None) -> Emit:
    """Return what passes events to `listener`; for None, what ignores them.

    What the listener raises is a warning, because the other ranks would wait for one that leaves.
    """
    if listener is None:
        return ignore
    return contained("on_event", lambda event: listener(event.name, event.step, **event.figures))


def contained(name: str, listen: Emit) -> Emit:
    """Return `listen`, of which an error is a warning that names `name`."""

    def emit(event: Event) -> None:
        try:
            listen(event)
        except (Exception, SystemExit) as error:
            logger.warning("%s failed for %s of step %d: %s", name, event.name, event.step, in_one_line(error))

    return emit


def is_figure(value: object) -> TypeGuard[float]:
    """Return whether `value`, of a line that any program may have written, is a number that can be counted with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def figures_of(kind: type[Event]) -> list[Field[Any]]:
    """Return the fields of `kind` after the step."""
    return [field for field in fields(kind) if field.name != "step"]
