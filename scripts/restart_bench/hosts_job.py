"""The same job on two hosts, a rank on each: one host is lost with its memory, and an empty one takes its place."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from restart_bench.jobs import DEADLINE_SECONDS, KilledJob, Model
from tests.hosts import Host, network

PORT = 29500


class HostsJob(KilledJob):
    """The job in network namespaces of this machine (root only); a third one has the store in which they meet.

    After a loss the job is started again on both, as a cluster's manager does: what runs at the other host is killed,
    but for what outlives a job there.
    """

    def __init__(self, folder: Path, contender: str, model: Model, interval: int) -> None:
        super().__init__(folder, contender, model, interval)
        self._open = ExitStack()
        self._number = 0
        self._gone_bytes = 0

    def __enter__(self) -> HostsJob:
        super().__enter__()
        self._hosts = self._open.enter_context(network(1))
        self._store = self._hosts.add()
        served = [sys.executable, "scripts/rendezvous_store.py", self._store.address, str(PORT)]
        self._store.start(served, self.log)
        self._wait(lambda: "Nodes meet" in self.log.read_text(encoding="utf-8"))
        self._pair = [self._hosts.add(), self._hosts.add()]
        return self

    def _launch(self, max_restarts: int) -> float:
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._number += 1
        endpoint = f"{self._store.address}:{PORT}"
        meet = {"NNODES": "2", "NGPU": "1", "RDZV": endpoint, "RDZV_ID": f"start-{self._number}"}
        options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-conf=is_host=0"]
        options += [f"--rdzv-endpoint={endpoint}", f"--rdzv-id=start-{self._number}"]
        for host in self._pair:
            variables = {**self._variables(), **meet, "PET_LOCAL_ADDR": host.address}
            host.start(self._command(options), self.log, variables)
        return began

    def _kill(self, kind: str) -> str:
        ranks = {line["rank"]: line["pid"] for line in self._lines()}
        rank = self._number % 2  # Of the two in turn.
        lost = next(number for number, host in enumerate(self._pair) if ranks[rank] in host.pids())
        left = self._pair[1 - lost]
        self._gone_bytes += self._pair[lost].sent_bytes()
        self._pair[lost] = self._hosts.replace(self._pair[lost])
        for pid in [left.processes[0].pid, *(pid for pid in ranks.values() if pid in left.pids())]:
            os.kill(pid, signal.SIGKILL)
        left.processes.pop().wait(DEADLINE_SECONDS)
        return "host" if rank else "first host"

    def _own_keys(self) -> Sequence[str]:
        keys = super()._own_keys()
        return [*keys, "--checkpoint.memory_peer_copies=1"] if self._contender == "ours, memory" else keys

    def _sent_bytes(self) -> int:
        return self._gone_bytes + sum(host.sent_bytes() for host in self._pair)

    def _has_ended(self) -> bool:
        return any(process.poll() is not None for host in self._pair_if_made() for process in host.processes)

    def _pair_if_made(self) -> Sequence[Host]:
        return getattr(self, "_pair", ())

    def _end(self) -> None:
        self._open.close()
