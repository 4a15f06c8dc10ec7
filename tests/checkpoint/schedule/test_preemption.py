"""What a signal does: to the flag, to the process, at the deadline. Each test has a process: signals are global."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from torchtitan_lite.checkpoint.schedule.preemption import PreemptionWatch
from torchtitan_lite.errors import ConfigError

ROOT = Path(__file__).parents[3]
DEADLINE_SECONDS = 60

PRELUDE = """
import logging, os, signal, sys, threading
from torchtitan_lite.checkpoint.schedule.preemption import PreemptionWatch
from torchtitan_lite.log import logger

noted = threading.Event()

class Note(logging.Handler):
    def emit(self, record):
        noted.set()

logger.setLevel(logging.INFO)
logger.addHandler(Note())

def send(number):
    os.kill(os.getpid(), number)

def watch(*names, grace_seconds=60):
    watch = PreemptionWatch(names, grace_seconds)
    watch.start()
    return watch
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PRELUDE + script]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_SECONDS, stdin=subprocess.DEVNULL
    )


def output(script: str) -> list[str]:
    """Return what the script printed; it must exit with 0."""
    process = run(script)
    assert (process.returncode, process.stderr) == (0, "")
    return process.stdout.split()


def test_a_signal_is_remembered_and_ends_nothing() -> None:
    script = """
w = watch("SIGTERM", "SIGUSR1")
print(w.received)
send(signal.SIGUSR1)
assert noted.wait(30)
print(w.received == signal.SIGUSR1)
w.close()
"""
    assert output(script) == ["0", "True"]


def test_a_watch_that_could_not_start_its_thread_leaves_nothing_behind() -> None:
    script = """
from tests.no_threads import no_threads
before = signal.getsignal(signal.SIGTERM)
with no_threads():
    try:
        watch("SIGTERM")
    except OSError as error:
        print(error.errno)
print(signal.getsignal(signal.SIGTERM) == before)
w = watch("SIGTERM")
send(signal.SIGTERM)
assert noted.wait(30)
print(w.received == signal.SIGTERM)
w.close()
"""
    assert output(script) == ["11", "True", "True"]


def test_a_signal_is_heard_in_a_process_with_more_than_1024_files_open() -> None:
    script = """
import resource
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(2000, limit), limit))
many = [os.dup(0) for _ in range(1100)]
w = watch("SIGTERM")
send(signal.SIGTERM)
print(noted.wait(30), w.received == signal.SIGTERM)
w.close()
"""
    assert output(script) == ["True", "True"]


def test_a_forked_child_hears_signals_in_a_watch_of_its_own() -> None:
    script = """
import warnings
warnings.simplefilter("ignore")  # Later versions of Python warn of any fork with threads.
w = watch("SIGTERM")
if (child := os.fork()) == 0:
    own = watch("SIGTERM")
    send(signal.SIGTERM)
    heard = noted.wait(10)
    os._exit(0 if heard and own.received == signal.SIGTERM else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), w.received)
w.close()
"""
    assert output(script) == ["0", "0"]


def test_a_second_signal_changes_nothing() -> None:
    script = """
w = watch("SIGTERM", "SIGUSR1")
send(signal.SIGUSR1)
assert noted.wait(30)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
    send(number)
w.close()
print(w.received == signal.SIGUSR1)
"""
    assert output(script) == ["True"]


BLOCKED = {
    "in a lock": "lock = threading.Lock(); lock.acquire(); ready(); lock.acquire()",
    "in a read": "reading, writing = os.pipe(); ready(); os.read(reading, 1)",
}


@pytest.mark.parametrize("blocked", BLOCKED.values(), ids=BLOCKED)
def test_a_second_ctrl_c_ends_a_process_that_is_blocked(blocked: str) -> None:
    script = f"""
def interrupt():
    send(signal.SIGINT)
    assert noted.wait(30)
    send(signal.SIGINT)

def ready():
    threading.Thread(target=interrupt, daemon=True).start()

w = watch("SIGINT")
{blocked}
"""
    assert run(script).returncode == -signal.SIGINT


