"""A job on a terminal: what a person sees, during and after it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.jobs import DEADLINE_SECONDS, TINY
from tests.forked import REPO
from tests.screens import terminal


@pytest.mark.slow  # a job of its own, from a cold start
@pytest.mark.skipif(sys.platform != "linux", reason="setsid --ctty gives the job its terminal")
def test_a_job_on_a_terminal_shows_its_progress_and_leaves_the_log_lines_alone(tmp_path: Path) -> None:
    options = [f"--job.dump_folder={tmp_path}", "--training.steps=4", "--checkpoint.interval=2"]
    with terminal(80) as screen:
        command = ["setsid", "--ctty", "--wait", sys.executable, str(REPO / "train.py"), *TINY, *options]
        streams = {"stdin": screen.stream, "stdout": screen.stream, "stderr": screen.stream}
        # Whoever runs the tests may have no terminal, and so TERM=dumb.
        job = subprocess.Popen(command, cwd=REPO, env=os.environ | {"TERM": "xterm-256color"}, **streams)
        shown = screen.shown_at_end()
        drawn = set(re.findall(r"step \d+/4|(?:none saved|sav(?:ed|ing) \d)", screen.received))
    assert job.wait(DEADLINE_SECONDS) == 0, "\n".join(shown)
    assert {"step 0/4", "step 2/4", "step 4/4", "none saved", "saving 2", "saved 2", "saved 4"} <= drawn
    log_line = re.compile(r"\[titan\] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d - (?:INFO|WARNING) - \S")
    assert not [line for line in shown if not log_line.match(line)]
    messages = [line.partition(" - INFO - ")[2] for line in shown]
    assert "Training completed" in messages
    assert [message[:8] for message in messages if message.startswith("step:")] == [f"step:  {n}" for n in (1, 2, 3, 4)]
