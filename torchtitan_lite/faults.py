"""Faults on request, at named points.

With no spec installed a point costs one look at a variable and changes nothing. With a spec, each pass of a point is
compared with the faults in it; a fault that fits happens there and nowhere else: the process is killed or stopped, the
system refuses, a write is short. What follows is what would follow on a failing machine, because only the code that
handles real failures handles these. Each process counts its own passes, over all its threads. The set of points is
closed; `POINTS` describes each.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import logger

__all__ = ["install", "point"]  # What a loop of your own calls; the rest may move.

POINTS: Mapping[str, str] = MappingProxyType(
    {
        "save": "a save begins; every rank",
        "preflight": "before a save, the free room is about to be checked; coordinator",
        "plan": "a rank is about to plan what it writes",
        "stage": "a rank is about to copy its state for an asynchronous save",
        "image": "a rank is about to copy its state into memory only (`memory_interval`)",
        "digest": "a copy in memory is about to be digested; writer process, or trainer",
        "mark": "a copy in memory, digested, is about to become a valid image; every rank",
        "open": "a rank's file is about to be created",
        "write": "a part of a rank's file, in one request, is about to be written",
        "fsync": "a rank's file is about to be synced",
        "metadata": "DCP's `.metadata` is about to be written; coordinator",
        "manifest": "the manifest is about to be written; coordinator",
        "seal": "the complete staging folder is about to be synced; coordinator",
        "upload": "a file of a checkpoint is about to be uploaded; uploader",
        "commit": "right before the rename that is the commit; coordinator",
        "committed": "right after that rename, before the folder is synced; coordinator",
        "hugging_face": "right before the rename that puts the last save in Hugging Face's format in place",
        "purge": "a checkpoint that is no longer kept is about to be removed; coordinator",
        "quarantine": "a damaged checkpoint is about to be renamed; coordinator",
        "recover": "leftovers of a crash are about to be looked for; coordinator",
        "roll_back": "a run that diverged is about to put on record that it rolls back; coordinator",
        "load": "a checkpoint was chosen and is about to be loaded; every rank",
        "rolled_back": "what such a run rolls back to is loaded, and that is about to be put on record; every rank",
        "listing": "the manifest of a step in the folder is about to be read; coordinator",
        "read": "a part of a checkpoint's file, in one request, is about to be read",
        "lease": "the lease of the folder is about to be taken or checked; coordinator",
        "heartbeat": "a heartbeat of the lease is about to be written; coordinator",
        "step": "a step of training is over, before the checkpoint manager's `save`; every rank",
        "exit": "the run is over and closed, before the ranks part; every rank",
    }
)
"""Every point, and when it is passed."""

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "kill": "SIGKILL to the process itself",
        "stop": "SIGSTOP to the process itself, until it gets a SIGCONT",
        "slow": "the thread waits `seconds`",
        "lock": "the thread waits in C for a lock that it has, and holds the GIL: no Python of the process runs again",
        "short": "half of the request is written, and the write returns that",
        "tear": "half of the request is written, and writing the rest fails with EIO",
    }
)
"""Every kind of fault but the errors of the system, which have their own names."""

CONDITIONS: Mapping[str, str] = MappingProxyType(
    {
        "rank": "on this rank only",
        "step": "at this step only",
        "process": "in this process only: trainer, writer or uploader",
        "path": "only where the path, or its end, matches this glob",
        "after": "not at the first N passes that match",
        "times": "at N passes, or always; 1 if not given",
        "seconds": "how long slow waits; 1 if not given",
    }
)
"""What restricts a fault to some passes of its point."""

_FORM = "KIND@POINT:rank=1,step=10"


@dataclass
class Fault:
    """One fault of the spec, and how many passes of its point matched."""

    spec: str
    kind: str
    point: str
    rank: float | None = None
    step: float | None = None
    process: str | None = None
    path: str | None = None
    after: float = 0
    times: float = 1
    seconds: float = 1.0
    _passes: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def fires(self, step: int | None, path: Path | None) -> bool:
        """Return whether the fault happens at this pass of its point; count the pass if it matches. Any thread."""
        if self.step not in (None, step) or (self.path and not (path and PurePath(path).match(self.path))):
            return False
        with self._lock:
            self._passes += 1
            return self.after < self._passes <= self.after + self.times


_active: tuple[Fault, ...] = ()
_spec = ""
_step: int | None = None
_torn = threading.local()
"""Its `rest` is that of a torn write, path and bytes: the next write of that many to the same file fails."""


def install(spec: str, *, rank: int, process: str = "trainer") -> None:
    """Install the faults of `spec` in this process, instead of those installed before; an empty spec ends all faults.

    Raises `ConfigError` for a wrong spec, also for parts that are for other ranks or processes.
    """
    global _active, _step, _spec
    faults = parse_faults(spec)
    _spec = spec
    _step = None
    _torn.rest = None
    _active = tuple(fault for fault in faults if fault.rank in (None, rank) and fault.process in (None, process))
    for fault in _active:
        logger.warning("TORCHTITAN_LITE_FAULT installs a fault in the %s of rank %d: %s", process, rank, fault.spec)


def installed() -> str:
    """Return the spec that was installed last, for a child process to install."""
    return _spec


def set_step(step: int | None) -> None:
    """Set the step that is being saved or loaded: the step of every point that does not give one. Any thread."""
    global _step
    _step = step


def point(name: str, *, step: int | None = None, path: Path | None = None) -> None:
    """Pass the point `name`; a fault of the spec happens here. Any thread.

    Raises the OSError of the fault.
    """
    if _active:
        for fault in _firing(name, step, path):
            _carry_out(fault, path)


def limit(name: str, num_bytes: int, *, path: Path | None = None) -> int:
    """Pass the point `name` before a write of `num_bytes`; return how many of them to write. Any thread.

    Fewer than `num_bytes` stand for a short write: the caller writes these, then continues with the rest and passes the
    point again. Raises as `point` does.
    """
    if not _active:
        return num_bytes
    _fail_the_rest_of_a_torn_write(num_bytes, path)
    allowed = num_bytes
    for fault in _firing(name, None, path):
        if fault.kind in ("short", "tear"):
            allowed = (num_bytes + 1) // 2
            _log(fault, path)
        if fault.kind == "tear":
            _torn.rest = path, num_bytes - allowed
        _carry_out(fault, path)
    return allowed


def parse_faults(spec: str) -> list[Fault]:
    """Return the faults in `spec`: none, one, or several with semicolons between them. Raise `ConfigError`."""
    return [_fault(part.strip()) for part in spec.split(";") if part.strip()]


def _firing(name: str, step: int | None, path: Path | None) -> list[Fault]:
    assert name in POINTS, f"there is no point {name!r}"
    here = _step if step is None else step
    return [fault for fault in _active if fault.point == name and fault.fires(here, path)]


def _carry_out(fault: Fault, path: Path | None) -> None:
    if fault.kind in ("short", "tear"):
        return
    _log(fault, path)
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "slow":
        time.sleep(fault.seconds)
    elif fault.kind == "lock":
        _lock_for_good()
    else:
        raise _os_error(getattr(errno, fault.kind), path)


def _lock_for_good() -> None:
    mutex = ctypes.create_string_buffer(256)  # A mutex of zeros is an unlocked one.
    library = ctypes.PyDLL(None)  # Its calls keep the GIL.
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


def _log(fault: Fault, path: Path | None) -> None:
    logger.warning("The fault of TORCHTITAN_LITE_FAULT happens here: %s%s", fault.spec, f" ({path})" if path else "")


def _fail_the_rest_of_a_torn_write(num_bytes: int, path: Path | None) -> None:
    rest, _torn.rest = getattr(_torn, "rest", None), None
    if rest == (path, num_bytes):
        raise _os_error(errno.EIO, path)


def _os_error(code: int, path: Path | None) -> OSError:
    return OSError(code, os.strerror(code)) if path is None else OSError(code, os.strerror(code), str(path))


def _fault(part: str) -> Fault:
    head, _, conditions = part.partition(":")
    kind, at, point = (piece.strip() for piece in head.partition("@"))
    if not at:
        raise _wrong_spec(part, f"expected {_FORM}, found {head!r}")
    if kind not in KINDS and not (kind.startswith("E") and isinstance(getattr(errno, kind, None), int)):
        raise _wrong_spec(part, f"expected a kind of fault, found {kind!r}")
    if point not in POINTS:
        raise _wrong_spec(part, f"expected a point, found {point!r}")
    if kind in ("tear", "short") and point != "write":
        raise _wrong_spec(part, f"{kind} is for writes: expected {kind}@write, found @{point}")
    values: dict[str, Any] = {}
    for condition in filter(None, (piece.strip() for piece in conditions.split(","))):
        name, equals, text = (piece.strip() for piece in condition.partition("="))
        if not equals or name not in CONDITIONS or name in values:
            raise _wrong_spec(part, f"expected each condition once, with its value, as in step=10, found {condition!r}")
        pattern, expected = _VALUES[name]
        if not re.fullmatch(pattern, text):
            raise _wrong_spec(part, f"{name}: expected {expected}, found {text!r}")
        values[name] = text if name in ("process", "path") else float(text.replace("always", "inf"))
    if "seconds" in values and kind != "slow":
        raise _wrong_spec(part, f"expected seconds with slow only, found it with {kind}")
    return Fault(part, kind, point, **values)


_NUMBER = ("[0-9]+", "a number from 0")
_VALUES: Mapping[str, tuple[str, str]] = {
    "rank": _NUMBER,
    "step": _NUMBER,
    "process": ("trainer|writer|uploader", "trainer or writer or uploader"),
    "path": (".+", "a glob, such as *.distcp"),
    "after": _NUMBER,
    "times": ("0*[1-9][0-9]*|always", "a number from 1, or always"),
    "seconds": (r"([0-9]+\.?[0-9]*|\.[0-9]+)(e-?[0-9]+)?", "a number of seconds"),
}
"""The pattern of each condition's value, and what it is."""


def _wrong_spec(part: str, finding: str) -> ConfigError:
    return ConfigError(
        f"TORCHTITAN_LITE_FAULT: {part!r}: {finding}. Write {_FORM}. "
        f"Kinds: {', '.join(KINDS)} or the name of an error of the system, such as ENOSPC. "
        f"Points: {', '.join(POINTS)}. Conditions: {', '.join(CONDITIONS)}."
    )
