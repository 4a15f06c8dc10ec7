"""The watcher: a helper next to each rank, which sees that a step takes too long and ends its rank then.

A thread of the rank could not: while a rank is stopped, or a call in C holds the GIL, none of its threads runs. The
watchers of all ranks are connected to the one of rank 0. It judges: when the step of any rank is overdue it collects
what all watchers find, names the rank that hangs, and has all ranks killed, so that the launcher sees a failed start. A
watcher that cannot reach it names its own rank. It has the priority of its rank and waits for no disk, only for its
links: what makes a rank hang is not to hold it up. `HangWatch` is the end of the rank.
"""

from __future__ import annotations

import dataclasses
import resource
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite import log
from torchtitan_lite.disk.helper import Line
from torchtitan_lite.disk.threads import daemon
from torchtitan_lite.distributed.job_link import HasDescriptor, JobLink, ready
from torchtitan_lite.event_lines import Recorded
from torchtitan_lite.events import Hung
from torchtitan_lite.hangs.own_rank import OwnRank, map_words
from torchtitan_lite.hangs.verdict import Evidence, HangVerdict, judge, report
from torchtitan_lite.json_lines import JsonLines

NAME = "titan-watcher"
"""In top and ps."""
CONNECT_SECONDS = 10.0
"""For a watcher: the judge answers one after the other."""
SILENCE_SECONDS = 1.0
"""How long another watcher may not take or finish a message: it is killed or stopped."""
REPORT_SECONDS = 2.5
"""How long the judge waits for the other watchers, which take a second at most."""
PATIENCE_SECONDS = 5.0
"""How long the others wait for the judge."""
AGAIN_SECONDS = 1.0
"""From one look at all ranks to the next one while one of them is in a pause; a look may take as long."""
EVENTS_SECONDS = 1.0
"""How long the file of events may take: its disk may be what hangs."""


@dataclass(frozen=True)
class Orders:
    """What a watcher has to know."""

    rank: int
    pid: int
    """Of its process."""
    address: str
    """Where the watcher of rank 0 listens; empty if there is no other rank."""
    port: int
    secret: str
    events: str
    """The file for the event; empty for none."""


