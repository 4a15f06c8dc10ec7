"""A copy of the repository in which pytest runs, in processes forked from one that has loaded torch.

The copy is the working directory, and first on the path and in PYTHONPATH, so that processes of a test run the same
code. All processes of a run end with it: the caller adopts and kills the remaining ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from mutation import tracing

PYTEST = ["-q", "--no-header", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"]
PYTEST += [
    "-W",
    "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
]  # hypothesis is imported before pytest
LOADED = (
    "numpy",
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard",
    "hypothesis.stateful",
    "xxhash",
)
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Run:
    """The result of a run of pytest."""

    started: str = ""
    """The test that started last."""
    failed: dict[str, str] = field(default_factory=dict)
    """Failed test, or file that could not be collected, to the error."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each test that passed."""
    setup: dict[str, float] = field(default_factory=dict)
    hung: bool = False
    ended: bool = False
    """Whether pytest ended by itself: otherwise its process died, or was ended after a failure or a hang."""


class Tree:
    """A copy of `repository`, for one run at a time."""

    def __init__(self, repository: Path) -> None:
        memory = Path("/dev/shm")
        self._folder = Path(tempfile.mkdtemp(prefix="mutation-", dir=memory if os.access(memory, os.W_OK) else None))
        self._scratch = Path(
            tempfile.mkdtemp(prefix="mutation-")
        )  # Tests write their files to the usual temporary folder.
        self.root = self._folder / "tree"
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=repository, capture_output=True, check=True).stdout.decode().split("\0")
        for name in filter(None, names):
            if (repository / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(repository / name, self.root / name)
        shutil.copy2(tracing.__file__, self.root / "sitecustomize.py")

    def close(self) -> None:
        """Remove the copy. Idempotent."""
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.rmtree(self._scratch, ignore_errors=True)

    @contextlib.contextmanager
    def changed(self, path: str, text: str) -> Iterator[None]:
        """Replace the file `path` of the copy by `text` in the block."""
        file = self.root / path
        # With the same size and the same second, Python would use the old bytecode.
        cached = file.parent / "__pycache__"
        kept = file.read_bytes()
        try:
            file.write_text(text, encoding="utf-8")
            for name in cached.glob(f"{file.stem}.*"):
                name.unlink()
            yield
        finally:
            file.write_bytes(kept)

    def run(
        self,
        arguments: list[str],
        plugins: list[Any],
        limit: Callable[[str], float],
        *,
        first_failure: bool = True,
        trace: Path | None = None,
    ) -> Run:
        """Run pytest with `arguments`. A test that takes longer than its `limit` counts as a hang and ends the run.

        The limit is in CPU seconds; ten times as many wall-clock seconds are a hang, too.
        """
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        ours, theirs = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(ours)
                self._enter(trace)
                code = pytest.main([*PYTEST, f"--basetemp={self._scratch}/t", *arguments], [_Reports(theirs), *plugins])
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(theirs)
        try:
            with os.fdopen(ours, "rb", buffering=0) as pipe:
                return _watch(pid, pipe.fileno(), limit, first_failure)
        finally:
            _end_all()
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch.mkdir()

    def output(self) -> str:
        """Return the output of the last run."""
        return (self._folder / "output").read_text(encoding="utf-8", errors="replace")

    def _enter(self, trace: Path | None) -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)  # Background jobs of a shell and nohup ignore them.
        os.chdir(self.root)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for target, file, flags in ((0, os.devnull, os.O_RDONLY), (1, "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
            os.dup2(os.open(self._folder / file, flags, 0o600), target)
        os.dup2(1, 2)
        # With CI set, the profile of the tests always draws the same examples (tests/conftest.py).
        variables = {"PYTHONPATH": self.root, "PYTHONDONTWRITEBYTECODE": 1, "TMPDIR": self._scratch, "CI": 1}
        os.environ.update({name: str(value) for name, value in variables.items()}, OMP_NUM_THREADS="1")
        tempfile.tempdir = None
        sys.dont_write_bytecode = True
        sys.path[:] = [str(self.root), *(path for path in sys.path if Path(path) != Path(__file__).parents[1])]
        sys.modules["__main__"] = types.ModuleType("__main__")  # Otherwise spawned processes would import this script.
        if trace is not None:
            os.environ[tracing.VARIABLE] = str(trace)
            tracing.start(str(trace))


class _Reports:
    """A plugin that writes each event of pytest to a pipe, as a JSON array on a line."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def pytest_collection(self) -> None:
        # After conftest.py has loaded its profile, before a test module uses it. Without shrinking, which takes long
        # and only helps a reader.
        settings.register_profile(
            "mutants", settings(), phases=(Phase.explicit, Phase.generate), derandomize=True, database=None
        )
        settings.load_profile("mutants")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._send("failed", report.nodeid, report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._send("started", nodeid, "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._send("failed", report.nodeid, report.longreprtext)
        elif report.skipped:
            self._send("skipped", report.nodeid, "")
        else:
            self._send(report.when or "", report.nodeid, report.duration)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._send("ended", "", "")

    def _send(self, kind: str, nodeid: str, value: Any) -> None:
        line = json.dumps([os.getpid(), kind, nodeid, value[-3000:] if isinstance(value, str) else value])
        os.write(self._pipe, line.encode() + b"\n")


def _watch(pid: int, pipe: int, limit: Callable[[str], float], first_failure: bool) -> Run:
    """Collect the events of process `pid` until it ends, hangs or, with `first_failure`, fails. Return the result."""
    run, rest = Run(), b""
    begun, worked, allowed = time.monotonic(), 0.0, limit("")
    while not (run.ended or (run.failed and first_failure)):
        if not select.select([pipe], [], [], 0.5)[0]:
            run.hung = _worked(pid) - worked > allowed or time.monotonic() - begun > 10 * allowed
            if run.hung:
                return run
            continue
        data = os.read(pipe, 1 << 16)
        if not data:
            return run
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            sender, kind, nodeid, value = json.loads(line)
            if sender != pid:
                continue  # A process that a test forked has returned into pytest.
            if kind == "started":
                run.started, begun, worked, allowed = nodeid, time.monotonic(), _worked(pid), limit(nodeid)
            elif kind == "failed":
                run.failed.setdefault(nodeid, value)
            elif kind == "setup":
                run.setup[nodeid] = value
            elif kind == "call":
                run.seconds[nodeid] = value
            elif kind == "ended":
                run.ended = True
    return run


def _worked(pid: int) -> float:
    """Return the CPU seconds of the process `pid`."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _end_all() -> None:
    """Kill all descendants of this process."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()]
