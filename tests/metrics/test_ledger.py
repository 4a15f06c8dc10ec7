"""The ledger of a run: its parts are disjoint and sum to the time, and nothing that a start did is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_lite.accounts import LATEST_BEAT_FILE, LEDGER_FILE, PARTS, Accounts, read_accounts
from torchtitan_lite.events import Committed, Finished, Loaded, Preempted, SaveStarted
from torchtitan_lite.metrics.ledger import Ledger, RunClock

FOLDER = "outputs/checkpoint"
FINISHED, PREEMPTED = Finished(1), Preempted(1, signal=15, given_up_steps=0)
ENDS = {"finished": FINISHED, "preempted": PREEMPTED, "failed": None}


def committed(step: int, seconds: float = 0.5) -> Committed:
    return Committed(step, kind="full", bytes=1000, seconds=seconds, stall_seconds=seconds)


@dataclass
class Time:
    """A clock that a test moves."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


class TrainedStart:
    """One start of a run in `folder`, without a thread: the test beats."""

    made: ClassVar[list[TrainedStart]] = []

    def __init__(self, folder: Path, time: Time) -> None:
        TrainedStart.made.append(self)
        self.time, self.clock = time, RunClock(time)
        self.ledger = Ledger(folder, self.clock, wall_clock=time)
        time.passes(7)  # imports
        self.ledger.begin(host="node7")

    def load(self, step: int, seconds: float = 3, **of: Any) -> None:
        with self.clock.part("loading"):
            self.time.passes(seconds)
        if step:
            found = {"origin": "disk", "at_risk_steps": 0, "at_risk_seconds": 0.0} | of
            self.ledger.note(Loaded(step, path=f"{FOLDER}/step-{step}", seconds=seconds, bytes=1, **found))
        self.ledger.start_loop(step, FOLDER)

    def train(self, step: int, seconds: float = 2.0) -> None:
        with self.clock.part("waiting_for_data"):
            self.time.passes(0.25)
        with self.ledger.step(step):
            self.time.passes(seconds)

    def save(self, step: int, seconds: float = 0.5) -> None:
        self.ledger.note(SaveStarted(step, kind="full", at_risk_steps=0, at_risk_seconds=0.0))
        with self.clock.part("saving"):
            self.time.passes(seconds)
        self.ledger.note(committed(step, seconds))

    def close(self) -> None:
        """Close its files, as the end of a process does, also of one that was killed."""
        self.ledger._lines.close()
        self.ledger._latest.close()


def loaded_start(folder: Path) -> tuple[Time, TrainedStart]:
    """Return a clock, and the first start of a run, which has nothing to load."""
    time = Time()
    start = TrainedStart(folder, time)
    start.load(0)
    return time, start


@pytest.fixture(autouse=True, scope="module")
def closed_files() -> Iterator[None]:
    yield
    while TrainedStart.made:
        TrainedStart.made.pop().close()


def test_parts_of_a_start_are_disjoint_and_sum_to_its_time(tmp_path: Path) -> None:
    time, start = loaded_start(tmp_path)
    start.train(1, seconds=12)
    start.train(2)
    start.train(3)
    start.save(3)
    time.passes(0.125)
    start.ledger.end(FINISHED)
    seconds = {part: value for part, value in read_accounts(tmp_path).seconds.items() if value}
    assert seconds == {
        "starting": 7,
        "loading": 3,
        "waiting_for_data": 0.75,
        "compiling": 10,  # the first step beyond the second one's two seconds
        "productive": 6,
        "saving": 0.5,
        "other": 0.125,
    }


def test_after_a_kill_down_runs_from_the_last_beat_to_the_next_start(tmp_path: Path) -> None:
    time, first = loaded_start(tmp_path)
    for step in (1, 2, 3):
        first.train(step)
    first.save(3)
    first.train(4)
    first.train(5)
    time.passes(4)
    first.ledger.beat()
    time.passes(100)  # killed
    second = TrainedStart(tmp_path, time)
    second.load(3)
    for step in (4, 5, 6):
        second.train(step)
    second.ledger.end(FINISHED)
    accounts = read_accounts(tmp_path)
    assert accounts.seconds["down"] == pytest.approx(100)
    assert accounts.seconds["redone"] == pytest.approx(4)
    assert accounts.redone_steps == 2
    assert sum(accounts.seconds.values()) == pytest.approx(accounts.wall_seconds) == pytest.approx(time.now - 1000)
    assert accounts.unclean_ends == 1


