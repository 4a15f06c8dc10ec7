"""Runs of a library that takes seconds to import: forked, rank by rank, from a server that has imported it.

    with served("trainer_run") as server:
        ended = server.run(log, ranks=2, folder="...", ...)

forks two processes that call `run` of `tests/integrations/trainer_run.py` with these options.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.jobs import free_port
from tests.titan_packages import with_project

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """What the processes of a run printed, and how they ended, by rank: an exit code, or the negated signal."""

    output: str
    codes: list[int]

    @property
    def losses(self) -> Counter[tuple[str, int, str]]:
        """The lines "RANK step N: loss X": as many of each as there were, since a step may have several batches."""
        found = re.findall(r"^(\d+) step (\d+): loss (\S+)$", self.output, re.MULTILINE)
        return Counter((rank, int(step), loss) for rank, step, loss in found)

    @property
    def first_step(self) -> int:
        return min(step for _, step, _ in self.losses)

    @property
    def end(self) -> list[Any]:
        """What each rank printed at its end."""
        return [json.loads(line) for line in re.findall(r"^ended (.+)$", self.output, re.MULTILINE)]


class Served:
    """The server of the module `name`."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.served", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
            text=True,
        )

    def run(self, log: Path, ranks: int = 1, **options: Any) -> Ended:
        """Run `ranks` processes with `options` and wait for them; they print into `log`."""
        return self.call("run", log, ranks, **options)

    def call(self, function: str, log: Path, ranks: int = 1, **options: Any) -> Ended:
        """As `run`, with another function of the module."""
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"function": function, "log": str(log), "ranks": ranks, "port": free_port(), "options": options}
        self._process.stdin.write(json.dumps(order, default=str) + "\n")
        self._process.stdin.flush()
        return Ended(codes=json.loads(self._process.stdout.readline()), output=log.read_text())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def continues(resumed: Ended, straight: Ended) -> bool:
    """Return whether `resumed` has the losses of `straight` from its first step on, and ended in the same state."""
    first = resumed.first_step
    rest = Counter({key: count for key, count in straight.losses.items() if key[1] >= first})
    return first > 1 and resumed.losses == rest and resumed.end == straight.end


@contextmanager
def served(name: str, environment: Mapping[str, str] | None = None) -> Iterator[Served]:
    """Serve the module `name`, by default in an environment with this project."""
    server = Served(name, environment or with_project())
    try:
        yield server
    finally:
        server.close()


def main() -> None:
    module = importlib.import_module(f"tests.integrations.{sys.argv[1]}")
    for line in sys.stdin:
        order = json.loads(line)
        ranks = range(order["ranks"])
        pids = [_fork(module, rank, order) for rank in ranks]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)


def _fork(module: Any, rank: int, order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if order["ranks"] > 1:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order["ranks"], "MASTER_PORT": order["port"]}
            os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
        function = getattr(module, order["function"])
        function(**order["options"])
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
