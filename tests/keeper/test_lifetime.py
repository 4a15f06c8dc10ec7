"""A keeper lives as long as a run may need it, and no longer: no kill of others ends it, and nothing of it is left."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace, TracebackType

import pytest

from tests.descriptors import opened
from tests.keepers import has_ended, keepers_in
from torchtitan_lite.errors import KeeperUnavailable
from torchtitan_lite.memory.keeper import process
from torchtitan_lite.memory.keeper.client import Keeper, socket_path

Image = tuple[int, int]
MIB = 1 << 20


class Child:
    """A process that runs `work` and says so, and then lives until it is killed or this object's context ends."""

    def __init__(self, work: Callable[[], object], *, with_own_session: bool = False) -> None:
        ours, its = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if with_own_session:
                    os.setsid()
                work()
                os.write(its, b"done")
                signal.pause()
            finally:
                os._exit(1)
        os.close(its)
        self.is_done = os.read(ours, 8) == b"done"
        os.close(ours)
        self._is_reaped = False

    def kill(self) -> None:
        """Kill it and wait for its end. Idempotent."""
        if not self._is_reaped:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._is_reaped = True

    def __enter__(self) -> Child:
        assert self.is_done, "the child failed: its traceback is above"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def pid_of(keeper: Keeper) -> int:
    described = keeper.describe()
    assert described is not None
    return described.pid


def wakeups(pid: int) -> list[str]:
    """Return how often the process has waited, and its processor time in clock ticks."""
    status = Path(f"/proc/{pid}/status").read_text()
    waited = [line for line in status.splitlines() if line.startswith("voluntary_ctxt_switches")]
    return waited + Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]


def stayed(pid: int) -> list[str]:
    """Return `wakeups` of the process before half a second in which it has nothing to do."""
    before = wakeups(pid)
    assert not has_ended(pid, 0.5)
    return before


def falls_asleep(pid: int) -> bool:
    """Return whether the process waits for something, now or soon; one that is woken without end never does."""
    stat = Path(f"/proc/{pid}/stat")
    return any(stat.read_text().rpartition(")")[2].split()[0] == "S" for _ in range(100_000))


def test_an_image_outlives_the_process_that_made_it_with_all_of_its_session(runtime: Path, tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, 600.0, runtime=runtime)

    def train() -> None:
        own = Keeper(tmp_path, 600.0, runtime=runtime)
        own.start()
        own.join("first")
        fds = os.memfd_create("arena"), os.memfd_create("mark")
        os.write(fds[0], b"state")
        own.keep("a", fds)

    with Child(train, with_own_session=True) as trainer:
        pid = pid_of(keeper)
        assert os.getsid(pid) not in (os.getsid(0), os.getsid(trainer.pid))
        assert os.getpgid(pid) not in (os.getpgrp(), os.getpgid(trainer.pid))
        os.killpg(trainer.pid, signal.SIGKILL)
    assert keeper.wait_until_unmapped(30.0, "second")
    (found,) = keeper.held("second")
    assert not found.is_mapped
    assert os.pread(found.arena_fd, 8, 0) == b"state"
    found.close()
    keeper.finish()


def test_it_has_nothing_of_the_process_that_started_it(runtime: Path, tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, 600.0, runtime=runtime)
    ours, its = os.pipe()
    one, other = socket.socketpair()
    with one, other:
        os.set_inheritable(its, True)
        one.set_inheritable(True)
        keeper.start()
        sockets = {os.readlink(f"/proc/self/fd/{each.fileno()}") for each in (one, other)}  # noqa: PTH115  # no path
    os.close(its)
    assert os.read(ours, 1) == b"", "the keeper has the pipe"
    os.close(ours)
    process = Path(f"/proc/{pid_of(keeper)}")
    targets = opened(int(process.name))
    own = [target for target in targets if not target.startswith(("socket:", "pipe:"))]
    assert sorted(own) == ["/dev/null"] * 3 + ["anon_inode:[eventpoll]", "anon_inode:inotify"]
    pipes = [target for target in targets if target.startswith("pipe:")]
    assert (len(pipes), len({*pipes})) == (2, 1), "both ends of one pipe of its own"
    assert not sockets & {*targets}
    assert (process / "cwd").readlink() == Path("/")
    assert (process / "comm").read_text() == "titan-keeper\n"
    assert os.getsid(int(process.name)) != os.getsid(0)
    keeper.finish()


def test_it_is_small_and_sleeps_while_a_run_lives(keeper: Keeper, image: Image) -> None:
    keeper.join("first")
    for number in range(256):
        keeper.keep(str(number), image)
    pid = pid_of(keeper)
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert int(status["VmRSS"].split()[0]) * 1024 <= 20 * MIB
    # It may still be closing the last connection, so the first of these times may have a wakeup.
    assert any(stayed(pid) == wakeups(pid) for _ in range(5))