def test_a_start_that_rolled_back_by_itself_counts_what_it_trained_twice(tmp_path: Path) -> None:
    _, start = loaded_start(tmp_path)
    for step in (1, 2, 3, 4):
        start.train(step)
    start.ledger.rolled_back(5, 2)
    assert start.ledger.at_risk() == (0, 0.0)
    start.train(3)
    for accounts in (start.ledger.accounts(), read_accounts(tmp_path)):
        (found,) = accounts.starts
        assert (accounts.redone_steps, found.spans, found.durable_step) == (1, ((0, 4), (2, 3)), 2)


def test_what_a_start_gave_up_in_a_roll_back_and_the_next_one_trains_counts_once(tmp_path: Path) -> None:
    time, first = loaded_start(tmp_path)
    for step in (1, 2, 3, 4):
        first.train(step)
    first.ledger.rolled_back(5, 2)
    first.train(3)  # killed
    second = TrainedStart(tmp_path, time)
    second.load(2)
    for step in (3, 4, 5):
        second.train(step)
    second.ledger.end(FINISHED)
    accounts = read_accounts(tmp_path)
    assert accounts.redone_steps == 1 + 2
    assert accounts.seconds["redone"] == pytest.approx(2 + 4)


def test_a_start_whose_first_lines_could_not_be_written_counts_as_soon_as_writing_works(tmp_path: Path) -> None:
    time, first = loaded_start(tmp_path)
    first.train(1)
    first.ledger.beat()
    (aside := tmp_path / "aside").mkdir()
    (tmp_path / LEDGER_FILE).rename(aside / LEDGER_FILE)
    (tmp_path / LEDGER_FILE).mkdir()  # A file that cannot be opened.
    second = TrainedStart(tmp_path, time)
    second.load(0)
    second.ledger.beat()
    (tmp_path / LEDGER_FILE).rmdir()
    (aside / LEDGER_FILE).rename(tmp_path / LEDGER_FILE)
    second.train(1)
    second.ledger.end(FINISHED)
    accounts = read_accounts(tmp_path)
    assert (len(accounts.starts), accounts.redone_steps) == (2, 1)
    assert accounts.wall_seconds == pytest.approx(time.now - 1000)


def test_the_last_step_before_a_kill_counts_without_a_beat_of_the_thread(tmp_path: Path) -> None:
    time, first = loaded_start(tmp_path)
    first.train(1)
    assert read_accounts(tmp_path).starts[0].last_step == 1
    time.passes(50)
    second = TrainedStart(tmp_path, time)
    second.load(0)
    second.train(1)
    accounts = read_accounts(tmp_path)
    assert (accounts.redone_steps, accounts.seconds["down"]) == (1, pytest.approx(50))
    assert (tmp_path / LEDGER_FILE).read_text().count('"beat"') == 1, "a step writes no line: the next start copies it"


def test_time_after_the_run_had_finished_is_idle_and_not_down(tmp_path: Path) -> None:
    time, first = loaded_start(tmp_path)
    first.train(1)
    first.ledger.end(FINISHED)
    time.passes(3600)
    second = TrainedStart(tmp_path, time)
    second.load(1)
    second.ledger.end(FINISHED)
    accounts = read_accounts(tmp_path)
    assert (accounts.seconds["idle"], accounts.seconds["down"]) == (pytest.approx(3600), 0)
    assert accounts.goodput == pytest.approx(accounts.seconds["productive"] / (time.now - 1000 - 3600))
    assert accounts.unclean_ends == 0


def test_all_from_the_call_that_leaves_is_leaving(tmp_path: Path) -> None:
    time, start = loaded_start(tmp_path)
    start.train(1)
    with start.clock.part("saving"):
        time.passes(2)
        start.clock.leave()
        time.passes(1)
    time.passes(5)
    start.ledger.end(PREEMPTED)
    assert read_accounts(tmp_path).seconds["leaving"] == pytest.approx(8)
    assert read_accounts(tmp_path).seconds["saving"] == 0


