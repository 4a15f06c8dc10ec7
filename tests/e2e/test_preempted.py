"""A preempted job saves the same step on every rank and leaves; the rerun continues from there."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.jobs import DEADLINE_SECONDS, TINY, Job, run, start
from tests.forked import run_code
from tests.processes import children, command_line, send

STEPS = 4000
ARGUMENTS = (f"--training.steps={STEPS}", "--checkpoint.interval=10", "--checkpoint.async_mode=async_with_pinned_mem")


@pytest.mark.slow
def test_sigterm_to_one_worker_during_a_save_ends_all_with_143_and_the_rerun_continues(tmp_path: Path) -> None:
    with start(tmp_path / "run", *ARGUMENTS, ranks=2) as job:
        job.wait_until(_save_in_flight)
        at_signal = max(job.losses())
        send(job.processes[1].pid, signal.SIGTERM)
        assert job.wait() == [143, 143], job.log
        step = _preempted_step(job)
        assert step - at_signal <= 3, "at most the step during the signal, and two more"
        assert _in_flight_before_it_left(job) <= _durable(job)
        assert all(name.removeprefix("step-").isdigit() for name in job.checkpoints), "no staging folder is left"
    _continues_after(step, tmp_path / "run", ranks=2)


SIGNALLED_WHILE_LOADING = """
import logging, os, signal, sys, threading
sys.path.insert(0, os.getcwd())
import train
from torchtitan_lite.checkpoint.state.train_state import TrainState
received, load_state_dict = threading.Event(), TrainState.load_state_dict

class Watch(logging.Handler):
    def emit(self, record):
        if "Received SIGTERM" in record.getMessage():
            received.set()

def load_and_be_signalled(self, state):
    load_state_dict(self, state)
    logging.getLogger("torchtitan_lite").addHandler(Watch())
    os.kill(os.getpid(), signal.SIGTERM)
    assert received.wait(60)

TrainState.load_state_dict = load_and_be_signalled
sys.exit(train.main(ARGUMENTS))
"""


@pytest.mark.slow
def test_sigterm_during_the_load_ends_the_job_before_it_trains_a_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = run(folder, "--training.steps=2")
    losses = job.losses()
    arguments = [*TINY, f"--job.dump_folder={folder}", "--training.steps=4000"]
    log = tmp_path / "signalled.log"
    code = run_code(f"ARGUMENTS = {arguments}\n{SIGNALLED_WHILE_LOADING}", log, dict(os.environ)).wait(DEADLINE_SECONDS)
    assert code == 128 + signal.SIGTERM, log.read_text()
    assert "Trained nothing after step 2; leaving for SIGTERM" in log.read_text()
    assert [event["step"] for event in job.events("preempted")] == [2]
    assert (job.checkpoints, job.losses()) == (["step-2"], losses)


@pytest.mark.exhaustive
def test_sigterm_during_the_compilation_ends_the_job_after_two_steps_at_the_latest(tmp_path: Path) -> None:
    # Cold, because the compiler cannot start its own workers from a forked process.
    with start(tmp_path / "run", *ARGUMENTS, "--training.compile", cold=True) as job:
        job.wait_until(lambda job: "Training starts at step 1," in job.log)
        send(job.processes[0].pid, signal.SIGTERM)
        assert job.wait() == [143], job.log
        assert _preempted_step(job) <= 2


@pytest.mark.slow
def test_sigterm_to_torchrun_reaches_every_rank_and_writer_and_loses_nothing(tmp_path: Path) -> None:
    with start(tmp_path / "run", *ARGUMENTS, ranks=2, torchrun=[], cold=True) as job:
        job.wait_until(_save_in_flight)
        for pid in [*_writer_processes(job), job.processes[0].pid]:
            send(pid, signal.SIGTERM)
        assert job.wait() == [1], "torchrun turns every code but 0 into 1"
        step = _preempted_step(job)
        assert _in_flight_before_it_left(job) <= _durable(job)
        assert all(name.removeprefix("step-").isdigit() for name in job.checkpoints)
        assert job.log.count("exitcode  : 143") == 2 or "Signal 15" not in job.log, job.log
    _continues_after(step, tmp_path / "run", ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGUSR1", 138), ("SIGINT", 130)])
def test_other_signals_have_exit_codes_of_their_own(name: str, code: int, tmp_path: Path) -> None:
    with start(tmp_path / "run", *ARGUMENTS) as job:
        job.wait_until(lambda job: 5 in job.losses())
        send(job.processes[0].pid, signal.Signals[name])
        assert job.wait() == [code], job.log
        assert f"step-{_preempted_step(job)}" in job.checkpoints


@pytest.mark.slow
def test_a_rank_whose_peer_is_frozen_ends_at_its_deadline(tmp_path: Path) -> None:
    with start(tmp_path / "run", *ARGUMENTS, "--checkpoint.preemption_grace_seconds=3", ranks=2) as job:
        job.wait_until(lambda job: 5 in job.losses())
        frozen, survivor = job.processes
        send(frozen.pid, signal.SIGSTOP)
        send(survivor.pid, signal.SIGTERM)
        assert survivor.wait(60) == 1, job.log
        assert "this rank could not leave" in job.log


def _save_in_flight(job: Job) -> bool:
    staged = {event["step"] for event in job.events("staged")}
    return bool(staged - _durable(job)) and bool(job.losses())


def _durable(job: Job) -> set[int]:
    return {event["step"] for event in job.events("committed")}


def _in_flight_before_it_left(job: Job) -> set[int]:
    return {event["step"] for event in job.events("save_started")}


def _preempted_step(job: Job) -> int:
    (preempted,) = job.events("preempted")
    assert f"step-{preempted['step']}" in job.checkpoints
    return int(preempted["step"])


def _continues_after(step: int, dump_folder: Path, ranks: int) -> None:
    job = run(dump_folder, f"--training.steps={step + 2}", ranks=ranks)
    assert f"Training starts at step {step + 1}," in job.log
    assert sorted(job.losses()) == list(range(1, step + 3)), "each step is logged once"


def _writer_processes(job: Job) -> list[int]:
    return [
        pid
        for process in job.processes
        for pid in children(process.pid)
        if "writer_process" in command_line(pid) and "train.py" not in command_line(pid)
    ]
