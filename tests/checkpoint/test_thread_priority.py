"""No thread of a training process has a lower CPU priority in any of its work: it may hold the GIL.

The run has no right to raise a priority (CAP_SYS_NICE), as an ordinary user's has none: a thread that was lowered
would stay so.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.forked import run_code

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")

DEADLINE_SECONDS = 120.0

WITHOUT_THE_RIGHT = """
import ctypes, os, resource, threading
from contextlib import suppress
from pathlib import Path
from tests.checkpoint.small_run import SmallRun

libc, version_3, sys_nice = ctypes.CDLL(None), 0x20080522, 1 << 23
header, sets = (ctypes.c_uint32 * 2)(version_3, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
sets[:] = [each & ~sys_nice for each in sets[:3]] + sets[3:]
assert libc.capset(header, sets) == 0
resource.setrlimit(resource.RLIMIT_NICE, (0, 0))

def nice(thread=0):
    return os.getpriority(os.PRIO_PROCESS, thread)

before, modules, found = nice(), set(), set()
try:
    os.setpriority(os.PRIO_PROCESS, 0, before - 1)
except PermissionError:
    print("refused")

def look(frame, event, arg):
    modules.add(frame.f_globals.get("__name__"))
    found.add(nice(threading.get_native_id()))

threading.setprofile(look)  # Of the threads that start from now on, at every call and return.
for steps in (3, 6):
    with SmallRun(Path("run"), interval=1, keep_latest_k=2, async_mode="MODE", MEMORY).loaded() as run:
        while run.train_state.step < steps:
            run.step(last=run.train_state.step == 5)
            for thread in Path("/proc/self/task").iterdir():
                with suppress(ProcessLookupError):  # It ended after the folder was listed.
                    found.add(nice(int(thread.name)))
threading.setprofile(None)
print("saved in a thread:", "torchtitan_lite.checkpoint.saving.savers" in modules)
print("lowered:", found - {before})
"""


def test_no_thread_is_lowered_in_a_run_that_may_not_raise_it_again(
    tmp_path: Path, mode: str, memory_tier: Path
) -> None:
    log = tmp_path / "printed.log"
    memory = "" if mode == "disabled" else "memory_interval=1"
    script = WITHOUT_THE_RIGHT.replace("MODE", mode).replace("MEMORY", memory)
    code = run_code(script, log, dict(os.environ), tmp_path).wait(DEADLINE_SECONDS)
    assert (code, log.read_text()) == (0, f"refused\nsaved in a thread: {mode != 'disabled'}\nlowered: set()\n")