def test_at_risk_is_what_was_trained_since_the_step_that_is_durable(tmp_path: Path) -> None:
    time = Time()
    start = TrainedStart(tmp_path, time)
    assert start.ledger.at_risk() == (0, 0.0), "nothing is trained before the load"
    start.load(40)
    assert start.ledger.at_risk() == (0, 0.0)
    start.train(41)
    start.save(41)
    start.train(42)
    assert start.ledger.at_risk() == (1, pytest.approx(0.5 + 2.25))
    assert read_accounts(tmp_path).starts[0].durable_step == 41


def test_a_start_from_memory_does_not_make_its_step_durable(tmp_path: Path) -> None:
    time, first = loaded_start(tmp_path)
    first.train(1)
    first.save(1)
    first.train(2)
    at_risk = first.ledger.at_risk()[1]
    second = TrainedStart(tmp_path, time)
    second.load(2, 0.5, origin="memory", at_risk_steps=1, at_risk_seconds=at_risk)
    assert second.ledger.at_risk() == (1, pytest.approx(at_risk))
    assert read_accounts(tmp_path).starts[1].durable_step == 1, "before the first beat, too"
    second.train(3)
    assert read_accounts(tmp_path).starts[1].durable_step == 1
    assert read_accounts(tmp_path).redone_steps == 0


def test_torn_and_unknown_lines_are_skipped(tmp_path: Path) -> None:
    _, start = loaded_start(tmp_path)
    start.train(1)
    start.ledger.end(FINISHED)
    before = read_accounts(tmp_path)
    with (tmp_path / LEDGER_FILE).open("a") as ledger:
        ledger.write('[1]\n{"record": "moon", "start": "x", "time": 3, "step": 1}\n{"record": "beat", "ti')
    (tmp_path / LATEST_BEAT_FILE).write_text("{")
    assert read_accounts(tmp_path) == before


@pytest.mark.parametrize("value", ["null", '"1"', "[]", "1" + 400 * "0", "NaN", "true", 9999 * "["])
@pytest.mark.parametrize("field", ["time", "part", "durable_step", "at_risk_seconds"])
def test_a_beat_with_a_value_that_is_none_does_not_end_the_next_start(tmp_path: Path, field: str, value: str) -> None:
    time, first = loaded_start(tmp_path)
    first.train(1)
    fields = {"time": "2000", "step": "1", "part": "2", "durable_step": "1", "at_risk_seconds": "3"} | {field: value}
    numbers = ", ".join(f'"{name}": {text}' for name, text in fields.items() if name != "part")
    with (tmp_path / LEDGER_FILE).open("a") as ledger:
        beat = f'{{"record": "beat", "start": "{first.ledger.id}", "seconds": {{"productive": {fields["part"]}}}'
        ledger.write(f"{beat}, {numbers}}}\n")
    time.now = 3000
    second = TrainedStart(tmp_path, time)
    second.load(1)
    second.ledger.end(FINISHED)
    assert [start.end for start in read_accounts(tmp_path).starts] == ["", "finished"]
    assert second.ledger.accounts().goodput >= 0


def test_a_ledger_of_an_earlier_version_is_read_which_called_a_commit_saved(tmp_path: Path) -> None:
    lines = [
        {"record": "start", "time": 1000.0, "start": "a1", "host": "node7"},
        {"record": "loaded", "time": 1010.0, "start": "a1", "step": 0, "from": "fresh", "seconds": 0.0},
        {"record": "saved", "time": 1020.0, "start": "a1", "step": 5, "blocked": 0.5, "seconds": 0.7, "bytes": 9},
        {"record": "beat", "time": 1030.0, "start": "a1", "step": 7, "seconds": {"productive": 20.0, "starting": 10.0}},
    ]
    (tmp_path / LEDGER_FILE).write_text("".join(json.dumps(line | {"durable_step": 5}) + "\n" for line in lines))
    before = read_accounts(tmp_path)
    assert (before.wall_seconds, before.seconds["productive"], before.starts[0].durable_step) == (30.0, 20.0, 5)
    time = Time()
    time.now = 2000.0
    start = TrainedStart(tmp_path, time)
    start.load(5)
    start.save(5)
    start.ledger.end(FINISHED)
    assert start.ledger.before == before and len(read_accounts(tmp_path).starts) == 2
    records = [json.loads(line)["record"] for line in (tmp_path / LEDGER_FILE).read_text().splitlines()]
    assert records == ["start", "loaded", "saved", "beat", "start", "loaded", "committed", "end"]


