"""The progress bar on real (pseudo) terminals."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from tests.clock import Clock
from tests.events import an_event
from tests.forked import REPO
from tests.screens import Terminal, screen_of, terminal
from torchtitan_lite.config.job_config import JobConfig, Metrics
from torchtitan_lite.events import Resumed
from torchtitan_lite.log import logger
from torchtitan_lite.metrics.progress_bar import (
    Progress,
    TerminalProgressBar,
    build_progress_bars,
    readable_duration,
    render_progress,
)

LINE = "step: 10  loss:  5.6992  grad_norm:  2.4399  memory:  0.46GiB  tps: 4,699  tflops: 0.03  epoch: 0 (0.3%)"
SUSPENDS = """
import os, sys
from torchtitan_lite.metrics.progress_bar import is_in_foreground
print("front", is_in_foreground(1))
if os.fork() == 0:
    os.setpgid(0, 0)
    print("job in the background", is_in_foreground(1), flush=True)
    if os.fork() == 0:
        os.setsid()
        print("its worker", is_in_foreground(1), flush=True)
        os._exit(0)
    os.wait()
    os._exit(0)
os.wait()
if os.fork() == 0:
    os.setsid()
    print("worker", is_in_foreground(1), flush=True)
    os._exit(0)
os.wait()
"""


@contextmanager
def logged_to(screen: Terminal) -> Iterator[None]:
    handler, level = logging.StreamHandler(screen.stream), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def a_bar(screen: Terminal, clock: Callable[[], float] = time.monotonic) -> TerminalProgressBar:
    console = Console(file=screen.stream, force_terminal=True, color_system="standard")
    return TerminalProgressBar(screen.stream, console, Progress(0, 100, "none saved", durable=0), clock=clock)


def plain(progress: Progress, columns: int) -> str:
    return render_progress(progress, Console(file=io.StringIO(), color_system=None), columns)


def test_log_lines_appear_above_the_bar_complete_and_in_their_order() -> None:
    with terminal(80) as screen, logged_to(screen):
        bar = a_bar(screen)
        logger.info("before")
        bar.start(0)
        logger.info(LINE)
        logger.info("Saving step %d", 20)
        *lines, last = screen.shown()
        assert lines == ["before", LINE, "Saving step 20"]
        assert last.startswith("step 0/100 ") and last.endswith("none saved  -:-- left")
        bar.close()
        logger.info("Training completed")
        assert screen.shown() == [*lines, "Training completed"]


def test_the_bar_shows_steps_loss_speed_the_last_checkpoint_and_the_time_left() -> None:
    clock = Clock(0.0)
    with terminal(80) as screen:
        bar = a_bar(screen, clock)
        bar.note(Resumed(60))
        bar.start(60)
        assert screen.shown()[-1].endswith("loaded 60  -:-- left"), "it may be in memory, or in another run's folder"
        bar.note(an_event("loaded", 60, at_risk_steps=5))
        bar.logged(2.7, 10.0)
        bar.note(Resumed(60))
        assert screen.shown()[-1].endswith("  tps 10  5 at risk  loaded 60  -:-- left"), "the disk lacks 5 steps"
        for _ in range(20):
            clock.seconds += 2.0
            bar.step_done()
        bar.logged(2.632, 4698.7)
        for event in ("save_started", "staged", "committed"):
            bar.note(an_event(event, 80))
        (shown,) = screen.shown()
        assert shown.startswith("step 80/100  ") and shown.endswith("  loss 2.6320  tps 4,699  saved 80  0:40 left")
        assert len(shown) == 79, "the bar takes the space that is left, and no line is as long as the terminal is wide"
        bar.note(an_event("save_failed", 90))
        assert "90 failed" in screen.shown()[-1]


def test_the_bar_is_not_drawn_after_each_step_of_a_fast_run() -> None:
    clock = Clock(0.0)
    with terminal(80) as screen:
        bar = a_bar(screen, clock)
        bar.start(0)
        for _ in range(99):
            clock.seconds += 0.0104
            bar.step_done()
        assert screen.shown()[-1].startswith("step 98/100")
        assert screen.received.count("step") == 3, "drawn at the start and twice in this second"


@pytest.mark.parametrize("columns", [20, 40, 60, 79, 80, 120, 400])
def test_the_line_is_shorter_than_the_terminal_at_any_width(columns: int) -> None:
    long = Progress(123456, 1000000, "saving 123000", 2.6320, 1234567.0, 36000.0 * 24)
    for progress in (long, Progress(0, 10), Progress(10, 10, "saved 10", 1.0, 1.0, 0.0)):
        line = plain(progress, columns)
        assert len(line) < columns and line.startswith(f"step {progress.step}/")


def test_a_narrow_terminal_loses_first_what_log_lines_have_too() -> None:
    progress = Progress(80, 100, "saved 80", 2.632, 4699.0, 40.0)
    assert plain(progress, 60).endswith("━  tps 4,699  saved 80  0:40 left")
    assert plain(progress, 45).endswith("━  saved 80  0:40 left")


def test_a_terminal_without_unicode_gets_ascii() -> None:
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), color_system=None)
    assert render_progress(Progress(50, 100), console, 80).isascii()


def test_other_text_replaces_the_bar_and_the_next_drawing_comes_below_it() -> None:
    with terminal(80) as screen:
        bar = a_bar(screen)
        bar.start(0)
        screen.stream.write("x" * 90 + "\n")
        bar.note(an_event("committed", 1))
        above, line = screen.shown()
        assert above == "x" * 90 and line.startswith("step 0/100 ")


def test_a_terminal_that_hangs_up_ends_the_bar_and_not_the_training() -> None:
    with terminal(80) as screen, logged_to(screen):
        bar = a_bar(screen)
        bar.start(0)
        screen.hang_up()
        bar.note(an_event("committed", 1))
        bar.step_done()
        bar.close()


def test_a_forked_child_neither_draws_nor_redirects_its_log_lines() -> None:
    with terminal(80) as screen, logged_to(screen):
        bar = a_bar(screen)
        bar.start(0)
        if (child := os.fork()) == 0:
            logger.info("from the child" + " " * 80)
            bar.note(an_event("committed", 50))
            os._exit(0)
        os.waitpid(child, 0)
        (line,) = [line.rstrip() for line in screen.shown()]
        assert line == "from the child"
        bar.close()


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0:00"), (65, "1:05"), (7389, "2:03:09"), (273600, "3 d 4 h")])
def test_durations_are_short(seconds: float, text: str) -> None:
    assert readable_duration(seconds) == text


def test_there_is_no_bar_in_a_pipe_on_other_ranks_on_a_dumb_terminal_or_when_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def has_bar(config: JobConfig, rank: int) -> bool:
        return bool(build_progress_bars(config, rank))

    with terminal(80) as screen:
        monkeypatch.setattr(sys, "stderr", screen.stream)
        monkeypatch.setenv("TERM", "xterm")
        assert has_bar(JobConfig(), 0)
        assert not has_bar(JobConfig(), 1)
        assert not has_bar(JobConfig(metrics=Metrics(enable_progress_bar=False)), 0)
        monkeypatch.setenv("TERM", "dumb")
        assert not has_bar(JobConfig(), 0)
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert not has_bar(JobConfig(), 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the launcher's process group is read from /proc")
def test_a_job_in_the_background_of_the_terminal_is_recognised() -> None:
    # setsid --ctty makes the terminal that of the session, as a shell's is.
    with terminal(80) as screen:
        command = ["setsid", "--ctty", "--wait", sys.executable, "-c", SUSPENDS]
        subprocess.run(command, cwd=REPO, stdin=screen.stream, stdout=screen.stream, check=True, timeout=60)
        shown = dict(line.rsplit(" ", 1) for line in screen.shown())
    assert shown == {"front": "True", "job in the background": "False", "its worker": "False", "worker": "True"}


def test_a_screen_is_read_as_a_person_reads_it() -> None:
    assert screen_of("abc\rX\r\n\x1b[1mlong\x1b[0m\r\x1b[Kend\r\n") == ["Xbc", "end"]