def test_it_ends_after_its_time_to_live_without_a_process(runtime: Path, tmp_path: Path, image: Image) -> None:
    # The time of the last process that joined counts; a short one from the start on could be over before the join.
    before, keeper = Keeper(tmp_path, 600.0, runtime=runtime), Keeper(tmp_path, 0.1, runtime=runtime)
    before.start()
    before.join("first")
    keeper.join("first")
    keeper.keep("a", image)
    before.leave()
    pid = pid_of(keeper)
    assert not has_ended(pid, 0.3)
    keeper.leave()
    assert has_ended(pid)
    assert not socket_path(tmp_path, runtime).exists()


def test_a_process_that_comes_in_time_stops_the_clock(runtime: Path, tmp_path: Path, image: Image) -> None:
    keeper = Keeper(tmp_path, 600.0, runtime=runtime)

    def train() -> None:
        own = Keeper(tmp_path, 600.0, runtime=runtime)
        own.start()
        own.join("first")
        own.keep("a", image)

    with Child(train):
        described = keeper.describe()
        assert described is not None and described.seconds_left is None
    keeper.wait_until_unmapped(30.0, "")
    described = keeper.describe()
    assert described is not None and described.seconds_left is not None and 500 < described.seconds_left <= 600
    again = Keeper(tmp_path, 700.0, runtime=runtime)
    again.join("second")
    again.leave()
    described = again.describe()
    assert described is not None and described.seconds_left is not None and 600 < described.seconds_left <= 700
    keeper.finish()


@pytest.mark.parametrize("what", ["socket", "folder", "moved", "replaced"])
def test_it_ends_when_its_socket_is_no_longer_there(runtime: Path, tmp_path: Path, what: str) -> None:
    keeper = Keeper(tmp_path, 600.0, runtime=runtime)
    keeper.start()
    keeper.join("first")
    pid, path = pid_of(keeper), socket_path(tmp_path, runtime)
    match what:
        case "socket":
            path.unlink()
        case "folder":
            shutil.rmtree(path.parent)
        case "moved":
            path.parent.rename(runtime / "other")
        case "replaced":
            (runtime / "new").touch()
            (runtime / "new").rename(path)
    assert has_ended(pid)
    assert path.exists() == (what == "replaced"), "only its own socket is removed"


def test_another_file_next_to_its_socket_changes_nothing(keeper: Keeper, runtime: Path) -> None:
    pid = pid_of(keeper)
    for number in range(300):
        other = runtime / "torchtitan_lite" / str(number)
        other.touch()
        other.unlink()
    assert pid_of(keeper) == pid
    assert falls_asleep(pid), "it has read what its watch reported"


def test_signals_to_process_groups_do_not_end_it_and_sigterm_does_once_no_run_lives(keeper: Keeper) -> None:
    keeper.join("first")
    pid = pid_of(keeper)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        os.kill(pid, number)
    assert pid_of(keeper) == pid
    assert falls_asleep(pid), "it has read that there was a signal"
    keeper.leave()
    assert has_ended(pid)


def test_a_person_cannot_end_it_while_a_process_lives(keeper: Keeper) -> None:
    pid = pid_of(keeper)
    keeper.join("first")
    assert keeper.end() == (os.getpid(),)
    keeper.leave()
    with Child(lambda: None) as helper:
        keeper.join("first", also=[helper.pid])
        keeper.leave()
        assert keeper.end() == (helper.pid,), "what was registered with it still lives"
    assert keeper.end() == ()
    assert has_ended(pid)


def test_a_finished_run_leaves_nothing(keeper: Keeper, runtime: Path, image: Image) -> None:
    keeper.join("first")
    keeper.keep("a", image)
    pid = pid_of(keeper)
    keeper.finish()
    assert has_ended(pid)
    assert keeper.held() == []
    assert list((runtime / "torchtitan_lite").iterdir()) == []
    keeper.finish()


def test_a_finished_run_leaves_alone_what_another_start_uses(keeper: Keeper, runtime: Path, image: Image) -> None:
    other = Keeper(keeper.folder, 600.0, runtime=runtime)
    keeper.join("first")
    keeper.keep("a", image)
    other.join("second")
    other.keep("b", image)
    keeper.finish()
    (found,) = other.held()
    assert (found.name, found.is_mapped) == ("b", False)
    found.close()
    other.leave()


def test_a_killed_keeper_is_unavailable_and_another_one_takes_its_place(keeper: Keeper, image: Image) -> None:
    assert not keeper.has_ended(), "it has joined none"
    keeper.join("first")
    assert not keeper.has_ended()
    pid = pid_of(keeper)
    os.kill(pid, signal.SIGKILL)
    assert has_ended(pid)
    assert keeper.has_ended()
    with pytest.raises(KeeperUnavailable, match="no keeper is running"):
        keeper.keep("a", image)
    assert keeper.held() == []
    keeper.leave()
    keeper.start()
    assert pid_of(keeper) != pid
    keeper.join("first")
    keeper.keep("a", image)
    assert not keeper.has_ended()


