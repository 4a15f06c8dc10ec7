"""One job at a time writes a folder: real files, and real processes that live, stop and die."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.no_threads import no_threads
from tests.store.crashing import Crash, Cut
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.disk.lock_file import LockFile
from torchtitan_lite.errors import FolderInUse, LeaseLost
from torchtitan_lite.store.holder import Holder
from torchtitan_lite.store.lease import FolderLease, Lease, LeaseClock
from torchtitan_lite.store.store import CheckpointStore

BEAT_SECONDS = 0.02
PROCESS = f"""
import os, sys
from pathlib import Path
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.store.lease import FolderLease

def in_a_fork(what):
    pid = os.fork()
    if pid == 0:
        try:
            what()
            os._exit(0)
        except BaseException as error:
            print(f"{{type(error).__name__}}: {{error}}", flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

lease = None
for line in sys.stdin:
    command, *arguments = line.split()
    try:
        if command == "take":
            seconds = float(arguments[1]) if len(arguments) > 1 else 30
            lease = FolderLease(
                Path(arguments[0]), run_id="theirs", timeout_seconds=seconds, heartbeat_seconds={BEAT_SECONDS}
            )
            lease.take()
        elif command == "fork":
            if in_a_fork(getattr(lease, arguments[0])):
                continue  # The fork has said why.
        else:
            getattr(lease, command)()
        print("done", flush=True)
    except CheckpointError as error:
        print(f"{{type(error).__name__}}: {{error}}", flush=True)
"""


class Process:
    """Another job, which obeys commands."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        command = [sys.executable, "-c", PROCESS]
        self._popen = subprocess.Popen(
            command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.pid = self._popen.pid

    def begin(self, command: str) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(command + "\n")
        self._popen.stdin.flush()

    def answer(self) -> str:
        assert self._popen.stdout is not None
        return self._popen.stdout.readline().strip()

    def do(self, command: str) -> str:
        self.begin(command)
        return self.answer()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def continue_(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self, *, wait_for: bool = True) -> None:
        """Kill the process; without `wait_for` it stays a zombie, as under a launcher that does not wait for it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        if wait_for:
            self._popen.wait()

    def close(self) -> None:
        self._popen.kill()
        self._popen.communicate()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.close()


@pytest.fixture
def new_lease(root: Path) -> Iterator[Callable[..., Lease]]:
    """Return a function that makes leases of this process, which wait in no time; release them at the end."""
    with contextlib.ExitStack() as stack:

        def new(**settings: object) -> Lease:
            defaults = {"run_id": "ours", "timeout_seconds": 3, "heartbeat_seconds": 1}
            settings["clock"] = LeaseClock(settings.pop("sleep", lambda seconds: None), settings.pop("now", time.time))
            lease = FolderLease(root, **(defaults | settings))  # type: ignore[arg-type]  # a few of many parameters
            stack.callback(lease.release)
            return lease

        yield new


class Sleeper:
    """Waits in no time; `at[n]` happens during the n-th wait, from 1."""

    def __init__(self, at: dict[int, Callable[[], object]] | None = None) -> None:
        self.at = at or {}
        self.waits: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.at.get(len(self.waits), lambda: None)()


def never(seconds: float) -> None:
    raise AssertionError("waited")


ELSEWHERE = Holder("t0ken", "theirs", "node7", "another kernel pid:[1]", 41, 5, 1_700_000_000)


def here(**changes: object) -> Holder:
    return dataclasses.replace(Holder.this_process("theirs", 1_700_000_000), **changes)  # type: ignore[arg-type]


def put(root: Path, holder: Holder, beat: int = 1) -> None:
    """Put a new file in place, as taking a folder does."""
    root.mkdir(exist_ok=True)
    (root / "new").write_bytes(holder.to_bytes(beat, 1_700_000_000 + beat))
    (root / "new").replace(root / "writer.lock")


def holder_of(root: Path) -> Holder | None:
    return Holder.parse((root / "writer.lock").read_bytes())


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_free_folder_is_created_and_taken_at_once_and_free_again_after_release(
    root: Path, new_lease: Callable[..., Lease]
) -> None:
    lease = new_lease(sleep=never)
    for _ in range(2):
        lease.take()
        lease.take()
        lease.check()
        holder = holder_of(root)
        assert holder is not None
        assert (holder.run_id, holder.pid, holder.has_ended()) == ("ours", os.getpid(), False)
        assert names(root) == ["writer.lock"]
        lease.release()
        lease.release()
        assert names(root) == []


@pytest.mark.promise(
    "Of any number of jobs that take a folder at the same moment, one gets it; the others are refused, and the "
    "error names the holder.",
    section="writer",
)
def test_a_folder_is_refused_while_its_holder_lives_and_the_message_names_the_holder(
    root: Path, process: Process
) -> None:
    assert process.do(f"take {root}") == "done"
    holder = holder_of(root)
    with pytest.raises(FolderInUse) as refused:
        FolderLease(root, run_id="ours", heartbeat_seconds=BEAT_SECONDS).take()
    assert holder is not None
    message = str(refused.value)
    for part in (str(root), "run theirs", f"process {process.pid} on {holder.host}", "since 2", "--job.dump_folder"):
        assert part in message
    assert process.do("check") == "done"
    assert names(root) == ["writer.lock"]


def test_waiting_is_logged_once(root: Path, new_lease: Callable[..., Lease], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    put(root, ELSEWHERE)
    new_lease().take()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "Waiting up to 3 s" in lines[0]
    holder = "run theirs (process 41 on node7, since 2023-11-14 22:13:20 UTC)"
    assert holder in lines[0] and holder in lines[1]
    assert "no sign of life" in lines[1]


@pytest.mark.promise("After a kill, the next job on the same machine takes the folder at once.", section="writer")
@pytest.mark.parametrize("wait_for", [True, False], ids=["gone", "zombie"])
def test_a_folder_of_a_killed_holder_is_taken_over_at_once(
    root: Path, process: Process, new_lease: Callable[..., Lease], caplog: pytest.LogCaptureFixture, wait_for: bool
) -> None:
    caplog.set_level(logging.INFO)
    assert process.do(f"take {root}") == "done"
    process.kill(wait_for=wait_for)
    lease = new_lease(sleep=never)
    lease.take()
    lease.check()
    assert [f"process {process.pid}" in record.getMessage() for record in caplog.records] == [True]
    assert names(root) == ["writer.lock"]


def test_another_process_with_the_pid_of_the_holder_is_not_the_holder(
    root: Path, new_lease: Callable[..., Lease]
) -> None:
    put(root, here(started=here().started + 1))
    new_lease(sleep=never).take()


@pytest.mark.promise("A job that has lost its folder renames and removes nothing there.", section="writer")
def test_a_stopped_holder_loses_the_folder_and_notices_when_it_continues(
    root: Path, process: Process, new_lease: Callable[..., Lease]
) -> None:
    assert process.do(f"take {root}") == "done"
    process.stop()
    sleeper = Sleeper()
    lease = new_lease(sleep=sleeper, heartbeat_seconds=60, timeout_seconds=300)
    lease.take()
    assert sum(sleeper.waits) >= 300
    taken = (root / "writer.lock").read_bytes()
    process.continue_()
    answer = process.do("check")
    assert answer.startswith("LeaseLost")
    assert f"run ours (process {os.getpid()} on " in answer
    assert process.do("release") == "done"  # This also ends its heartbeat.
    assert (root / "writer.lock").read_bytes() == taken
    lease.check()


def test_a_folder_of_a_silent_holder_elsewhere_is_taken_over_after_the_complete_wait(
    root: Path, new_lease: Callable[..., Lease]
) -> None:
    put(root, ELSEWHERE)
    sleeper = Sleeper()
    lease = new_lease(sleep=sleeper)
    lease.take()
    lease.check()
    assert sleeper.waits == [0.5] * 6 + [1]


@pytest.mark.parametrize("beats_during", [1, 4, 6])
def test_a_holder_elsewhere_with_a_heartbeat_keeps_its_folder(
    root: Path, new_lease: Callable[..., Lease], beats_during: int
) -> None:
    put(root, ELSEWHERE)
    sleeper = Sleeper({beats_during: lambda: (root / "writer.lock").write_bytes(ELSEWHERE.to_bytes(2, 1_700_000_002))})
    with pytest.raises(FolderInUse, match="process 41 on node7"):
        new_lease(sleep=sleeper).take()
    assert len(sleeper.waits) == beats_during
    assert holder_of(root) == ELSEWHERE
    assert names(root) == ["writer.lock"]


def test_with_a_time_out_of_zero_a_holder_that_may_live_keeps_its_folder(
    root: Path, new_lease: Callable[..., Lease]
) -> None:
    put(root, ELSEWHERE)
    with pytest.raises(FolderInUse):
        new_lease(timeout_seconds=0, sleep=never).take()


def test_a_folder_that_becomes_free_during_the_wait_is_taken(root: Path, new_lease: Callable[..., Lease]) -> None:
    put(root, ELSEWHERE)
    sleeper = Sleeper({2: (root / "writer.lock").unlink})
    new_lease(sleep=sleeper).take()
    assert len(sleeper.waits) == 2


def test_a_job_that_sees_another_take_over_from_the_silent_holder_is_refused(
    root: Path, new_lease: Callable[..., Lease]
) -> None:
    put(root, ELSEWHERE)
    quicker = dataclasses.replace(ELSEWHERE, token="other", host="node8")
    with pytest.raises(FolderInUse, match="node8"):
        new_lease(sleep=Sleeper({6: lambda: put(root, quicker)})).take()


def test_a_job_is_refused_if_a_host_without_common_locks_takes_the_folder_after_it(
    root: Path, new_lease: Callable[..., Lease]
) -> None:
    put(root, ELSEWHERE)
    later = dataclasses.replace(ELSEWHERE, token="other", host="node8")
    with pytest.raises(FolderInUse, match="node8"):
        new_lease(sleep=Sleeper({7: lambda: put(root, later)})).take()
    assert holder_of(root) == later


WHOLE = ELSEWHERE.to_bytes(1, 1_700_000_001)
DAMAGED = {
    "empty": b"",
    "cut": WHOLE[:70],
    "zeroed": bytes(len(WHOLE)),
    "not text": b"\xff\xfe\x00",
    "deep": b"[" * 60000,
    "a list": b"[1, 2]",
    "a field less": WHOLE.replace(b'"pid"', b'"pit"'),
    "every process": here(pid=-1).to_bytes(1, 0),
    "no process": here(pid=2**40).to_bytes(1, 0),
    "half a process": here(pid=1.5).to_bytes(1, 0),
    "no date": WHOLE.replace(b"1700000000", b"17000000000000000"),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_lock_file_is_taken_over_after_the_wait(
    root: Path, new_lease: Callable[..., Lease], caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    root.mkdir()
    (root / "writer.lock").write_bytes(data)
    sleeper = Sleeper()
    lease = new_lease(sleep=sleeper)
    lease.take()
    lease.check()
    assert sum(sleeper.waits) >= 3
    assert "from an unknown job (its lock file is damaged)" in caplog.text


def test_another_job_that_is_taking_the_folder_is_not_disturbed(root: Path, new_lease: Callable[..., Lease]) -> None:
    put(root, here(started=1))
    before = (root / "writer.lock").read_bytes()
    with (root / "writer.lock").open("r+b") as at_it:
        fcntl.flock(at_it, fcntl.LOCK_EX)
        with pytest.raises(FolderInUse):
            new_lease().take()
        assert (root / "writer.lock").read_bytes() == before
    new_lease(sleep=never).take()


class Overtaken(Durable):
    """Another job puts its lock file in place right before this one does."""

    def write_file(self, path: Path, data: bytes) -> None:
        super().write_file(path, data)
        put(path.parent, ELSEWHERE)


@pytest.mark.parametrize("before", ["free", "of a dead process"])
def test_the_second_job_that_takes_a_folder_is_refused(
    root: Path, new_lease: Callable[..., Lease], before: str
) -> None:
    root.mkdir()
    if before != "free":
        put(root, here(started=1))
    with pytest.raises(FolderInUse, match="node7"):
        new_lease(durable=Overtaken(), timeout_seconds=0).take()
    assert holder_of(root) == ELSEWHERE


def test_a_job_is_refused_if_another_replaced_the_lock_file_that_it_opened(
    root: Path, new_lease: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(root, here(started=1))
    flock = fcntl.flock

    def flock_later(file: int, how: int) -> None:
        put(root, ELSEWHERE)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock_later)
    with pytest.raises(FolderInUse, match="node7"):
        new_lease(timeout_seconds=0).take()
    assert holder_of(root) == ELSEWHERE


def no_lock_file(root: Path) -> None:
    root.mkdir()


def lock_file_of_the_dead(root: Path) -> None:
    put(root, here(started=1))


def damaged_lock_file(root: Path) -> None:
    root.mkdir()
    (root / "writer.lock").write_bytes(b"")


@pytest.mark.promise(
    "Of any number of jobs that take a folder at the same moment, one gets it; the others are refused, and the "
    "error names the holder.",
    section="writer",
)
@pytest.mark.parametrize(
    ("prepare", "timeout_seconds", "rounds"),
    [
        pytest.param(no_lock_file, 30, 5, marks=pytest.mark.slow),
        (lock_file_of_the_dead, 30, 5),
        pytest.param(damaged_lock_file, 0.5, 1, marks=pytest.mark.slow),
    ],
    ids=["free", "dead", "damaged"],
)
def test_of_many_jobs_that_take_a_folder_at_the_same_moment_one_gets_it(
    tmp_path: Path, prepare: Callable[[Path], None], timeout_seconds: float, rounds: int
) -> None:
    with contextlib.ExitStack() as stack:
        processes = [Process() for _ in range(8)]
        for number, process in enumerate(processes):
            stack.callback(process.close)
            process.begin(f"take {tmp_path / f'warm-{number}'}")
        assert {process.answer() for process in processes} == {"done"}
        for number in range(rounds):
            root = tmp_path / f"round-{number}"
            prepare(root)
            for process in processes:
                process.begin(f"take {root} {timeout_seconds}")
            answers = [process.answer().split(":")[0] for process in processes]
            assert sorted(answers) == ["FolderInUse"] * 7 + ["done"]
            winner = processes[answers.index("done")]
            assert winner.do("check") == "done"
            assert names(root) == ["writer.lock"]
            assert winner.do("release") == "done"
            assert names(root) == []


def test_a_release_removes_only_its_own_lock_file(root: Path, new_lease: Callable[..., Lease]) -> None:
    lease = new_lease()
    lease.take()
    put(root, ELSEWHERE)
    lease.release()
    assert holder_of(root) == ELSEWHERE


def test_a_fork_of_the_holder_releases_nothing(root: Path, process: Process) -> None:
    assert process.do(f"take {root}") == "done"
    assert process.do("fork release") == "done"
    assert process.do("check") == "done"


def test_a_fork_of_the_holder_cannot_take_the_folder_of_its_parent(root: Path, process: Process) -> None:
    assert process.do(f"take {root}") == "done"
    assert process.do("fork take").startswith("FolderInUse")
    assert process.do("check") == "done"


@pytest.mark.parametrize("now", ["another", "no job"])
def test_the_error_for_a_lost_folder_names_its_new_holder(
    root: Path, new_lease: Callable[..., Lease], now: str
) -> None:
    lease = new_lease()
    lease.take()
    put(root, ELSEWHERE)
    if now == "no job":
        (root / "writer.lock").unlink()
    gone = r"lock file is gone.*the folder, was moved or removed.*move it back"
    with pytest.raises(LeaseLost, match="silent.*process 41 on node7" if now == "another" else gone) as lost:
        lease.check()
    assert ("silent" in str(lost.value)) == (now == "another"), "nothing says that this job was silent"


def test_a_lock_file_that_cannot_be_removed_is_a_warning(
    root: Path, new_lease: Callable[..., Lease], caplog: pytest.LogCaptureFixture
) -> None:
    lease = new_lease()
    lease.take()
    (root / "writer.lock").unlink()
    (root / "writer.lock").mkdir()
    lease.release()
    assert "Could not give" in caplog.text


class Looks:
    """Calls the next of `moments` at each look; the look after them sets `over`."""

    def __init__(self, *moments: Callable[[], object]) -> None:
        self.moments = list(moments)
        self.over = threading.Event()

    def __call__(self) -> float:
        if self.moments:
            self.moments.pop(0)()
        else:
            self.over.set()
        return 1_700_000_000.0


def nothing() -> None:
    pass


def heartbeat(root: Path) -> threading.Thread:
    return next(thread for thread in threading.enumerate() if str(root) in thread.name)


def test_the_heartbeat_changes_the_lock_file_and_not_its_holder(root: Path, new_lease: Callable[..., Lease]) -> None:
    seen: list[bytes] = []

    def look() -> None:
        seen.append((root / "writer.lock").read_bytes())

    clock = Looks(nothing, nothing, look, look, look)
    lease = new_lease(now=clock, heartbeat_seconds=0.001)
    lease.take()
    assert clock.over.wait(30)
    assert len(set(seen)) == 3
    assert {Holder.parse(data) for data in seen} == {holder_of(root)}


def test_a_folder_is_not_taken_where_the_system_has_no_thread_for_the_heartbeat(
    root: Path, new_lease: Callable[..., Lease]
) -> None:
    lease = new_lease()
    with no_threads(), pytest.raises(BlockingIOError, match="can't start new thread"):
        lease.take()
    assert names(root) == []
    lease.release()
    lease.take()
    lease.check()
    lease.release()
    assert names(root) == []


def test_a_failing_heartbeat_is_logged_once_and_retried(
    new_lease: Callable[..., Lease], caplog: pytest.LogCaptureFixture
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    clock = Looks(nothing, nothing, full, full, full)
    lease = new_lease(now=clock, heartbeat_seconds=0.001)
    lease.take()
    assert clock.over.wait(30)
    lease.check()
    lease.release()
    assert ["No space left" in record.getMessage() for record in caplog.records] == [True]


def test_a_heartbeat_never_writes_to_the_lock_file_of_another_job(
    root: Path, new_lease: Callable[..., Lease], caplog: pytest.LogCaptureFixture
) -> None:
    theirs = ELSEWHERE.to_bytes(7, 1_700_000_007)
    # During a beat, after the check that the file is ours.
    clock = Looks(nothing, nothing, lambda: put(root, ELSEWHERE, beat=7))
    hold = threading.Event()
    clock.moments.insert(2, lambda: hold.wait(30))
    lease = new_lease(now=clock, heartbeat_seconds=0.001)
    lease.take()
    thread = heartbeat(root)
    hold.set()
    thread.join(30)
    assert not thread.is_alive()
    assert (root / "writer.lock").read_bytes() == theirs
    assert ["no longer this job's" in record.getMessage() for record in caplog.records] == [True]


def test_a_reader_in_the_middle_of_a_heartbeat_reads_the_holder() -> None:
    old, new = ELSEWHERE.to_bytes(9, 999_999_999), ELSEWHERE.to_bytes(10, 1_000_000_001)
    assert old != new
    for at in range(len(old)):
        assert Holder.parse(new[:at] + old[at:]) == ELSEWHERE


@pytest.mark.parametrize("before", ["free", "held"])
@pytest.mark.parametrize("at", range(1, 6))
def test_a_job_can_take_a_folder_after_another_was_cut_anywhere_while_taking_it(
    root: Path, new_lease: Callable[..., Lease], before: str, at: int
) -> None:
    root.mkdir()
    if before == "held":
        put(root, ELSEWHERE)
    with contextlib.suppress(Crash):
        cut = new_lease(durable=Cut(at))
        cut.take()
        cut.release()
    lease = new_lease()
    lease.take()
    lease.check()
    assert names(root) == ["writer.lock"]


def test_recovering_a_store_leaves_the_lock_file_and_its_temporary_files(
    root: Path, new_lease: Callable[..., Lease]
) -> None:
    lease = new_lease()
    lease.take()
    (root / "step-1.staging").mkdir()
    (root / ".writer.lock.t0ken.tmp").write_bytes(b"half")
    assert CheckpointStore(root).recover() == [root / "step-1.staging"]
    assert names(root) == [".writer.lock.t0ken.tmp", "writer.lock"]
    assert CheckpointStore(root).committed() == []
    lease.check()


@pytest.mark.parametrize("taken", ["first", "over"])
def test_a_file_system_without_links_and_locks_works(
    root: Path, new_lease: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(Holder, "is_same_process_as", lambda one, other: False)  # as if it were another process
    if taken == "over":
        put(root, ELSEWHERE)
    lease = new_lease()
    lease.take()
    lease.check()
    with pytest.raises(FolderInUse):
        new_lease(timeout_seconds=0).take()
    lease.release()
    assert names(root) == []


def test_a_folder_of_the_same_process_is_taken_over_at_once_and_the_old_lease_notices(
    root: Path, new_lease: Callable[..., Lease]
) -> None:
    """A manager in a notebook that was not closed."""
    first, second = new_lease(), new_lease(timeout_seconds=0)
    first.take()
    second.take()
    second.check()
    with pytest.raises(LeaseLost):
        first.check()
    first.release()
    second.check()


def test_a_folder_that_cannot_be_created_raises_the_error_of_the_system(
    root: Path, new_lease: Callable[..., Lease]
) -> None:
    root.write_bytes(b"a file")
    with pytest.raises(FileExistsError):
        new_lease().take()


class Cleared(Durable):
    """Another job that takes the folder, too, removes each of the first `times` temporary lock files."""

    def __init__(self, times: int) -> None:
        self.times = times

    def write_file(self, path: Path, data: bytes) -> None:
        super().write_file(path, data)
        if self.times:
            self.times -= 1
            path.unlink()


@pytest.mark.parametrize(("prepare", "waits"), [(no_lock_file, 2), (lock_file_of_the_dead, 2), (damaged_lock_file, 9)])
def test_a_job_whose_temporary_lock_file_was_removed_has_not_taken_the_folder(
    root: Path, new_lease: Callable[..., Lease], prepare: Callable[[Path], None], waits: int
) -> None:
    """At two looks the folder is free and cannot be taken; at the third one it can."""
    prepare(root)
    sleeper = Sleeper()
    lease = new_lease(durable=Cleared(2), sleep=sleeper)
    lease.take()
    lease.check()
    assert len(sleeper.waits) == waits
    assert names(root) == ["writer.lock"]


@pytest.mark.parametrize("prepare", [no_lock_file, lock_file_of_the_dead])
def test_a_job_whose_temporary_lock_file_is_removed_until_another_has_the_folder_is_refused(
    root: Path, new_lease: Callable[..., Lease], prepare: Callable[[Path], None]
) -> None:
    prepare(root)
    sleeper = Sleeper({1: lambda: put(root, ELSEWHERE), 3: lambda: put(root, ELSEWHERE, beat=2)})
    with pytest.raises(FolderInUse, match="node7"):
        new_lease(durable=Cleared(100), sleep=sleeper).take()
    assert (holder_of(root), names(root)) == (ELSEWHERE, ["writer.lock"])


@pytest.mark.parametrize("before", ["free", "of a dead process"])
def test_a_job_that_is_refused_at_the_last_moment_leaves_no_temporary_file(
    root: Path, new_lease: Callable[..., Lease], before: str
) -> None:
    root.mkdir()
    if before != "free":
        put(root, here(started=1))
    with pytest.raises(FolderInUse):
        new_lease(durable=Overtaken(), timeout_seconds=0).take()
    assert names(root) == ["writer.lock"]


@pytest.mark.parametrize("prepare", [no_lock_file, lock_file_of_the_dead])
def test_a_disk_that_fails_while_a_folder_is_taken_raises_its_error_and_leaves_no_temporary_file(
    root: Path, new_lease: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Path], None]
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    prepare(root)
    before = names(root)
    monkeypatch.setattr(Path, "hardlink_to", fail)
    disk = Durable()
    disk.replace = fail  # type: ignore[method-assign,assignment]  # the only operation that fails
    with pytest.raises(OSError, match="Input/output error"):
        new_lease(durable=disk).take()
    assert names(root) == before


@pytest.mark.parametrize("before", ["free", "of a dead process"])
def test_a_job_whose_request_was_carried_out_and_reported_as_refused_has_the_folder(
    root: Path, new_lease: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """A network file system repeats a request whose answer was lost, and reports what the second one met."""
    link, disk = Path.hardlink_to, Durable()
    replace = disk.replace

    def link_and_refuse(path: Path, target: Path) -> None:
        link(path, target)
        raise FileExistsError(errno.EEXIST, "File exists", str(path))

    def replace_and_refuse(src: Path, dst: Path) -> None:
        replace(src, dst)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(src))

    root.mkdir()
    if before != "free":
        put(root, here(started=1))
    monkeypatch.setattr(Path, "hardlink_to", link_and_refuse)
    disk.replace = replace_and_refuse  # type: ignore[method-assign]  # the only operation that is repeated
    lease = new_lease(durable=disk, sleep=never)
    lease.take()
    lease.check()
    assert names(root) == ["writer.lock"]


def pause(begun: threading.Event, hold: threading.Event) -> None:
    """Set `begun`, and return once `hold` is set."""
    begun.set()
    hold.wait(30)


def test_after_a_release_the_heartbeat_has_ended(root: Path, new_lease: Callable[..., Lease]) -> None:
    hold, in_a_beat = threading.Event(), threading.Event()
    clock = Looks(nothing, nothing, lambda: pause(in_a_beat, hold))
    lease = new_lease(now=clock, heartbeat_seconds=0.001)
    lease.take()
    thread = heartbeat(root)
    join, timeouts = thread.join, []

    def continue_and_join(timeout: float | None = None) -> None:
        timeouts.append(timeout)
        hold.set()
        join(30)

    thread.join = continue_and_join  # type: ignore[method-assign]  # the beat ends only when something waits for it
    assert in_a_beat.wait(30)
    lease.release()
    assert timeouts == [0.001]
    assert not thread.is_alive()
    assert names(root) == []


def test_a_release_does_not_wait_for_a_hanging_heartbeat_which_restores_no_lock_file(
    root: Path, new_lease: Callable[..., Lease]
) -> None:
    hold, in_a_beat = threading.Event(), threading.Event()
    clock = Looks(nothing, nothing, lambda: pause(in_a_beat, hold))
    lease = new_lease(now=clock, heartbeat_seconds=0.001)
    lease.take()
    thread = heartbeat(root)
    assert in_a_beat.wait(30)
    lease.release()
    assert thread.is_alive()
    put(root, ELSEWHERE)
    hold.set()
    thread.join(30)
    assert not thread.is_alive()
    assert (root / "writer.lock").read_bytes() == ELSEWHERE.to_bytes(1, 1_700_000_001)


def test_a_lock_file_that_this_user_may_not_write_is_replaced_if_the_folder_allows_it(
    root: Path, new_lease: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(root, here(pid=2**22 + 1))  # more than any process has
    real_open = Path.open

    def refuse(path: Path, mode: str = "r", *arguments: Any, **settings: Any) -> Any:
        if mode == "r+b" and path.name == "writer.lock" and holder_of(root).run_id == "theirs":  # type: ignore[union-attr]  # there is one
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real_open(path, mode, *arguments, **settings)

    monkeypatch.setattr(Path, "open", refuse)
    lease = new_lease(sleep=never)
    lease.take()
    lease.check()


def test_of_a_lock_file_that_another_program_filled_only_the_beginning_is_read(tmp_path: Path) -> None:
    (tmp_path / "writer.lock").write_bytes(bytes(range(256)) * 1024)
    found = LockFile(tmp_path / "writer.lock", Durable(), lambda: False).read()
    assert found == bytes(range(256)) * 256