def test_a_folder_without_a_ledger_has_empty_accounts(tmp_path: Path) -> None:
    accounts = read_accounts(tmp_path)
    assert accounts.starts == () and set(accounts.seconds) == set(PARTS)
    assert (accounts.wall_seconds, accounts.goodput, accounts.redone_steps, accounts.unclean_ends) == (0, 0, 0, 0)


def test_each_line_names_its_start_and_its_time(tmp_path: Path) -> None:
    start = TrainedStart(tmp_path, Time())
    start.load(0)
    start.save(0)
    start.ledger.end(FINISHED)
    lines = [json.loads(line) for line in (tmp_path / LEDGER_FILE).read_text().splitlines()]
    assert [line["record"] for line in lines] == ["start", "loaded", "committed", "end"]
    assert {line["start"] for line in lines} == {start.ledger.id}
    assert lines[0]["host"] == "node7" and lines[0]["time"] == 1000


starts = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps that it trains before its end
        st.integers(1, 4),  # the steps from one save to the next
        st.sampled_from(["killed", "finished", "preempted", "failed"]),
        st.floats(0.1, 60),  # seconds until the next start
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@given(starts)
def test_whatever_happens_parts_sum_to_the_time_and_redone_steps_are_counted(
    tmp_path_factory: pytest.TempPathFactory, starts: list[tuple[int, int, str, float]]
) -> None:
    folder, time = tmp_path_factory.mktemp("run"), Time()
    durable, trained, redone, last = 0, set[int](), 0, 0.0
    for num_steps, interval, end, pause in starts:
        start = TrainedStart(folder, time)
        start.load(durable)
        last = time.now
        for step in range(durable + 1, durable + num_steps + 1):
            start.train(step)
            last = time.now
            redone += step in trained
            trained.add(step)
            if step % interval == 0:
                start.save(step)
                durable = step
        if end != "killed":
            start.ledger.end(ENDS[end])
            last = time.now
        time.passes(pause)
    accounts = read_accounts(folder)
    assert accounts.redone_steps == redone
    assert sum(accounts.seconds.values()) == pytest.approx(accounts.wall_seconds, abs=0.01)
    if starts[-1][2] != "killed":
        assert accounts.wall_seconds == pytest.approx(last - 1000, abs=0.01)


def test_a_seed_checkpoint_which_begins_no_start_writes_no_ledger(tmp_path: Path) -> None:
    time = Time()
    ledger = Ledger(tmp_path, RunClock(time), wall_clock=time)
    ledger.note(committed(0))
    assert not (tmp_path / LEDGER_FILE).exists()


class Counted(dict[str, float]):
    """Seconds by part, which count how often one is read."""

    num_read = 0

    def get(self, *arguments: Any) -> Any:
        Counted.num_read += 1
        return super().get(*arguments)


def test_a_logged_step_does_not_sum_over_earlier_starts_again(tmp_path: Path) -> None:
    time = Time()
    for last in (3, 6):
        start = TrainedStart(tmp_path, time)
        start.load(last - 3)
        for step in range(last - 2, last + 2):
            start.train(step)
        start.ledger.end(PREEMPTED)
        time.passes(10)
    ledger = TrainedStart(tmp_path, time).ledger
    starts = tuple(replace(each, seconds=Counted(each.seconds)) for each in ledger.before.starts)
    ledger.before = Accounts(starts)
    first = ledger.tags()
    Counted.num_read = 0
    assert ledger.tags() == first
    assert Counted.num_read == 0
    whole = Accounts(ledger.accounts().starts)
    assert whole.redone_steps == first["goodput/redone_steps"] == 1
    assert (whole.seconds, whole.goodput) == (ledger.accounts().seconds, ledger.accounts().goodput)
