"""A host that is lost, with all that was in its memory: a run on two hosts continues from the replicas at the other."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.jobs import DEADLINE_SECONDS, TINY, Job, run
from tests.forked import FORKED_RANKS
from tests.hosts import Host, Hosts, network, torchrun
from tests.records import Record

pytestmark = pytest.mark.slow

INTERVAL = 2
IN_MEMORY = ("--checkpoint.async_mode=async_with_pinned_mem", f"--checkpoint.memory_interval={INTERVAL}")
REPLICATED = (*IN_MEMORY, "--checkpoint.memory_peer_copies=1", "--checkpoint.lease_timeout_seconds=10")
NO_DISK = "--checkpoint.interval=100000"
SLOW = {"TORCHTITAN_LITE_FAULT": "slow@step:seconds=0.2,times=always"}
"""Steps that do not outrun the replicas, which are sent one after another."""
FEW_STEPS = 2 * INTERVAL + 1


class HostsJob(Job):
    """One run of the trainer over two hosts, a rank on each, in all its starts."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(parents=True)
        super().__init__([], folder, folder.with_suffix(".log"))
        self.log_file.touch()
        self._options = options

    def start(self, hosts: list[Host]) -> None:
        training = [*TINY, f"--job.dump_folder={self.dump_folder}", *self._options]
        self.processes = [
            host.fork(
                torchrun("train.py", *training, nodes=len(hosts), rank=rank, master=hosts[0]),
                self.log_file,
                FORKED_RANKS | SLOW,
            )
            for rank, host in enumerate(hosts)
        ]

    def finish(self, hosts: list[Host]) -> None:
        assert self.wait() == [0] * len(hosts), self.log
        for host in hosts:
            host.processes.clear()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with network() as found:
        yield found


def straight_losses(folder: Path, steps: int, *options: str) -> dict[int, float]:
    return run(folder, f"--training.steps={steps}", NO_DISK, *options, ranks=2).losses()


def lose(job: HostsJob, hosts: Hosts, pair: list[Host], victim: int) -> list[Host]:
    """Kill one host of `pair`; return the pair with an empty one in its place, once the other one's job has ended."""
    other = pair[1 - victim]
    new = hosts.replace(pair[victim])
    other.processes[0].wait(DEADLINE_SECONDS)
    other.processes.clear()
    return [new if rank == victim else other for rank in range(2)]


def survive(folder: Path, hosts: Hosts, losses: int, seed: int, record: Record) -> list[int]:
    """Lose a host `losses` times at random moments; return how many steps were trained again each time."""
    drawn, gap = random.Random(seed), 16
    steps = gap * (losses + 1)
    expected = straight_losses(folder / "straight", steps)
    job = HostsJob(folder / "run", f"--training.steps={steps}", NO_DISK, *REPLICATED)
    pair = [hosts.add(), hosts.add()]
    job.start(pair)
    back = []
    for number in range(losses):
        job.wait_for_step(gap * number + drawn.randint(10, gap))
        time.sleep(drawn.random() * 0.1)
        victim = drawn.randrange(2)
        pair = lose(job, hosts, pair, victim)
        reached = max(job.losses())
        job.start(pair)
        job.wait_for_step(reached + 1)
        loaded = job.events("loaded")
        assert len(loaded) == number + 1, job.log
        assert loaded[-1]["origin"] == "memory", job.log
        back.append(reached - loaded[-1]["step"])
        record(loss=number, host_of_rank=victim, reached=reached, loaded=loaded[-1]["step"], origin="memory")
    job.finish(pair)
    assert job.losses() == expected, "the run is the same, bit for bit"
    record(losses=losses, equal_steps=len(expected))
    assert not [*(job.dump_folder / "checkpoint").glob("step-*")][1:], (
        "nothing was saved, so nothing was read from disk"
    )
    return back


def test_each_lost_host_is_replaced_by_an_empty_one_and_a_few_steps_are_trained_again(
    tmp_path: Path, hosts: Hosts, record: Record
) -> None:
    assert max(survive(tmp_path, hosts, losses=2, seed=1, record=record)) <= FEW_STEPS


@pytest.mark.exhaustive
def test_a_run_survives_thirty_losses_of_a_host(tmp_path: Path, hosts: Hosts, record: Record) -> None:
    assert max(survive(tmp_path, hosts, losses=30, seed=2, record=record)) <= FEW_STEPS


def test_the_host_that_is_left_continues_alone_with_the_images_of_both(tmp_path: Path, hosts: Hosts) -> None:
    expected = straight_losses(tmp_path / "straight", 40, "--training.global_batch_size=4")
    job = HostsJob(tmp_path / "run", "--training.steps=40", NO_DISK, *REPLICATED, "--training.global_batch_size=4")
    pair = [hosts.add(), hosts.add()]
    job.start(pair)
    job.wait_for_step(20)
    left = lose(job, hosts, pair, 1)[:1]
    reached = max(job.losses())

    job.start(left)
    job.finish(left)

    (loaded,) = job.events("loaded")
    assert loaded["origin"] == "memory"
    assert reached - loaded["step"] <= FEW_STEPS
    losses = job.losses()
    assert [*losses] == [*expected], "no step is lost or trained twice in the record"
    assert losses == pytest.approx(expected, rel=1e-3)


def test_where_both_hosts_are_lost_the_run_continues_from_the_disk(tmp_path: Path, hosts: Hosts) -> None:
    expected = straight_losses(tmp_path / "straight", 40)
    job = HostsJob(tmp_path / "run", "--training.steps=40", "--checkpoint.interval=10", *REPLICATED)
    pair = [hosts.add(), hosts.add()]
    job.start(pair)
    job.wait_for_step(25)
    pair = [hosts.replace(host) for host in pair]
    committed = max(event["step"] for event in job.events("committed"))

    job.start(pair)
    job.finish(pair)

    (loaded,) = job.events("loaded")
    assert (loaded["step"], loaded["origin"]) == (committed, "disk")
    assert job.losses() == expected
