"""The hours and the unclean ends of earlier starts, as events.jsonl shows them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.events import an_event
from tests.logged import logged_warnings
from torchtitan_lite.checkpoint.schedule.failures import Past
from torchtitan_lite.event_lines import Recorded
from torchtitan_lite.metrics.logger import EventLog
from torchtitan_lite.metrics.past_starts import count_past, past_starts

HOUR = 3600.0


def events(*names: str, every: float = HOUR) -> Iterator[Recorded]:
    """Yield events of these names, an hour apart."""
    for position, name in enumerate(names):
        yield Recorded(1e9 + position * every, an_event(name, 1 + position))


SAVE = ("save_started", "staged", "committed")
LOAD = ("load_started", "loaded", "resumed")


@pytest.mark.parametrize(
    ("names", "hours", "unclean_ends"),
    [
        ((), 0, 0),
        (SAVE, 0, 0),  # The start that reads them.
        ((*SAVE, *LOAD), 2, 1),
        ((*SAVE, *LOAD, *SAVE), 2, 1),
        ((*SAVE, *LOAD, *SAVE, *LOAD), 6, 2),
        ((*SAVE, "preempted", *LOAD), 3, 0),
        ((*SAVE, "preempted", "purged", *LOAD, "finished"), 5, 0),
        ((*SAVE, "finished", *LOAD), 3, 0),
        ((*SAVE, "load_started", "load_started", "fallback", "loaded"), 2, 1),  # It skipped a damaged checkpoint.
        ((*SAVE, "load_started", "load_failed", *LOAD), 2, 1),
        ((*SAVE, *LOAD, "preempted", *LOAD), 4, 1),
    ],
)
def test_a_start_that_did_not_say_how_it_ended_is_an_unclean_end(
    names: tuple[str, ...], hours: float, unclean_ends: int
) -> None:
    assert count_past(events(*names)) == Past(pytest.approx(hours), unclean_ends)


def test_a_seed_checkpoint_is_no_start() -> None:
    seed = [Recorded(1e9, an_event(name, 0)) for name in (*SAVE, *LOAD)]
    assert count_past([*seed, *events("save_started", "preempted", *LOAD)]) == Past(pytest.approx(1.0), 0)


def test_clocks_that_were_set_back_take_no_hours_away() -> None:
    assert count_past(events(*SAVE, *LOAD, every=-HOUR)) == Past(0.0, 1)


def test_the_file_is_read_as_the_event_log_writes_it_without_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    clock = iter(range(0, 1_000_000, 3600))
    for names in (SAVE, LOAD, LOAD):
        log = EventLog(path, clock=lambda: float(next(clock)))
        for name in names:
            log.write(an_event(name, 5))
        log.close()
    with path.open("a") as file:
        file.write('[1]\n{"step": 3}\n{"event": "loaded", "step": 5, "time": "now"}\n')
        file.write('{"event": "of_a_later_version", "step": 5, "time": 9e9}\n{"event": "load_sta')
    assert past_starts(path) == Past(3.0, 2)


def test_a_file_that_is_missing_or_cannot_be_read_is_a_past_of_which_nothing_is_known(tmp_path: Path) -> None:
    with logged_warnings() as warnings:
        assert past_starts(tmp_path / "events.jsonl") == Past()
        assert warnings == []
        assert past_starts(tmp_path) == Past()
    assert "The unclean ends of earlier starts are not counted" in warnings[0]
