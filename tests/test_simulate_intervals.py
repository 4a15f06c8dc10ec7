"""The simulation of runs that fail: it is what a loop over events gives, and its bounds hold."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.simulate_intervals import (
    COSTS,
    LONG_COSTS,
    MARKS,
    NUM_FAILURES,
    OFTEN_KILLED,
    POINTS,
    Point,
    auto,
    farthest_behind,
    main,
    measure,
    measure_long,
    overhead,
    table,
    table_of_long,
    uptimes,
    work_of,
    write_into,
)
from torchtitan_lite.checkpoint.schedule.interval import SavePolicy

PAGE = Path(__file__).parents[1] / "docs" / "intervals.md"
FAILURES = 4_000


def by_events(interval: float, point: Point, uptime: float) -> float:
    """Return the work that is durable after one uptime, by going from event to event."""
    save = point.save
    now, work, durable = point.restart, 0.0, 0.0
    slower = 0.0
    while True:
        now, work = now + interval, work + interval - slower
        if now + save.save_seconds > uptime:
            return durable
        durable = work
        now, slower = now + save.blocked_seconds, save.slower_seconds


@pytest.mark.parametrize(
    "point", [Point(0.01), Point(0.01, 0.05), Point(0.01, 0.05, True), Point(0.05, 0.2, True), Point(0.02, shape=0.7)]
)
def test_what_is_durable_after_an_uptime_is_what_a_loop_over_events_gives(point: Point) -> None:
    times = uptimes(point, 500)
    for interval in (auto(point), 0.3, 1.0):
        expected = [by_events(interval, point, float(uptime)) for uptime in times]
        assert work_of(interval, point, times) == pytest.approx(expected)


def test_without_failures_in_its_time_a_run_loses_what_saves_cost() -> None:
    times = np.array([1_000_000.0])
    assert overhead(0.1, Point(0.01), times) == pytest.approx(0.1, rel=1e-3)
    assert overhead(0.1, Point(0.01, in_background=True), times) == pytest.approx(0.01 / 0.092, rel=1e-3)
    assert overhead(2.0, Point(0.01), np.array([1.0])) == math.inf


def test_uptimes_have_the_mean_time_between_failures() -> None:
    for shape in (1.0, 0.7):
        times = uptimes(Point(0.01, shape=shape), 100_000)
        assert float(times.mean()) == pytest.approx(1.0, rel=0.02)
        assert (times == uptimes(Point(0.02, shape=shape), 100_000)).all(), "the seed is fixed"


@pytest.mark.slow
def test_the_chosen_interval_is_within_5_percent_of_the_best_and_12_with_a_wrong_mtbf() -> None:
    assert max(COSTS) == 0.02
    lines = measure((point for point in POINTS if point.shape == 1), FAILURES)
    assert len(lines) == 4 * len(COSTS)
    for line in lines:
        assert -0.01 < line.auto <= 0.05, line
        assert max(line.mtbf_twice, line.mtbf_half) <= 0.12, line
        assert line.auto_interval >= line.point.save.save_seconds
    assert max(map(len, table(lines, FAILURES).splitlines())) <= 80


def test_where_saves_are_long_dalys_interval_is_better_than_youngs() -> None:
    rows = measure_long(20_000)
    assert [row["cost"] for row in rows] == list(LONG_COSTS)
    assert all(row["daly"] < 0.02 for row in rows)
    assert rows[-1]["young"] > 0.1
    assert "Daly" in table_of_long(rows)


@pytest.mark.slow
def test_the_command_writes_its_tables_between_the_marks_of_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    arguments = ["simulate_intervals.py", "--quick", "--docs", str(page), "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert main() == 0
    text = page.read_text()
    assert text.startswith(f"before\n{MARKS[0]}\n\n```text\nsaves ") and text.endswith(f"```\n\n{MARKS[1]}\nafter\n")
    assert "old" not in text and capsys.readouterr().out.strip() in text
    document = json.loads(figures.read_text())
    assert len(document["lines"]) == len(POINTS) and document["num_failures"] == FAILURES
    with pytest.raises(SystemExit, match="Add both marks"):
        write_into(figures, "text")


@pytest.mark.slow  # all failures of the page
def test_the_tables_of_the_page_are_those_of_the_script() -> None:
    lines, long = measure(POINTS, NUM_FAILURES), measure_long(NUM_FAILURES)
    shown = PAGE.read_text(encoding="utf-8").partition(MARKS[0])[2].partition(MARKS[1])[0]
    expected = f"{table(lines, NUM_FAILURES)}\n\n{table_of_long(long)}"
    assert expected in shown, "run: python scripts/simulate_intervals.py --docs docs/intervals.md"


@pytest.mark.parametrize(("name", "policy"), OFTEN_KILLED)
def test_with_kills_more_often_than_the_interval_the_disk_is_at_most_two_intervals_behind(
    name: str, policy: SavePolicy
) -> None:
    assert farthest_behind(policy, counts_what_is_owed=True) < 1.5
    assert farthest_behind(policy, counts_what_is_owed=False) > (100 if name == "seconds" else 2)
