"""A rank and its watcher process: what is named and killed, and what is left alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.hangs import ranks
from tests.logged import logged_warnings
from tests.no_threads import no_threads
from tests.processes import children, command_line, own_children, read_lines, send, wait_until
from torchtitan_lite.disk.helper import Line
from torchtitan_lite.distributed.job_link import JobLink
from torchtitan_lite.hangs.own_rank import WORDS_BYTES, OwnRank, dump_signal
from torchtitan_lite.hangs.watch import HangWatch
from torchtitan_lite.hangs.watcher import Follower, Orders

POLL_CALLS = (7, 73)
"""poll on x86-64, ppoll on arm64, in which it is called for poll."""


def is_watching(process: subprocess.Popen[str], waits_for: int = 2) -> bool:
    """Return whether its watcher waits for the rank, and for the judge: it has reported to it.

    The judge waits for the rank, for new watchers, and for those of the other ranks.
    """
    for watcher in own_children(process.pid):
        with suppress(OSError, ValueError):
            number, _, waited, *_ = Path(f"/proc/{watcher}/syscall").read_text().split()
            if int(number) in POLL_CALLS and int(waited, 16) == waits_for:
                return True
    return False


def start_together(kinds: Sequence[str], folder: Path) -> list[subprocess.Popen[str]]:
    """Start ranks of these kinds, which begin their steps once the watcher of each is at work.

    A busy machine starts one of them seconds after the other: longer than the bound.
    """
    (folder / "hold").touch()
    processes = [ranks.start(kind, rank, len(kinds), folder) for rank, kind in enumerate(kinds)]
    wait_until(lambda: all((folder / f"began{rank}").exists() for rank in range(len(kinds))))
    wait_until(lambda: all(map(is_watching, processes[1:])))
    (folder / "hold").unlink()
    return processes


@pytest.mark.parametrize(
    ("kind", "reason", "innermost"),
    [
        ("stop", "it is stopped (SIGSTOP, or a debugger)", "_hang"),
        ("sleep", "it does not progress", "_hang"),
        ("lock", "it runs no Python: a call in C holds the GIL, or the system does not return", "_lock_for_good"),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_stack_and_killed(
    kind: str, reason: str, innermost: str, tmp_path: Path
) -> None:
    code, logged = ranks.end(ranks.start(kind, 0, 1, tmp_path))
    lines = logged.splitlines()
    assert code == -signal.SIGKILL
    assert lines[-1].startswith("No step ended for")
    first = next(number for number, line in enumerate(lines) if line.endswith("ERROR - Rank 0 hangs in step 4:"))
    assert lines[first + 1] == f"  {reason}"
    assert lines[first + 3].endswith(f" in {innermost}")


def test_events_have_the_rank_the_host_and_the_reason(tmp_path: Path) -> None:
    ranks.end(ranks.start("stop", 0, 1, tmp_path))
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert (event["event"], event["step"], event["rank"], event["host"]) == ("hung", 4, 0, os.uname().nodename)
    assert "stopped" in event["reason"]
    assert ranks.BOUND_SECONDS <= event["seconds"] < 2 * ranks.BOUND_SECONDS


def test_a_disk_that_hangs_keeps_no_rank_alive(tmp_path: Path) -> None:
    """A write to the file of events takes for ever: it is a full pipe."""
    os.mkfifo(tmp_path / "events.jsonl")
    full = os.open(tmp_path / "events.jsonl", os.O_RDWR | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while os.write(full, bytes(4096)):
            pass
    code, logged = ranks.end(ranks.start("sleep", 0, 1, tmp_path))
    os.close(full)
    assert code == -signal.SIGKILL
    assert "ERROR - Rank 0 hangs in step 4:" in logged


@pytest.mark.parametrize("kind", ["slow", "paused", "go"])
def test_a_rank_that_is_slow_or_in_a_pause_is_left_alone(kind: str, tmp_path: Path) -> None:
    assert ranks.end(ranks.start(kind, 0, 1, tmp_path)) == (0, "")


@pytest.mark.parametrize("hangs", [pytest.param(0, marks=pytest.mark.slow), 1])  # 2 s each, like others here.
@pytest.mark.parametrize("kind", ["stop", "sleep", "lock"])
def test_of_two_ranks_the_one_that_hangs_is_named_and_both_are_killed(kind: str, hangs: int, tmp_path: Path) -> None:
    """The other one stands, too, one collective ahead."""
    processes = start_together([kind if rank == hangs else "ahead" for rank in range(2)], tmp_path)
    ended = [ranks.end(process) for process in processes]
    assert [code for code, _ in ended] == [-signal.SIGKILL] * 2
    assert f"ERROR - Rank {hangs} hangs in step 4:\n" in ended[0][1]
    assert f"Rank {1 - hangs} hangs" not in ended[0][1]
    assert "hangs" not in ended[1][1], "rank 0 alone names ranks"


def test_no_rank_is_killed_while_the_others_wait_for_one_in_a_pause(tmp_path: Path) -> None:
    processes = start_together(["slower", "paused"], tmp_path)
    assert [ranks.end(process) for process in processes] == [(0, ""), (0, "")]


def test_no_rank_is_killed_that_has_just_left_a_pause_for_which_another_one_waited(tmp_path: Path) -> None:
    """What it waited for takes its time still."""
    processes = start_together(["late", "met late"], tmp_path)
    assert [ranks.end(process) for process in processes] == [(0, ""), (0, "")]


def test_a_rank_whose_watcher_is_gone_says_so_and_is_named_as_silent(tmp_path: Path) -> None:
    processes = start_together(["ahead", "unwatched"], tmp_path)
    code, logged = ranks.end(processes[0])
    processes[1].kill()  # A launcher would, once rank 0 has ended.
    assert code == -signal.SIGKILL
    assert "ERROR - Rank 1 hangs:\n  it is silent, and so is its watcher: its host may be down\n" in logged
    assert (
        "The process that watches rank 1 has ended: a hang of this rank is not reported" in ranks.end(processes[1])[1]
    )


@pytest.mark.parametrize(
    ("kinds", "hangs", "waits_for"),
    [(["sleep", "ahead+watcher"], 0, (2, 1)), (["ahead+watcher", "sleep"], 1, (3, 0))],
    ids=["another rank's", "the judge"],
)
def test_a_watcher_that_was_killed_is_started_again_with_the_next_step_and_its_rank_is_not_named_for_it(
    kinds: list[str], hangs: int, waits_for: tuple[int, int], tmp_path: Path
) -> None:
    (tmp_path / "hold again").touch()
    processes = start_together(kinds, tmp_path)
    wait_until(lambda: all((tmp_path / f"third{rank}").exists() for rank in range(2)))
    number, rank = waits_for
    wait_until(lambda: is_watching(processes[rank], number))
    (tmp_path / "hold again").unlink()
    ended = [ranks.end(process) for process in processes]
    assert [code for code, _ in ended] == [-signal.SIGKILL] * 2
    assert f"ERROR - Rank {hangs} hangs in step 4:\n" in ended[0][1]
    assert f"Rank {1 - hangs} hangs" not in ended[0][1]
    assert "hangs" not in ended[1][1], "rank 0 alone names ranks"
    assert (
        f"The process that watches rank {rank} has ended: a hang of this rank is not reported before its next step"
        in ended[rank][1]
    )


def test_where_the_system_has_no_more_threads_steps_continue_and_a_later_one_starts_the_watcher(tmp_path: Path) -> None:
    alone = ranks.InFolder(0, 1, tmp_path)
    with logged_warnings() as logged:
        with no_threads():
            watch = HangWatch(60, alone, dict, events=None, gives_up_seconds=100).__enter__()
            watch.step(1)
            assert (watch.pid, len(logged)) == (None, 2)
        watch.step(2)
        assert watch.pid is not None
        send(watch.pid, signal.SIGKILL)
        wait_until(lambda: len(logged) == 3)
        with no_threads():
            watch.step(3)
            assert watch.pid is None
            watch.__exit__(None, None, None)
    assert all("The process that watches rank 0 has ended" in line for line in logged)


@pytest.mark.slow  # Four ranks, four watchers and four writers.
def test_the_rank_that_hangs_is_named_whatever_becomes_of_writers_meanwhile(tmp_path: Path) -> None:
    processes = start_together(["ahead+kill", "ahead+stop", "ahead+slow", "sleep+stop"], tmp_path)
    ended = [ranks.end(process) for process in processes]
    assert [code for code, _ in ended] == [-signal.SIGKILL] * 4
    assert [logged.count("happens here") for _, logged in ended] == [1] * 4
    assert "ERROR - Rank 3 hangs in step 4:\n" in ended[0][1]
    assert sum(logged.count(" hangs in step") for _, logged in ended) == 1
    assert [event["rank"] for event in read_lines(tmp_path / "events.jsonl")] == [3]


def test_a_rank_whose_judge_is_gone_is_named_by_its_own_watcher(tmp_path: Path) -> None:
    processes = start_together(["go", "sleep"], tmp_path)
    (code, _), (other_code, logged) = [ranks.end(process) for process in processes]
    assert (code, other_code) == (0, -signal.SIGKILL)
    assert "ERROR - Rank 1 hangs in step 4:" in logged


def test_a_watcher_that_could_not_reach_the_judge_at_first_joins_it_later() -> None:
    ours, theirs = socket.socketpair()
    words, stacks = memoryview(bytearray(WORDS_BYTES)).cast("Q"), os.memfd_create("stacks")
    with socket.socket() as listening, ours:
        listening.bind(("127.0.0.1", 0))
        orders = Orders(1, os.getpid(), *listening.getsockname(), "secret", "")
        with logged_warnings() as warned:
            follower = Follower(OwnRank(1, os.getpid(), words, stacks, Line(theirs)), orders)
        assert "cannot reach the one of rank 0" in warned[0]
        listening.listen()
        listening.settimeout(60.0)
        watching = threading.Thread(target=follower.run, daemon=True)
        watching.start()
        link = JobLink(listening.accept()[0], b"secret", is_caller=False)
        assert link.receive() == {"is": "here", "rank": 1}
    watching.join()
    assert follower._link is not None
    for each in (link, follower._link, theirs):
        each.close()
    os.close(stacks)


@pytest.mark.slow
def test_a_busy_process_survives_any_number_of_looks_at_its_stack(tmp_path: Path) -> None:
    """Its threads run on, and their frames come and go, while one answers."""
    process = ranks.start("busy", 0, 1, tmp_path)
    wait_until((tmp_path / "rank0").exists)
    while process.poll() is None:
        send(process.pid, dump_signal())
        time.sleep(0.0005)
    assert ranks.end(process) == (0, "")


@pytest.mark.parametrize(("pause_seconds", "warns"), [(100.0, False), (0.0, True)])
def test_pauses_do_not_count_for_auto(pause_seconds: float, *, warns: bool, tmp_path: Path) -> None:
    """The bound would exceed the time-out of collectives, which is a warning, once."""
    now = 0.0
    alone = ranks.InFolder(0, 1, tmp_path)
    watch = HangWatch("auto", alone, dict, events=None, gives_up_seconds=100, clock=lambda: now)
    with logged_warnings() as logged:
        for step in range(1, 15):
            watch.step(step)
            now += 1.0 if pause_seconds else 101.0
            with watch.paused():
                now += pause_seconds
    expected = "A rank that hangs would be reported after 1010 s, but the others give up earlier"
    assert [line.partition(".")[0] for line in logged] == [expected] * warns


def test_a_watcher_dies_with_its_rank(tmp_path: Path) -> None:
    process = ranks.start("sleep", 0, 1, tmp_path)
    wait_until((tmp_path / "rank0").exists)
    (watcher,) = children(process.pid)
    process.kill()
    assert ranks.end(process) == (-signal.SIGKILL, "")
    wait_until(lambda: not Path(f"/proc/{watcher}").exists())


def test_a_watcher_has_its_own_name_the_priority_of_its_rank_and_neither_the_secret_nor_other_descriptors(
    tmp_path: Path,
) -> None:
    process = ranks.start("sleep", 0, 2, tmp_path)
    wait_until((tmp_path / "rank0").exists)
    (watcher,) = children(process.pid)
    wait_until(lambda: Path(f"/proc/{watcher}/comm").read_text() == "titan-watcher\n")
    _, secret = (tmp_path / "chosen.json").read_text().strip("[]").replace('"', "").split(", ")
    assert os.getpriority(os.PRIO_PROCESS, watcher) == os.getpriority(os.PRIO_PROCESS, process.pid)
    opened = [str(fd.readlink()) for fd in Path(f"/proc/{watcher}/fd").iterdir()]
    process.kill()
    ranks.end(process)
    assert len(secret) == 64
    assert secret not in command_line(watcher)
    assert sum(name.startswith("socket:") for name in opened) == 2, opened


def test_a_forked_child_that_leaves_does_not_end_the_watch(tmp_path: Path) -> None:
    code, logged = ranks.end(ranks.start("fork", 0, 1, tmp_path))
    assert code == -signal.SIGKILL
    assert "ERROR - Rank 0 hangs in step 4:" in logged