@pytest.mark.parametrize("blocked", BLOCKED.values(), ids=BLOCKED)
def test_a_signal_is_noticed_while_the_process_is_blocked_and_the_grace_period_ends_it(blocked: str) -> None:
    script = f"""
def ready():
    send(signal.SIGTERM)

w = watch("SIGTERM", grace_seconds=0.1)
logger.addHandler(logging.StreamHandler())
{blocked}
"""
    process = run(script)
    assert process.returncode == 1
    assert "Received SIGTERM: all ranks save and leave after this step" in process.stderr
    assert "--checkpoint.preemption_grace_seconds" in process.stderr


def test_closing_ends_the_grace_period() -> None:
    script = """
w = watch("SIGTERM", grace_seconds=1)
send(signal.SIGTERM)
assert noted.wait(30)
w.close()
print(threading.active_count())
"""
    assert output(script) == ["1"]


def test_the_seconds_left_count_from_the_first_signal_and_are_infinite_before() -> None:
    script = """
w = watch("SIGTERM", grace_seconds=60)
print(w.seconds_left())
send(signal.SIGTERM)
assert noted.wait(30)
first = w.seconds_left()
send(signal.SIGTERM)
print(0 < first <= 60, w.seconds_left() <= first)
w.close()
print(w.seconds_left())
"""
    assert output(script) == ["inf", "True", "True", "inf"]


def test_once_the_ranks_agreed_to_leave_a_late_signal_changes_nothing() -> None:
    script = """
w = watch("SIGTERM", "SIGINT")
send(signal.SIGTERM)
assert noted.wait(30)
w.leave()
w.close()
send(signal.SIGTERM)
send(signal.SIGINT)
print("alive")
"""
    assert output(script) == ["alive"]


def test_after_closing_without_leaving_a_signal_gets_its_previous_handler() -> None:
    script = """
def mine(number, frame):
    print("mine")
signal.signal(signal.SIGUSR1, mine)
w = watch("SIGUSR1", "SIGTERM")
w.close()
send(signal.SIGUSR1)
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.set_wakeup_fd(-1))
"""
    assert output(script) == ["mine", "True", "-1"]


def test_a_handler_that_is_put_back_after_the_last_watch_does_what_the_one_before_did() -> None:
    """As by a library that restores at the end of its run what it found at the beginning."""
    script = """
signal.signal(signal.SIGUSR1, lambda number, frame: print("previous", flush=True))
signal.signal(signal.SIGUSR2, lambda number, frame: print("not ignored", flush=True))
first, leaving, last = watch("SIGUSR1"), watch("SIGUSR2"), watch("SIGTERM")
ours = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)}
leaving.leave()
for each in (first, leaving, last):
    each.close()
for again in range(2):
    for number, handler in ours.items():
        signal.signal(number, handler)
    send(signal.SIGUSR1)
    send(signal.SIGUSR2)
    watch("SIGUSR1").close()
send(signal.SIGTERM)
"""
    process = run(script)
    assert (process.returncode, process.stdout.split()) == (-signal.SIGTERM, ["previous", "previous"])


def test_a_signal_that_is_not_watched_is_left_alone() -> None:
    script = """
w = watch("SIGUSR1")
signal.signal(signal.SIGUSR2, lambda number, frame: print("other"))
send(signal.SIGUSR2)
print(w.received)
w.close()
"""
    assert output(script) == ["other", "0"]


def test_it_may_be_started_and_closed_again() -> None:
    script = """
w = watch("SIGTERM")
w.start()
w.close()
w.close()
w.start()
send(signal.SIGTERM)
assert noted.wait(30)
print(w.received == signal.SIGTERM)
w.close()
"""
    assert output(script) == ["True"]


def test_without_signals_there_is_no_watch() -> None:
    before = signal.getsignal(signal.SIGTERM)
    watch = PreemptionWatch((), 60)
    watch.start()
    assert signal.getsignal(signal.SIGTERM) == before
    assert all(thread.name != "preemption" for thread in threading.enumerate())
    watch.close()


