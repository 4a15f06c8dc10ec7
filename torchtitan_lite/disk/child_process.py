"""A process of this package that works for a trainer and dies with it.

It needs neither torch nor the user's main module, so it starts in moments. It ignores the signals that a scheduler
sends to process groups, because the trainer decides when to end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

IGNORED_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
"""What a scheduler or a launcher sends to process groups, besides the signals that the trainer itself handles."""


def numbers_of(signals: Sequence[str]) -> list[int]:
    """Return the numbers of `signals` and of those that are always ignored, as far as this system has them."""
    names = {*IGNORED_SIGNALS, *signals}
    return sorted(int(signal.Signals[name]) for name in names if name in signal.Signals.__members__)


def start(module: str, call: str, descriptors: Sequence[int], ignored: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a process that evaluates `call`, of a function in `module`, and has `descriptors`; do not wait for it.

    Main thread only: the process dies with the thread that started it.
    """
    # The process inherits this mask, so no signal can end it before it has set its own actions.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)
    try:
        # Not `multiprocessing`, which imports the user's main module and needs a `__main__` guard.
        name = call.partition("(")[0]
        code = f"import sys; sys.path[:] = {_search_path()}; from {module} import {name}; {call}"
        return subprocess.Popen([sys.executable, "-c", code], pass_fds=descriptors)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin(trainer_pid: int, ignored: Sequence[int]) -> None:
    """Do what such a process does first: ignore signals, and die with the trainer."""
    for number in ignored:
        # Ignored before they are unblocked, or one that is pending would end the process here.
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    # Looked at after `prctl`: a trainer that died before that call sends no signal.
    if os.getppid() != trainer_pid:
        os._exit(0)


def _search_path() -> list[str]:
    """Return the module search path of the process: the standard library, this package, then the paths of the trainer.

    `-c` and `-m` would put the working directory first, and a file in it with the name of a standard module would end
    the process. `-P` prevents that only from Python 3.11 on.
    """
    library = Path(os.__file__).parent
    zipped = library.parent / f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    standard = [path for path in sys.path if Path(path) in (zipped, library, library / "lib-dynload")]
    # The trainer may have found the package through sys.path, which a new interpreter does not share.
    root = str(Path(__file__).resolve().parents[2])
    return list(dict.fromkeys([*standard, root, *(path for path in sys.path if Path(path).is_absolute())]))
