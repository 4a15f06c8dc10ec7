"""What stays in memory when a start ends: nothing of a start that kept nothing, and a copy that the log names."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest

from tests.checkpoint.images.image_runs import RUNS, images_of, start, step
from tests.checkpoint.small_run import SmallRun
from tests.forked import run_code
from tests.keepers import has_ended, keepers_in
from torchtitan_lite import faults

STAYS = "To free them"


@pytest.mark.slow  # An empty keeper waits five seconds for other ranks.
@pytest.mark.parametrize("resets", [False, True])
def test_a_start_with_nothing_to_train_leaves_no_keeper_behind(
    tmp_path: Path, memory_tier: Path, caplog: pytest.LogCaptureFixture, resets: bool
) -> None:
    caplog.set_level(logging.INFO)
    run = start(tmp_path, 3)
    step(run, last=True)
    run.manager.close()
    assert keepers_in(memory_tier) == []
    again = SmallRun(tmp_path, async_mode="async", interval=100, memory_interval=1)
    with again:
        assert again.manager.load()
        if resets:
            again.manager.reset()
    assert all(map(has_ended, keepers_in(memory_tier)))
    assert STAYS not in caplog.text


def test_a_run_that_is_left_says_that_a_copy_stays_and_how_to_free_it(
    tmp_path: Path, memory_tier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(KeyboardInterrupt), start(tmp_path, 3):
        raise KeyboardInterrupt
    RUNS.clear()
    (line,) = [each.getMessage() for each in caplog.records if STAYS in each.getMessage()]
    assert line == (
        "In-memory snapshots stay for the next start, for 600 s. To free them: "
        f"torchtitan-lite memory {tmp_path / 'checkpoint'} --end"
    )
    (pid,) = keepers_in(memory_tier)
    assert not has_ended(pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize("closes", [False, True])
def test_a_run_that_is_not_closed_says_so_at_the_exit_of_the_interpreter(
    tmp_path: Path, memory_tier: Path, closes: bool
) -> None:
    code = f"""
from pathlib import Path
from tests.checkpoint.images.image_runs import start
import logging
logging.basicConfig(level=logging.INFO)
run = start(Path({str(tmp_path)!r}), 3)
if {closes}:
    run.manager.close()
raise KeyboardInterrupt
"""
    log, environment = tmp_path / "log", {"XDG_RUNTIME_DIR": str(memory_tier), "TORCHTITAN_LITE_MEMORY": "on"}
    run_code(code, log, {**os.environ, **environment}).wait(60)
    assert log.read_text().count(STAYS) == 1, log.read_text()


@pytest.mark.parametrize("kept", [False, True])
def test_a_stopped_keeper_does_not_hold_the_end_of_a_run_up_and_the_log_says_who_frees_the_memory(
    tmp_path: Path, memory_tier: Path, caplog: pytest.LogCaptureFixture, kept: bool
) -> None:
    run = start(tmp_path, 4 if kept else 0, memory_interval=1 if kept else 0)
    tier = images_of(run).tier
    assert tier is not None and tier._starting is not None
    tier._starting.join()
    (pid,) = keepers_in(memory_tier)
    os.kill(pid, signal.SIGSTOP)
    try:
        run.step(last=True)
        run.manager.close()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "did not answer within" not in caplog.text, "it is known to be stopped before that"
    assert "A restart loads from disk" not in caplog.text
    freed = [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING]
    assert freed == kept * [
        f"Rank 0: the keeper (process {pid}) is stopped. Nothing of the run is lost, but its in-memory snapshots stay "
        f"until 600 s after its processes have ended and the keeper runs again. To free them at once: kill -KILL {pid}"
    ]


def test_an_image_that_a_step_does_not_get_is_an_event(tmp_path: Path, memory_tier: Path) -> None:
    faults.install("slow@mark:seconds=1", rank=0)
    run = start(tmp_path, 0)
    while run.train_state.step < 2 or run.train_state.step not in run.events.steps("image_missed"):
        run.step()
    images_of(run).marker.wait(60)
    made, missed = run.events.steps("image_ready"), run.events.steps("image_missed")
    assert sorted(made + missed) == [*range(1, run.train_state.step + 1)]
    assert run.events.figures("image_missed")["reason"] in ("its memory is being made", "earlier ones are being read")
