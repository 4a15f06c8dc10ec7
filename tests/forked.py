"""Processes that start at once: forked from a server that has loaded torch and the trainer.

An import of torch takes seconds, and most tests that need a process need torch in it. The first test that needs a
process starts the server. It lives as long as the test run and runs nothing itself, so it has no threads that a fork
could lose. A forked process has default signal handlers, its own exit code, and the command line of the server.
"""

from __future__ import annotations

import atexit
import importlib.util
import multiprocessing
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

REPO = Path(__file__).resolve().parents[1]
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
FORKED_RANKS = {"PET_RUN_PATH": "1", "PET_START_METHOD": "fork"}
"""Variables of torchrun: it forks its ranks, which run the script with what it has loaded itself."""


def server() -> ForkServerContext:
    """Return the multiprocessing context whose processes are forked from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.loaded"])
    return context


class Forked:
    """A forked process, with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, target: Callable[..., Any], *arguments: Any) -> None:
        self._process: BaseProcess = server().Process(target=target, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()


def join_group(rank: int, world_size: int, rendezvous: Path) -> None:
    """Open the default process group: `world_size` ranks that meet at the file `rendezvous`, which must be new."""
    import torch.distributed as dist

    method = f"file://{rendezvous}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)


class Place(Protocol):
    """Where a process runs, other than the server, which can pickle it."""

    def enter(self) -> None:
        """Bring this process there."""


def run_script(
    script: Path,
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    folder: Path = REPO,
    place: Place | None = None,
) -> Forked:
    """Start `script` like `python script arguments`; append its output to `log`.

    If it is torchrun or becomes it, `FORKED_RANKS` in `environment` makes it fork its ranks.
    """
    return Forked(_run_script, str(script), list(arguments), str(log), dict(environment), str(folder), place)


def run_module(
    name: str,
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    folder: Path = REPO,
    place: Place | None = None,
) -> Forked:
    """Start module `name` like `python -m name arguments`; otherwise as `run_script`."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, name
    return run_script(Path(spec.origin), arguments, log, environment, folder, place)


def code_is_killed(code: str, folder: Path) -> None:
    """Run `code` in `folder`, as `run_code` does, and fail unless it ends by SIGKILL."""
    log = folder / "log"
    log.touch()
    process = run_code(code, log, dict(os.environ), folder)
    assert process.wait(60) == -signal.SIGKILL, log.read_text()


def run_code(code: str, log: Path, environment: Mapping[str, str], folder: Path = REPO) -> Forked:
    """Start `code` like `python -c code`."""
    return Forked(_run_code, code, str(log), dict(environment), str(folder))


def _run_script(
    script: str, arguments: list[str], log: str, environment: dict[str, str], folder: str, place: Place | None
) -> None:
    with _As(log, environment, folder, place):
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")


def _run_code(code: str, log: str, environment: dict[str, str], folder: str) -> None:
    with _As(log, environment, folder):
        sys.argv = ["-c"]
        sys.path.insert(0, "")
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


class _As:
    """Make the process look like a new interpreter: output, environment, folder; exit handlers run at the end."""

    def __init__(self, log: str, environment: dict[str, str], folder: str, place: Place | None = None) -> None:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ.clear()
        os.environ.update(environment)
        if place is not None:
            place.enter()
        os.chdir(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if environment.items() >= FORKED_RANKS.items():
            self._agent = os.getpid()
            multiprocessing.util.register_after_fork(self, _As._become_rank)

    def __enter__(self) -> None:
        import torch

        torch.set_num_threads(1)
        # As a new interpreter warns: replaces the filter of `tests.loaded` by Python's default.
        warnings.filters.remove(("error", None, Warning, None, 0))  # type: ignore[attr-defined]  # typed as a sequence
        warnings.simplefilter("default", append=True)

    def __exit__(self, *error: object) -> None:
        atexit._run_exitfuncs()

    def _become_rank(self) -> None:
        """Make a rank that torchrun has just forked look like a new interpreter, too."""
        if os.getppid() != self._agent:
            return
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        multiprocessing.util.Finalize(None, atexit._run_exitfuncs, exitpriority=0)