def test_a_stopped_keeper_is_unavailable_and_continues_later(
    keeper: Keeper, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper.join("first")
    pid = pid_of(keeper)
    os.kill(pid, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("torchtitan_lite.memory.keeper.client.ANSWER_SECONDS", 0.05)
            for act in (keeper.held, keeper.finish, lambda: keeper.keep("a", image)):
                with pytest.raises(
                    KeeperUnavailable, match=rf"keeper \(process {pid}\) did not answer within 0\.05 s: "
                ):
                    act()
    finally:
        os.kill(pid, signal.SIGCONT)
    keeper.keep("b", image)
    (found,) = keeper.held()
    assert found.name == "b"
    found.close()


@pytest.mark.slow  # The keeper is stopped for longer than a start used to wait.
def test_a_keeper_that_answers_late_as_on_a_busy_machine_is_used(keeper: Keeper, image: Image) -> None:
    keeper.keep("a", image)
    pid = pid_of(keeper)
    os.kill(pid, signal.SIGSTOP)
    continues = threading.Timer(1.5, os.kill, (pid, signal.SIGCONT))
    continues.start()
    try:
        (found,) = keeper.held()
    finally:
        continues.join()
    assert found.name == "a"
    found.close()


@pytest.mark.parametrize("left", ["no queue", "no watch"])
def test_without_watches_it_looks_at_its_socket_now_and_then(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    keeper, path = Keeper(tmp_path, 600.0, runtime=runtime), socket_path(tmp_path, runtime)
    path.parent.mkdir(mode=0o700)
    # As on a system whose users have taken all watches.
    monkeypatch.setattr(process, "_LOOK_SECONDS", 0.05)
    library = SimpleNamespace(inotify_init1=lambda _: -1)
    if left == "no watch":
        library = SimpleNamespace(inotify_init1=lambda _: os.memfd_create("queue"), inotify_add_watch=lambda *_: -1)
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: library)
    if (child := os.fork()) == 0:
        try:
            process.main(str(path), 600.0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    keeper.join("first")
    pid = pid_of(keeper)
    assert not [name for name in opened(pid) if "queue" in name]
    stayed(pid)  # Else the end of the connection would wake it.
    path.unlink()
    assert has_ended(pid)


def test_processes_that_start_it_at_once_get_one_keeper(runtime: Path, tmp_path: Path) -> None:
    ready, go = os.pipe()

    def race() -> None:
        os.close(go)
        os.read(ready, 1)  # The end of the pipe is the same moment for all.
        Keeper(tmp_path, 600.0, runtime=runtime).start()

    children = []
    for _ in range(8):
        if (pid := os.fork()) == 0:
            try:
                race()
            except BaseException:
                os._exit(1)
            os._exit(0)
        children.append(pid)
    os.close(ready)
    os.close(go)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 8
    keeper = Keeper(tmp_path, 600.0, runtime=runtime)
    assert keepers_in(runtime) == [pid_of(keeper)]
    keeper.finish()


def test_a_forked_child_does_not_speak_for_its_parent(keeper: Keeper) -> None:
    keeper.join("first")

    def use() -> None:
        for act in (keeper.leave, keeper.finish, keeper.held, keeper.start):
            with pytest.raises(KeeperUnavailable, match="forked"):
                act()

    with Child(use):
        pass
    assert keeper.end() == (os.getpid(),)


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=pytest.mark.slow)])  # 100 starts take 10 s.
def test_no_process_is_left_after_many_starts(runtime: Path, tmp_path: Path, count: int) -> None:
    pids = []
    for number in range(count):
        keeper = Keeper(tmp_path, 600.0, runtime=runtime)
        keeper.start()
        keeper.join(str(number))
        pids.append(pid_of(keeper))
        keeper.finish()
    assert all(map(has_ended, pids))
    assert keepers_in(runtime) == []


def test_a_keeper_that_cannot_start_says_why(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    false = tmp_path / "python"
    false.write_text("#!/bin/sh\necho 'no such encoding' >&2\nexit 3\n")
    false.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(false))
    with pytest.raises(KeeperUnavailable, match="did not start: no such encoding"):
        Keeper(tmp_path, 600.0, runtime=runtime).start()


def may_make_pid_namespaces() -> bool:
    command = ["unshare", "--pid", "--fork", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


def test_it_ends_with_the_pid_namespace_it_was_started_in(runtime: Path, tmp_path: Path) -> None:
    if not may_make_pid_namespaces():
        pytest.skip("this user may not make a PID namespace")
    code = (
        "import sys; from pathlib import Path; from torchtitan_lite.memory.keeper.client import Keeper\n"
        "keeper = Keeper(Path(sys.argv[1]), 600.0, runtime=Path(sys.argv[2]))\n"
        "keeper.start(); keeper.join('first'); print('started', flush=True); sys.stdin.read()"
    )
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", code, str(tmp_path), str(runtime)]
    repository = Path(__file__).parents[2]
    keeper = Keeper(tmp_path, 600.0, runtime=runtime)
    with subprocess.Popen(command, stdin=-1, stdout=-1, cwd=repository) as container:
        assert container.stdin is not None and container.stdout is not None
        assert container.stdout.readline() == b"started\n"
        (pid,) = keepers_in(runtime)
        described = keeper.describe()
        assert described is not None and described.living != (), "seen from outside, too"
        container.communicate()
    assert has_ended(pid)
    assert keeper.held() == []