def test_outside_the_main_thread_there_is_a_warning_and_no_watch(caplog: pytest.LogCaptureFixture) -> None:
    watch = PreemptionWatch(("SIGTERM",), 60)
    thread = threading.Thread(target=watch.start)
    thread.start()
    thread.join()
    assert "only be handled in the main thread" in caplog.text
    watch.close()


def test_a_signal_that_this_system_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="'SIGNIX' is not a signal that can be caught"):
        PreemptionWatch(("SIGNIX",), 60)


def test_two_watches_both_receive_a_signal_and_the_last_one_restores_the_handler() -> None:
    script = """
def mine(number, frame):
    print("mine")
signal.signal(signal.SIGUSR1, mine)
for first in (0, 1):
    two = [watch("SIGUSR1"), watch("SIGUSR1", "SIGTERM")]
    noted.clear()
    send(signal.SIGUSR1)
    assert noted.wait(30)
    two.pop(first).close()
    other = two[0]
    print([other.received == signal.SIGUSR1])
    other.close()
    send(signal.SIGUSR1)
    print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.set_wakeup_fd(-1))
"""
    assert output(script) == ["[True]", "mine", "True", "-1"] * 2


def test_a_watch_still_receives_signals_after_another_one_was_closed() -> None:
    script = """
first, second = watch("SIGUSR1", "SIGTERM"), watch("SIGUSR1")
first.close()
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
send(signal.SIGUSR1)
assert noted.wait(30)
second.close()
print(first.received, second.received == signal.SIGUSR1)
"""
    assert output(script) == ["True", "0", "True"]


def test_a_handler_installed_in_between_stays() -> None:
    script = """
w = watch("SIGUSR1")
signal.signal(signal.SIGUSR1, lambda number, frame: print("theirs"))
send(signal.SIGUSR1)
assert noted.wait(30)
w.close()
send(signal.SIGUSR1)
print(w.received == signal.SIGUSR1)
"""
    assert output(script) == ["theirs", "theirs", "True"]


def test_other_wakeup_descriptors_receive_their_signals_and_the_watch_its_own() -> None:
    script = """
import socket
ours, theirs = socket.socketpair()
theirs.setblocking(False)
signal.signal(signal.SIGUSR2, lambda number, frame: None)
signal.set_wakeup_fd(theirs.fileno())
w = watch("SIGUSR1")
send(signal.SIGUSR2)
print(list(ours.recv(8)) == [signal.SIGUSR2])
signal.set_wakeup_fd(theirs.fileno())
send(signal.SIGUSR1)
assert noted.wait(30)
print(list(ours.recv(8)) == [signal.SIGUSR1])
w.close()
print(signal.set_wakeup_fd(-1) == theirs.fileno())
"""
    assert output(script) == ["True", "True", "True"]


def test_ctrl_c_that_is_not_watched_is_handled_by_python_each_time() -> None:
    script = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # The parent of the tests may ignore it.

def interrupt():
    try:
        send(signal.SIGINT)
        threading.Event().wait(30)
    except KeyboardInterrupt:
        print("interrupted")

w = watch("SIGTERM")
interrupt()
send(signal.SIGTERM)
assert noted.wait(30)  # Signals are handled in order, so the first one has been handled.
interrupt()
w.close()
"""
    assert output(script) == ["interrupted"] * 2


IN_A_SESSION = """
w = watch("SIGTERM", "SIGINT", grace_seconds=1)
try:
    send(signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    print("interrupted", w.received)

noted.clear()
send(signal.SIGTERM)
assert noted.wait(30)
print(w.received == signal.SIGTERM)
w.close()
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_ctrl_c_is_an_interrupt_of_the_cell_in_a_notebook() -> None:
    """Else the kernel would end after the grace period, with all that is in it."""
    assert output("sys.ps1 = 'In : '" + IN_A_SESSION) == ["interrupted", "0", "True", "True"]


def test_ctrl_c_is_an_interrupt_at_pythons_own_prompt() -> None:
    """The interpreter leaves `sys.ps1` unset while `python -i` runs its script."""
    command = [sys.executable, "-i", "-c", PRELUDE + IN_A_SESSION]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_SECONDS, stdin=subprocess.DEVNULL
    )
    assert ended.stdout.split() == ["interrupted", "0", "True", "True"]
