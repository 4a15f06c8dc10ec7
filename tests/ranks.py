"""Tests that need ranks: functions that two processes, or four, run together.

The processes are one gloo group, forked by the first test that needs it and kept for the session. A case is a function
of a module, called as `case(rank, **arguments)` in each process; `on_two_ranks` makes a test of it. Every case has a
deadline: if a rank dies or waits forever, the test fails with a report from each rank, and the next case gets a new
group.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import inspect
import os
import pickle
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.forked import join_group, server
from tests.keepers import OFF

DEADLINE_SECONDS = 90.0
"""Of one case, with the start of the group. Far more than any case takes; it ends cases that hang."""
GRACE_SECONDS = 5.0
"""How long the other ranks may take to fail by themselves after one rank has failed."""

Case = Callable[..., Any]
LASTING: list[Any] = []
"""On a rank, the `Peers` of objects that outlive a case. Their groups end with the case, and are created again on the
next access."""


@dataclass(frozen=True)
class Report:
    """The end of a case on one rank: its result, or its failure."""

    value: Any = None
    failure: str = ""


class Ranks:
    """Processes that run cases: the fixtures `two_ranks` and `four_ranks`.

    If not `grouped`, each case creates its group. With `once`, each case gets new processes, which end after it without
    destroying a group.
    """

    def __init__(
        self,
        world_size: int = 2,
        *,
        grouped: bool = True,
        once: bool = False,
        deadline_seconds: float = DEADLINE_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._world_size, self._grouped, self._once = world_size, grouped, once
        self._deadline_seconds, self._grace_seconds = deadline_seconds, grace_seconds
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, case: Case, **arguments: Any) -> list[Any]:
        """Return the results of `case(rank, **arguments)`, plain values, by rank; fail the test if one failed."""
        reports = self.reports(case, **arguments)
        if any(report.failure for report in reports):
            lines = (f"rank {rank}: {report.failure or 'passed'}" for rank, report in enumerate(reports))
            pytest.fail("\n".join(lines), pytrace=False)
        return [report.value for report in reports]

    def reports(self, case: Case, **arguments: Any) -> list[Report]:
        """Return the end of `case` on each rank. End the group if one failed: its ranks may be out of step."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((case.__module__, case.__qualname__, arguments)))
        reports = self._collect()
        if any(report.failure for report in reports):
            self._kill()
        elif self._once:
            self.close()
        return reports

    def close(self) -> None:
        """End the processes in good order. Idempotent."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(self._grace_seconds)
        self._kill()

    def _start(self) -> None:
        context = server()
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = Path(self._folder.name, "rendezvous")
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            group = (rank, self._world_size, rendezvous if self._grouped else None)
            process = context.Process(target=_serve, args=(*group, self._once, dict(OFF), theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self) -> list[Report]:
        deadline = time.monotonic() + self._deadline_seconds
        reports: dict[int, Report] = {}
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]  # wait() returns what it got
                reports[rank] = self._receive(rank)
                if reports[rank].failure:
                    deadline = min(deadline, time.monotonic() + self._grace_seconds)
        return [reports.get(rank) or self._stuck(rank) for rank in range(len(self._processes))]

    def _receive(self, rank: int) -> Report:
        try:
            report: Report = pickle.loads(self._connections[rank].recv_bytes())
            return report
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(self._grace_seconds)
            return Report(failure=f"ended with exit code {self._processes[rank].exitcode}")

    def _stuck(self, rank: int) -> Report:
        process = self._processes[rank]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGABRT)  # faulthandler answers with the stack of every thread.
        process.join(self._grace_seconds)
        return Report(failure="came to no end; its stderr says where it stood")

    def _kill(self) -> None:
        for process, connection in zip(self._processes, self._connections, strict=True):
            connection.close()
            process.kill()
            process.join()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()


def on_two_ranks(case: Case) -> Case:
    """Make a test of `case(rank, **fixtures)`, which passes if both ranks pass; fixtures must be picklable."""
    signature = inspect.signature(case)
    fixtures = [parameter for name, parameter in signature.parameters.items() if name != "rank"]
    group = inspect.Parameter("two_ranks", inspect.Parameter.KEYWORD_ONLY)

    @wraps(case)
    def test(*, two_ranks: Ranks, **arguments: Any) -> None:
        two_ranks.run(case, **arguments)

    test.__signature__ = signature.replace(parameters=[*fixtures, group])  # type: ignore[attr-defined]  # for pytest
    return test


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes in one group, started by the first case."""
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four processes in one group, started by the first case."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four_processes() -> Iterator[Ranks]:
    """Four fresh processes without a group."""
    ranks = Ranks(4, grouped=False, deadline_seconds=240)
    yield ranks
    ranks.close()


@pytest.fixture
def alone() -> Iterator[Ranks]:
    """One fresh process."""
    ranks = Ranks(1, grouped=False, deadline_seconds=300)
    yield ranks
    ranks.close()


def _serve(
    rank: int, world_size: int, rendezvous: Path | None, once: bool, variables: dict[str, str], connection: Connection
) -> None:
    """Run cases in one of the processes until the connection ends."""
    os.environ.update(variables)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if rendezvous is not None:
        join_group(rank, world_size, rendezvous)
    while order := _next(connection):
        report = _report(rank, *order)
        if dist.is_initialized() and not report.failure and not once:
            _drop_groups()
        connection.send_bytes(pickle.dumps(report))
    if dist.is_initialized() and not once:
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # Finalizing an interpreter with torch takes a second, for nothing.


def _drop_groups() -> None:
    """Destroy the groups that a case created: each has threads that wake up a hundred times a second."""
    import torch.distributed as dist

    dist.barrier()  # No rank is in a collective of these groups any more.
    for peers in LASTING:
        peers._saves = peers._control = None
    created = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    has_meshes = any(group.group_desc.startswith("mesh") for group in created)
    while created:
        dist.destroy_process_group(created.pop())
    if has_meshes:
        _forget_meshes()


def _forget_meshes() -> None:
    """Empty the caches of DTensor, which hold meshes, and these the groups of their dimensions."""
    import torch
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

    torch._C._clear_DTensor_sharding_propagator_cache()
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    gc.collect()


def _next(connection: Connection) -> Any:
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        return None


def _report(rank: int, module: str, name: str, arguments: dict[str, Any]) -> Report:
    import torch

    torch.default_generator.manual_seed(0)  # Each case begins with one seed on all ranks.
    try:
        # In the module the name is that of the test that `on_two_ranks` made of the case.
        case = inspect.unwrap(getattr(importlib.import_module(module), name))
        value = case(rank, **arguments)
        pickle.dumps(value)
    except BaseException:  # pytest.fail, too
        return Report(failure=traceback.format_exc())
    return Report(value)