def serve(orders: Orders, lines: Sequence[Line], fds: Sequence[int]) -> None:
    """Watch the rank of `orders`, in the process, until it hangs up or dies."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(NAME)
    with suppress(OSError, ValueError):  # The judge has a connection for each rank.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    log.setup(orders.rank)
    words_fd, stacks_fd, *listeners = fds
    rank = OwnRank(orders.rank, orders.pid, map_words(words_fd), stacks_fd, lines[0])
    if listeners or not orders.address:
        Judge(rank, orders, [socket.socket(fileno=fd) for fd in listeners]).run()
    else:
        Follower(rank, orders).run()


class Judge:
    """The watcher of rank 0."""

    def __init__(self, rank: OwnRank, orders: Orders, listeners: Sequence[socket.socket]) -> None:
        self._rank = rank
        self._orders = orders
        self._listeners = listeners
        self._strangers: list[JobLink] = []
        """Those that have not said which rank they watch."""
        self._links: dict[int, JobLink] = {}
        self._lost: set[int] = set()
        """The ranks whose watchers hung up without a word."""
        self._reports: dict[int, Evidence] = {}
        self._is_alarmed = False

    def run(self) -> None:
        """Watch until the rank closes its line."""
        next_judgement = 0.0
        while not self._rank.has_ended():
            self._wait(self._rank.tick_seconds)
            # Looked at in each pass: the watcher counts only time in which it looks.
            is_overdue = self._rank.is_overdue() or self._is_alarmed
            if is_overdue and time.monotonic() >= next_judgement:
                next_judgement = time.monotonic() + AGAIN_SECONDS
                self._judge()

    def _judge(self) -> None:
        self._is_alarmed = False
        self._reports = {}
        self._send_all("report")
        end = time.monotonic() + REPORT_SECONDS
        own = self._rank.evidence()
        while len(self._reports) < len(self._links) and time.monotonic() < end:
            self._wait(max(0.0, end - time.monotonic()), for_rank=False)
        found = [own, *(self._reports[rank] for rank in sorted(self._reports))]
        silent = sorted(self._lost | (self._links.keys() - self._reports.keys()))
        verdict = judge(found, silent=silent)
        if verdict is None:
            self._send_all("wait")
            return
        log.logger.error("%s", report(verdict, found))
        with suppress(OSError):  # Without a thread there is no event: a disk that hangs would keep the rank alive.
            daemon("events", _write_events, self._orders.events, verdict, found).join(EVENTS_SECONDS)
        self._send_all("leave")
        self._rank.kill()

    def _wait(self, seconds: float, *, for_rank: bool = True) -> None:
        """Read what the other watchers send, and return at the latest after `seconds`."""
        links = [*self._strangers, *self._links.values()]
        waited: list[HasDescriptor] = [*self._listeners, *links]
        if for_rank:
            waited.append(self._rank.line)
        can_be_read = ready(waited, seconds)
        for listener in self._listeners:
            if listener in can_be_read:
                self._accept(listener)
        for link in links:
            if link in can_be_read:
                self._read(link)

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        # Else it is no process of this job, or was stopped: the link has closed the connection.
        with suppress(OSError, ValueError):
            self._strangers.append(_link(connection, self._orders, SILENCE_SECONDS, is_caller=False))

    def _read(self, link: JobLink) -> None:
        try:
            message = link.receive()
        except (OSError, ValueError):
            self._drop(link)
            return
        rank = int(message["rank"])
        match message["is"]:
            case "here":
                self._strangers.remove(link)
                if rank in self._links:
                    self._drop(self._links[rank])
                # One that was started again: that the one before hung up is no evidence against its rank.
                self._lost.discard(rank)
                self._links[rank] = link
            case "overdue":
                self._is_alarmed = True
            case "report":
                self._reports[rank] = Evidence(**message["evidence"])
            case "ended":
                self._links.pop(rank, None)

    def _drop(self, link: JobLink) -> None:
        link.close()
        self._strangers = [each for each in self._strangers if each is not link]
        for rank, each in list(self._links.items()):
            if each is link:
                del self._links[rank]
                self._lost.add(rank)

    def _send_all(self, order: str) -> None:
        for link in list(self._links.values()):
            try:
                link.send({"is": order})
            except OSError:
                self._drop(link)


class Follower:
    """The watcher of another rank. Without a link to the judge it acts for its own rank."""

    def __init__(self, rank: OwnRank, orders: Orders) -> None:
        self._rank = rank
        self._orders = orders
        self._link = _judge_link(orders, CONNECT_SECONDS, says_why=True)
        self._next_try = 0.0
        """When to join the judge again, while there is no link: it may be slow, or have been started again."""
        self._waits_since: float | None = None
        """For the judge."""
        self._next_alarm = 0.0

    def run(self) -> None:
        """Watch until the rank closes its line."""
        self._send("here")
        while not self._rank.has_ended():
            waited: list[HasDescriptor] = [self._rank.line]
            if self._link is not None:
                waited.append(self._link)
            if self._link in ready(waited, self._rank.tick_seconds):
                self._read()
            if self._rank.is_overdue():
                self._alarm(time.monotonic())
            else:
                self._waits_since = None
                if self._link is None and time.monotonic() >= self._next_try:
                    self._next_try = time.monotonic() + PATIENCE_SECONDS
                    self._link = _judge_link(self._orders, SILENCE_SECONDS)
                    self._send("here")
        self._send("ended")

    def _alarm(self, now: float) -> None:
        """Call the judge, each second; without an answer of it, name this rank."""
        if self._waits_since is None:
            self._waits_since = now
        if now >= self._next_alarm:
            self._send("overdue")
            self._next_alarm = now + AGAIN_SECONDS
        if self._link is None or now >= self._waits_since + PATIENCE_SECONDS:
            found = [self._rank.evidence()]
            verdict = judge(found)
            if verdict is not None:
                log.logger.error("%s", report(verdict, found))
                self._rank.kill()

    def _read(self) -> None:
        assert self._link is not None
        try:
            message = self._link.receive()
        except (OSError, ValueError):
            self._hang_up()
            return
        self._waits_since = None
        match message["is"]:
            case "report":
                self._send("report", evidence=dataclasses.asdict(self._rank.evidence()))
            case "leave":
                self._rank.kill()

    def _send(self, what: str, **more: object) -> None:
        if self._link is not None:
            try:
                self._link.send({"is": what, "rank": self._rank.rank, **more})
            except OSError:
                self._hang_up()

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
            self._next_try = time.monotonic() + AGAIN_SECONDS


def _link(connection: socket.socket, orders: Orders, seconds: float, *, is_caller: bool) -> JobLink:
    link = JobLink(connection, orders.secret.encode(), is_caller=is_caller, silence_seconds=seconds)
    connection.settimeout(SILENCE_SECONDS)
    return link


def _judge_link(orders: Orders, seconds: float, *, says_why: bool = False) -> JobLink | None:
    try:
        connection = socket.create_connection((orders.address, orders.port), seconds)
        return _link(connection, orders, seconds, is_caller=True)
    except (OSError, ValueError) as error:
        says = log.logger.warning if says_why else log.logger.debug
        says(
            "The watcher of rank %d cannot reach the one of rank 0 at %s, port %d: %s. If this rank hangs, or waits "
            "for one that does, this rank is reported as hanging",
            orders.rank,
            orders.address,
            orders.port,
            error,
        )
        return None


def _write_events(path: str, verdict: HangVerdict, found: Sequence[Evidence]) -> None:
    by_rank = {each.rank: each for each in found}
    for rank in verdict.ranks if path else ():
        each = by_rank.get(rank, found[0])
        hung = Hung(each.step, rank=rank, host=each.host, seconds=each.seconds, reason=verdict.reason)
        JsonLines(Path(path)).append(Recorded(time.time(), hung).to_record())
