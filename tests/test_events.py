"""The events of a run: written under names and figures that do not move, and read from files of any version."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.events import an_event
from tests.logged import logged_warnings
from torchtitan_lite import events
from torchtitan_lite.event_lines import Recorded, parse_record
from torchtitan_lite.events import EVENTS, LARGEST, Committed, Fallback, Finished, Preempted, emit_to, is_figure

ROOT = Path(__file__).parents[1]
AT_RISK = ["at_risk_steps", "at_risk_seconds"]
OF_THE_RUN = ["goodput", "time_seconds", "redone_steps", "starts"]
NAMES = {
    "save_started": ["kind", *AT_RISK],
    "staged": ["stall_seconds"],
    "committed": ["kind", "bytes", "seconds", "stall_seconds", "slowest_rank", "slowest_seconds"],
    "save_failed": ["reason", "in_a_row"],
    "save_skipped": ["in_flight"],
    "image_ready": ["seconds", "stall_seconds", *AT_RISK],
    "image_missed": ["reason"],
    "replica_ready": ["seconds", "bytes"],
    "replica_missed": ["reason"],
    "interval_chosen": ["seconds", "reason", "cost_seconds", "stall_seconds", "save_seconds", "mtbf_hours"],
    "purged": ["bytes"],
    "uploaded": ["path", "bytes", "seconds", "failures"],
    "upload_failed": ["path", "reason"],
    "uploads_ended": ["path", "reason"],
    "imported": ["path", "bytes", "seconds"],
    "exported": ["path", "bytes", "seconds"],
    "load_started": ["path", "origin"],
    "loaded": ["path", "seconds", "bytes", "origin", *AT_RISK],
    "image_skipped": ["finding"],
    "load_failed": ["path", "finding"],
    "fallback": ["damaged_step", "finding", "keys"],
    "quarantined": ["path"],
    "resumed": ["down_seconds", "redone_steps"],
    "hung": ["rank", "host", "seconds", "reason"],
    "diverged": ["reason", "skipped_batch"],
    "preempted": [*OF_THE_RUN, "signal", "given_up_steps"],
    "finished": OF_THE_RUN,
}
"""Scripts of other people read these."""
COMMITTED = Committed(5, kind="full", bytes=7, seconds=0.5, stall_seconds=0.25)


def test_names_and_figures_stay_what_scripts_read() -> None:
    found = {name: [field.name for field in dataclasses.fields(kind)[1:]] for name, kind in EVENTS.items()}
    assert found == NAMES


def test_every_event_and_every_figure_has_a_docstring_and_no_other_module_adds_one() -> None:
    reference = _reference()
    for name, kind in EVENTS.items():
        assert kind.__doc__ and kind.__module__ == events.__name__
        row = reference._row(kind)
        assert all(f"`{figure}`: " in row for figure in NAMES[name]), row


def test_an_event_is_a_value() -> None:
    for name in EVENTS:
        event = an_event(name, 3)
        assert pickle.loads(pickle.dumps(event)) == event == an_event(name, 3) != an_event(name, 4)
        with pytest.raises(AttributeError):
            event.step = 4  # type: ignore[misc]  # that is what must fail


def test_a_listener_gets_name_step_and_figures_without_those_that_are_not_known() -> None:
    heard: list[tuple[str, int, dict[str, Any]]] = []

    def listen(event: str, step: int, /, **figures: Any) -> None:
        heard.append((event, step, figures))

    emit = emit_to(listen)
    emit(COMMITTED)
    emit(Fallback(4, damaged_step=5, finding="torn", keys=("a", "b")))
    emit(Finished(9))
    assert heard == [
        ("committed", 5, {"kind": "full", "bytes": 7, "seconds": 0.5, "stall_seconds": 0.25}),
        ("fallback", 4, {"damaged_step": 5, "finding": "torn", "keys": ["a", "b"]}),
        ("finished", 9, {}),
    ]


def test_what_a_listener_raises_is_a_warning() -> None:
    def listen(event: str, step: int, /, **figures: Any) -> None:
        raise OSError("full")

    with logged_warnings() as warnings:
        emit_to(listen)(COMMITTED)
        emit_to(None)(COMMITTED)
    assert warnings == ["on_event failed for committed of step 5: OSError: full"]


def test_every_event_comes_back_from_its_line() -> None:
    full = [
        COMMITTED,
        Preempted(5, signal=15, given_up_steps=1, goodput=0.5, time_seconds={"saving": 1.5}, redone_steps=2, starts=3),
        Fallback(4, damaged_step=5, finding="torn", keys=("a", "b")),
        *(an_event(name, 3) for name in EVENTS),
    ]
    for event in full:
        line = json.dumps(Recorded(12.5, event).to_record())
        assert parse_record(json.loads(line)) == (12.5, event)


def test_a_line_of_an_older_version_or_with_broken_figures_is_read_as_far_as_it_goes() -> None:
    older = {"event": "committed", "step": 5, "time": 1, "bytes": 7, "stall_seconds": 1, "slowest_rank": "1"}
    recorded = parse_record(older | {"kind": "full", "seconds": 0.5, "of_a_later_version": 3})
    assert recorded == (1.0, Committed(5, kind="full", bytes=7, seconds=0.5, stall_seconds=1.0))
    for broken in (None, "7", [7], {}, True, float("nan"), 10**400, -1e300):
        figures = dict.fromkeys(NAMES["committed"], broken) | {"kind": broken}
        recorded = parse_record(figures | {"event": "committed", "step": 5, "time": 1})
        assert recorded is not None
        event = recorded.event
        assert isinstance(event, Committed) and (event.bytes, event.slowest_rank, event.slowest_seconds) == (
            0,
            None,
            None,
        )
        assert math.isnan(event.seconds) and math.isnan(event.stall_seconds)
        assert event.kind == (broken if isinstance(broken, str) else "")
    recorded = parse_record({"event": "fallback", "step": 5, "time": 1, "keys": [1]})
    assert recorded == (1.0, Fallback(5, damaged_step=0, finding="", keys=()))


def test_a_number_counts_up_to_the_largest() -> None:
    assert [is_figure(value) for value in (LARGEST, -LARGEST, int(LARGEST))] == [True] * 3
    assert not any(is_figure(value) for value in (math.nextafter(LARGEST, math.inf), int(LARGEST) + 1, math.inf, True))


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"event": "of_a_later_version", "step": 5, "time": 1.0},
        {"event": "", "step": 5, "time": 1.0},
        {"event": ["committed"], "step": 5, "time": 1.0},
        {"event": "finished", "time": 1.0},
        {"event": "finished", "step": "5", "time": 1.0},
        {"event": "finished", "step": True, "time": 1.0},
        {"event": "finished", "step": 1 << 63, "time": 1.0},
        {"event": "finished", "step": 5},
        {"event": "finished", "step": 5, "time": float("inf")},
        {"event": "finished", "step": 5, "time": "now"},
    ],
)
def test_a_line_of_another_program_is_no_event(record: dict[str, Any]) -> None:
    assert parse_record(record) is None


def test_the_table_of_events_is_up_to_date() -> None:
    page = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
    assert page == _reference().render(page), "run: python scripts/generate_event_reference.py"


def _reference() -> Any:
    path = ROOT / "scripts" / "generate_event_reference.py"
    specification = importlib.util.spec_from_file_location("event_reference", path)
    assert specification is not None and specification.loader is not None
    reference = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(reference)
    return reference
