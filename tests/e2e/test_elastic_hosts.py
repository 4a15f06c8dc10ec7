"""torchrun with `--nnodes=1:2`: a node is lost, the other continues, and a node that joins later trains along."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.jobs import DEADLINE_SECONDS, TINY, Job, start
from tests.forked import FORKED_RANKS
from tests.hosts import Host, Hosts, network
from tests.processes import read_lines
from tests.records import Record

pytestmark = pytest.mark.slow

GLOBAL_BATCH, INTERVAL = 4, 50
SLOW = "slow@step:seconds=0.05,times=always"
"""Nodes take seconds to find one another, and a run of these steps would be over."""
ALWAYS = (f"--training.global_batch_size={GLOBAL_BATCH}", "--training.trace_samples")
NO_SAVES = ("--checkpoint.interval=100000",)
IN_MEMORY = (
    *("--checkpoint.async_mode=async_with_pinned_mem", "--checkpoint.memory_interval=5"),
    *("--checkpoint.memory_peer_copies=1", "--checkpoint.lease_timeout_seconds=10"),
    *(f"--checkpoint.interval={INTERVAL}", "--checkpoint.keep_latest_k=2"),
)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with network() as found:
        yield found


class ElasticJob(Job):
    """A run whose nodes come and go; its store is on a host of its own."""

    def __init__(self, folder: Path, hosts: Hosts, steps: int) -> None:
        folder.mkdir()
        store, log = hosts.add(), folder.with_suffix(".log")
        log.touch()
        served = [sys.executable, "scripts/rendezvous_store.py", store.address, "29500"]
        super().__init__([store.fork(served, log)], folder, log)
        self.steps, self._hosts, self._store = steps, hosts, store
        self.wait_until(lambda job: "Nodes meet" in job.log)

    def join(self) -> Host:
        """Add a node to the job."""
        host = self._hosts.add()
        meet = {"NNODES": "1:2", "RDZV": f"{self._store.address}:29500", "PET_LOCAL_ADDR": host.address}
        environment = {**FORKED_RANKS, **meet, "NGPU": "1", "MAX_RESTARTS": "100", "TORCHTITAN_LITE_FAULT": SLOW}
        training = [
            *TINY,
            *ALWAYS,
            *IN_MEMORY,
            f"--job.dump_folder={self.dump_folder}",
            f"--training.steps={self.steps}",
        ]
        host.fork([sys.executable, "scripts/launch.py", *training], self.log_file, environment)
        return host

    def train(self, steps: int) -> int:
        """Wait for `steps` more; return the step that is reached."""
        begin = max(self.losses(), default=0)
        self.wait_for_step(begin + steps)
        return max(self.losses())


def come_and_go(tmp_path: Path, hosts: Hosts, rounds: int, record: Record) -> None:
    """Lose a node and have one join, `rounds` times; the run is that of one process that was never interrupted."""
    drawn = random.Random(rounds)
    job = ElasticJob(tmp_path / "run", hosts, steps=100 + 100 * rounds)
    nodes = [job.join(), job.join()]
    job.train(20)
    for number in range(rounds):
        reached = job.train(drawn.randint(10, 30))
        victim = drawn.randrange(2)
        hosts.remove(nodes.pop(victim))
        begin = time.monotonic()
        job.wait_until(lambda job, number=number: len(job.events("loaded")) > 2 * number)  # type: ignore[misc]
        lost = reached - job.events("loaded")[-1]["step"]
        seconds = {"alone": round(time.monotonic() - begin, 1)}
        assert lost <= 15, "of two transfers and an interval"
        job.train(10)
        nodes.append(job.join())
        begin = time.monotonic()
        job.wait_until(lambda job, number=number: len(job.events("loaded")) > 2 * number + 1)  # type: ignore[misc]
        seconds["joined"] = round(time.monotonic() - begin, 1)
        origins = [event["origin"] for event in job.events("loaded")[-2:]]
        record(round=number, node=victim, reached=reached, trained_again=lost, seconds=seconds, origins=origins)
    for host in nodes:
        assert host.processes[0].wait(10 * DEADLINE_SECONDS) == 0, job.log
    with start(tmp_path / "straight", *ALWAYS, f"--training.steps={job.steps}", *NO_SAVES) as straight:
        assert straight.processes[0].wait(10 * DEADLINE_SECONDS) == 0, straight.log
    assert job.losses() == pytest.approx(straight.losses(), rel=1e-4)
    taken = Counter(
        index
        for path in (job.dump_folder / "samples").glob("rank*.jsonl")
        for each in read_lines(path)
        for index in each["indices"]
    )
    assert taken == Counter(range(GLOBAL_BATCH * job.steps)), "each sample once, in the record of the run that counts"
    record(rounds=rounds, steps=job.steps)


def test_a_node_is_lost_and_another_one_joins(tmp_path: Path, hosts: Hosts, record: Record) -> None:
    come_and_go(tmp_path, hosts, rounds=1, record=record)


@pytest.mark.exhaustive
def test_nodes_come_and_go_twenty_times(tmp_path: Path, hosts: Hosts, record: Record) -> None:
    come_and_go(tmp_path, hosts, rounds=20, record=record)
