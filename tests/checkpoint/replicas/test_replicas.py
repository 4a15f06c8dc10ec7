"""Images of a rank at another host: whose go where, which step is due, and what arrives."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.images.cards import CARD, changed
from tests.checkpoint.images.image_runs import images_of, step
from tests.checkpoint.small_run import SmallRun
from torchtitan_lite.checkpoint.staging.mark import Mark, read_mark
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.distributed.environment import runtime_folder
from torchtitan_lite.distributed.job_link import JobLink
from torchtitan_lite.memory.images.card import Card, ImageKey
from torchtitan_lite.memory.images.held_images import Move, moves
from torchtitan_lite.memory.images.host_replicas import (
    HostReplicas,
    ReplicaHost,
    Turns,
    own_address,
    partners,
    ring_text,
)
from torchtitan_lite.memory.images.memory_budget import Room, has_no_room_for_replicas
from torchtitan_lite.memory.images.replica_sender import (
    Outcome,
    ReplicaJob,
    ReplicaMemory,
    ReplicaPlace,
    ReplicaProcess,
    _receive_copies,
)
from torchtitan_lite.memory.images.snapshot_match import is_replica
from torchtitan_lite.memory.keeper.client import Keeper

START = "a1"
SECRET = b"of this start"
DATA = os.urandom(3 << 20)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=16))
def test_no_rank_sends_its_replicas_to_its_own_host_and_all_of_a_host_to_the_same_one(hosts: list[str]) -> None:
    to = partners(hosts)
    if len(set(hosts)) == 1:
        assert to == []
        return
    assert all(hosts[partner] != hosts[rank] for rank, partner in enumerate(to))
    following = {host: {hosts[to[rank]] for rank, of in enumerate(hosts) if of == host} for host in set(hosts)}
    assert all(len(hosts_of) == 1 for hosts_of in following.values())
    assert len(set.union(*following.values())) == len(set(hosts)), "it is a ring"


def test_ranks_share_the_work_of_the_next_host() -> None:
    assert partners(["a", "a", "b", "b"]) == [2, 3, 0, 1]
    assert partners(["a", "a", "b"]) == [2, 2, 0]


def test_the_ring_is_named_by_its_hosts() -> None:
    assert ring_text([ReplicaHost(str(n // 2), f"node{n // 2}", "", 0) for n in range(4)]) == "node0 -> node1 -> node0"
    many = ring_text([ReplicaHost(str(n), f"node{n}", "", 0) for n in range(100)])
    assert many.endswith("node7 and 92 more -> node0")


@pytest.mark.parametrize(
    ("interface", "master"), [("lo", ""), ("", "localhost"), ("no-such", ""), ("", "no such host")]
)
def test_an_address_that_no_other_host_reaches_is_none(interface: str, master: str) -> None:
    assert own_address(interface, master) == ""


def test_a_host_without_room_for_four_images_and_two_replicas_is_named() -> None:
    rooms = [Room("a", 10, 0, 1000), Room("b", 10, 0, 70)]
    assert has_no_room_for_replicas(rooms, [1, 0]) == "b", "60 of 70 are more than the part that images may take"
    assert has_no_room_for_replicas([rooms[0], rooms[1]._replace(free_bytes=80)], [1, 0]) == ""
    assert has_no_room_for_replicas([rooms[0], rooms[1]._replace(have_bytes=20)], [1, 0]) == "", "20 of them are there"
    assert has_no_room_for_replicas([rooms[0], rooms[1]._replace(replica_bytes=20)], [1, 0]) == ""
    assert has_no_room_for_replicas([rooms[0]._replace(oom_kills=1), rooms[0]], [1, 0]) == "a"


@given(st.lists(st.frozensets(st.integers(0, 5)), min_size=6, max_size=6))
def test_each_rank_gets_the_image_that_its_host_lacks_from_one_that_has_it(where: list[frozenset[int]]) -> None:
    found = moves(where)
    assert all(move.rank in where[move.source] for move in found)
    there = set().union(*where)
    assert [move.rank for move in found] == [rank for rank in range(6) if rank not in where[rank] and rank in there]


def test_ranks_that_have_the_same_images_share_the_sending() -> None:
    both = frozenset({0, 1, 2, 3})
    assert moves([both, both, frozenset(), frozenset()]) == [Move(0, 2), Move(1, 3)]


def key(step: int) -> ImageKey:
    return ImageKey(step, START, step)


def exchange(*ranks: Turns, sending: bool = False) -> None:
    numbers = [turns.numbers(is_sending=sending) for turns in ranks]
    for turns in ranks:
        turns.agree(max(lacks for lacks, _ in numbers), max(failed for _, failed in numbers))


def test_an_image_is_complete_once_every_rank_has_sent_it() -> None:
    one, two = Turns(), Turns()
    for turns in (one, two):
        turns.begin(key(2))
    one.is_sent = True
    exchange(one, two, sending=True)
    assert (one.due, one.complete) == (two.due, two.complete) == (key(2), None)
    two.is_sent = True
    exchange(one, two)
    assert (one.due, one.complete) == (two.due, two.complete) == (None, key(2))


def test_where_one_rank_fails_all_begin_a_later_image_and_the_one_before_stays_complete() -> None:
    one, two = Turns(), Turns()
    for turns in (one, two):
        turns.complete = key(2)
        turns.begin(key(4))
    one.is_sent = two.has_failed = True
    exchange(one, two)
    assert one.due is two.due is None
    assert one.complete == two.complete == key(2)


def test_a_rank_that_never_had_the_image_does_not_hold_up_the_others() -> None:
    one, two = Turns(), Turns()
    for turns in (one, two):
        turns.begin(key(2))
    one.is_sent = True
    for _ in range(4):
        assert two.due == key(2)
        exchange(one, two)
    assert one.due is two.due is None


def job_of(rank: int, folder: Path, runtime: Path, *, port: int) -> ReplicaJob:
    """Return the job of one of two ranks; the other one receives at `port`."""
    return ReplicaJob(
        rank=rank,
        start=START,
        folder=str(folder),
        ttl_seconds=60.0,
        runtime=str(runtime),
        secret=SECRET,
        address="127.0.0.1",
        port=port,
        senders=(1 - rank,),
        most_bytes=len(DATA),
        bytes_per_second=0.0,
    )


class Sender:
    """A rank of this host that sends images to a second one, whose keeper is `keeper`: both are on the loopback."""

    def __init__(self, folder: Path, runtime: Path) -> None:
        self.keeper = Keeper(folder, 60.0, runtime=runtime)
        self.keeper.start()
        self.keeper.join(START)
        self.outcomes: queue.Queue[Outcome] = queue.Queue()
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        ports = [listener.getsockname()[1] for listener in self._listeners]
        self.processes = [
            ReplicaProcess(
                job_of(rank, folder, runtime, port=ports[1 - rank]),
                self._listeners[rank],
                self.outcomes.put if rank == 0 else lambda outcome: None,
            )
            for rank in range(2)
        ]
        for process in self.processes:
            process.start()
            pid = process.pid
            process.start()
            assert pid is not None and process.pid == pid, "it lives"

    def send(self, card: Card, data: bytes, keeps: ImageKey | None = None) -> Outcome:
        return self.begin(card, data, keeps)()

    def begin(self, card: Card, data: bytes, keeps: ImageKey | None = None) -> Callable[[], Outcome]:
        """Send the image of `card`; return how to wait for what comes of it."""
        arena, mark = os.memfd_create("arena"), Mark()
        os.write(arena, data)
        mark.set(card.key.step, len(data), card.to_bytes())
        self.processes[0].send(keeps, (arena, mark.fd))
        os.close(arena)
        mark.close()
        return lambda: self.outcomes.get(timeout=60.0)

    def replicas(self) -> dict[int, bytes]:
        found = {}
        for held in self.keeper.held():
            marked = read_mark(held.mark_fd)
            if is_replica(held.name) and marked is not None:
                found[marked.step] = os.pread(held.arena_fd, marked.num_bytes, 0)
            held.close()
        return found

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.keeper.finish()


@pytest.fixture
def sender(tmp_path: Path, memory_tier: Path) -> Iterator[Sender]:
    made = Sender(tmp_path, memory_tier)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def replicas_of(run: SmallRun) -> Iterator[HostReplicas]:
    """Yield those of `run`, as of a rank of two hosts whose next host is not there."""
    replicas, keeper = images_of(run)._replicas, images_of(run).tier.keeper
    listener = socket.create_server(("127.0.0.1", 0))
    job = job_of(0, keeper.folder, runtime_folder() or Path(), port=1)
    replicas._process = process = ReplicaProcess(job, listener, replicas._note)
    process.start()
    try:
        yield replicas
    finally:
        process.close()


@pytest.mark.usefixtures("memory_tier")
def test_no_process_receives_while_a_load_takes_memory_over_and_the_next_image_starts_another_one(
    tmp_path: Path,
) -> None:
    run = SmallRun(tmp_path, async_mode="async", interval=100, memory_interval=1)
    with run.loaded(), replicas_of(run) as replicas:
        step(run)
        assert replicas._process is not None
        before = replicas._process.pid
        assert before is not None
        run.manager.load()
        assert replicas._process.pid is None and replicas._turns.due is None
        step(run)
        step(run)
        assert replicas._process.pid not in (None, before)


@pytest.mark.usefixtures("memory_tier")
def test_a_manager_that_is_opened_again_needs_no_process_of_the_start_before(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, async_mode="async", interval=100, memory_interval=1)
    with run.loaded(), replicas_of(run) as replicas:
        process = replicas._process
        assert process is not None
        for _ in range(2):
            step(run)
        run.manager.close()
        assert process.pid is None
        run.manager.load()
        for _ in range(2):
            step(run)
        assert run.train_state.step == 4
        assert replicas._turns.due is None and replicas._process is None, "there is one host"


def test_where_no_process_can_be_started_an_image_has_no_peer_copy(
    tmp_path: Path, memory_tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: queue.Queue[Outcome] = queue.Queue()
    listener = socket.create_server(("127.0.0.1", 0))
    process = ReplicaProcess(job_of(0, tmp_path, memory_tier, port=1), listener, outcomes.put)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(OSError, match="can't start new thread"):
            process.start()
    assert process.pid is None
    process.start()
    assert process.pid is not None
    process.close()


def image(step: int, data: bytes = DATA) -> Card:
    return changed(CARD, step=step, rank=0, copy=step, file="__0_0.distcp", record=FileRecord.of(data))


def test_an_image_arrives_is_verified_and_outlives_both_processes(sender: Sender) -> None:
    assert sender.send(image(2), DATA) == Outcome(len(DATA))
    assert sender.replicas() == {2: DATA}
    assert sender.send(image(2), DATA) == Outcome(0), "it is there already"
    for process in sender.processes:
        process.close()
    assert sender.replicas() == {2: DATA}


def test_the_image_that_is_to_be_kept_stays_while_later_ones_arrive(sender: Sender) -> None:
    sender.send(image(2), DATA)
    two = image(2).key
    assert sender.send(image(4, DATA[::-1]), DATA[::-1], two).num_bytes == len(DATA)
    assert sender.replicas() == {2: DATA, 4: DATA[::-1]}
    assert sender.send(image(6), DATA, image(4).key).num_bytes == len(DATA)
    assert sender.replicas() == {4: DATA[::-1], 6: DATA}, "two places are enough"


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"record": FileRecord.of(b"else".ljust(len(DATA)))}, "do not have their digests"),
        ({"rank": 1}, "rank 1 has its peer copies on another host"),
        ({"record": FileRecord.of(DATA + b"more")}, f"bytes, found {len(DATA)}"),
    ],
)
def test_what_is_damaged_or_not_expected_is_no_replica(sender: Sender, change: dict[str, object], finding: str) -> None:
    assert finding in sender.send(changed(image(2), **change), DATA).finding
    assert sender.replicas() == {}
    assert sender.send(image(4), DATA).finding == ""


def test_a_process_that_dies_costs_a_replica_and_another_one_takes_over(sender: Sender) -> None:
    sender.send(image(2), DATA)
    pid = sender.processes[1].pid
    assert pid is not None
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert sender.send(image(4), DATA).finding
    sender.processes[1].start()  # It listens at the same port.
    assert sender.send(image(6), DATA, image(2).key).num_bytes == len(DATA)
    assert sender.replicas() == {2: DATA, 6: DATA}, "the new process found what the one before kept"


def test_a_process_that_is_stopped_can_be_ended_and_its_order_is_lost(sender: Sender) -> None:
    pid = sender.processes[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    sending = sender.begin(image(2), DATA)
    sender.processes[0].end()
    assert sending().finding == "the process that sends peer copies ended"
    sender.processes[1].end()
    for process in sender.processes:
        process.start()
    assert sender.send(image(4), DATA).num_bytes == len(DATA)


def test_the_orders_of_a_process_that_dies_are_lost_not_forgotten(sender: Sender) -> None:
    sender.processes[0].close()
    assert sender.outcomes.get(timeout=60.0).finding == "the process that sends peer copies ended"
    assert sender.send(image(2), DATA).finding == "no process runs"


def test_memory_of_a_replica_that_never_arrived_is_used_again(tmp_path: Path, memory_tier: Path) -> None:
    keeper = Keeper(tmp_path, 60.0, runtime=memory_tier)
    keeper.start()
    memory = ReplicaMemory(keeper, START, [0], len(DATA))
    first = memory.place(image(2), len(DATA), None)
    assert first is not None
    second = memory.place(image(4), len(DATA), None)
    assert second is not None and second is not first, "whoever sent the first one may still do so"
    for place in (first, second):
        memory.release(place)
    assert memory.place(image(6), len(DATA), None) is first
    assert memory.finding_after(first, image(4).to_bytes()) == "its bytes do not have their digests"
    keeper.finish()


def test_memory_for_a_sender_that_left_before_it_was_answered_is_used_again(tmp_path: Path, memory_tier: Path) -> None:
    keeper = Keeper(tmp_path, 60.0, runtime=memory_tier)
    keeper.start()
    places: list[ReplicaPlace | None] = []

    class Left(ReplicaMemory):
        """Memory that is found just before the other end hangs up."""

        def place(self, card: Card, num_bytes: int, keeps: ImageKey | None) -> ReplicaPlace | None:
            places.append(super().place(card, num_bytes, keeps))
            link.close()
            return places[-1]

    memory = Left(keeper, START, [0], len(DATA))
    for step_of_image in (2, 4):
        ours, theirs = socket.socketpair()
        receiving = threading.Thread(target=_receive_copies, args=(theirs, SECRET, memory))
        receiving.start()
        link = JobLink(ours, SECRET, is_caller=True)
        link.send({"num_bytes": len(DATA), "keeps": None}, image(step_of_image).to_bytes())
        receiving.join()
    assert places[0] is not None and places[1] is places[0]
    keeper.finish()
