"""Hosts for tests: network namespaces of this machine, each with a name, a boot id and a runtime folder of its own.

All hosts see the same disk, but for mounts of their own. Each network is a bridge in a namespace, so no address leaves
them. To kill a host is to kill all of its processes.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import forked
from tests.forked import REPO, Forked
from tests.processes import send

Process = subprocess.Popen[str] | Forked

_IN_HOST = """hostname "$1"
shift
while [ "$1" != -- ]; do
    mount --bind "$1" "$2"
    shift 2
done
shift
exec "$@"
"""
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x1000, 0x4000, 0x40000, 2


@dataclass
class Host:
    """One host: `address` is that in the first network, whose interface is eth0; the next network's is eth1."""

    name: str
    namespace: str
    address: str
    folder: Path
    """Its boot id, and its own folders for sockets and temporary files."""
    processes: list[Process] = field(default_factory=list)

    def start(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        mounts: Mapping[Path, Path] | None = None,
    ) -> subprocess.Popen[str]:
        """Start `command` here; its output is appended to `log`.

        In the places of `mounts`, which exist, it sees the folders or files that these name.
        """
        binds = [str(each) for place, seen in self._seen(mounts).items() for each in (seen, place)]
        inside = ["sh", "-ec", _IN_HOST, "sh", self.name, *binds, "--", *command]
        with log.open("a") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount", *inside],
                env=self._environment(environment),
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=REPO,
            )
        self.processes.append(process)
        return process

    def fork(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        mounts: Mapping[Path, Path] | None = None,
    ) -> Forked:
        """Start `command`, a script or a module of this Python, as `start` does, but forked from the server.

        If it is torchrun or becomes it, `FORKED_RANKS` in `environment` makes it fork its ranks.
        """
        python, *arguments = command
        assert python == sys.executable, command
        place, variables = _Inside(self.name, self.namespace, self._seen(mounts)), self._environment(environment)
        if arguments[0] == "-m":
            process = forked.run_module(arguments[1], arguments[2:], log, variables, place=place)
        else:
            process = forked.run_script(Path(arguments[0]), arguments[1:], log, variables, place=place)
        self.processes.append(process)
        return process

    def _environment(self, more: Mapping[str, str] | None) -> dict[str, str]:
        own = {"XDG_RUNTIME_DIR": f"{self.folder}/run", "TMPDIR": f"{self.folder}/tmp", "OMP_NUM_THREADS": "1"}
        own |= {"TORCHTITAN_LITE_MEMORY": "on", "GLOO_SOCKET_IFNAME": "eth0"}
        return {**os.environ, **own, **(more or {})}

    def _seen(self, mounts: Mapping[Path, Path] | None) -> dict[str, str]:
        """Return what is seen in which place."""
        own = {"/proc/sys/kernel/random/boot_id": f"{self.folder}/boot_id"}
        return own | {str(place): str(seen) for place, seen in (mounts or {}).items()}

    def pids(self) -> list[int]:
        """Return all processes of this host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.namespace).split()]

    def kill(self) -> None:
        """Kill all processes at once, as a power cut would: nothing that was in memory is left."""
        while pids := self.pids():
            for pid in pids:
                send(pid, signal.SIGKILL)
            for process in self.processes:
                process.poll()
        for process in self.processes:
            process.wait()
        self.processes.clear()

    def limit(self, rate: str, interface: str = "eth0") -> None:
        """Let `interface` send at most `rate`, as `tc` spells it: 1gbit."""
        _tc = ("qdisc", "replace", "dev", interface, "root", "tbf", "rate", rate, "burst", "1mb", "latency", "50ms")
        _run("ip", "netns", "exec", self.namespace, "tc", *_tc)

    def sent_bytes(self, interface: str = "eth0") -> int:
        """Return how many bytes `interface` has sent."""
        found = _run("ip", "-n", self.namespace, "-s", "-o", "link", "show", interface)
        return int(found.split("TX:")[1].split("\\")[1].split()[0])


@dataclass
class _Inside:
    """A host, for a process that is there already: what `Host.start` does by commands."""

    name: str
    namespace: str
    mounts: dict[str, str]

    def enter(self) -> None:
        """Bring this process, which has no other thread, into the host."""
        with (_NAMESPACES / self.namespace).open() as network:
            _call("setns", network.fileno(), _CLONE_NEWNET)
        _call("unshare", _CLONE_NEWNS | _CLONE_NEWUTS)
        socket.sethostname(self.name)
        importlib.reload(platform)  # It remembers the name that the server saw.
        _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        _call("umount2", b"/sys", _MNT_DETACH)
        _call("mount", self.namespace.encode(), b"/sys", b"sysfs", 0, None)  # It shows the interfaces of the host.
        for place, seen in self.mounts.items():
            _call("mount", seen.encode(), place.encode(), None, _MS_BIND, None)


class Hosts:
    """Hosts that can reach one another through `networks` networks."""

    def __init__(self, folder: Path, networks: int = 1) -> None:
        self._folder, self._networks, self._made = folder, networks, 0
        self._prefix = f"tt{os.getpid()}"
        self.hosts: list[Host] = []
        _run("ip", "netns", "add", self._prefix)
        for network in range(networks):
            _run("ip", "-n", self._prefix, "link", "add", f"br{network}", "type", "bridge")
            _run("ip", "-n", self._prefix, "link", "set", f"br{network}", "up")

    def add(self) -> Host:
        """Return a new host: fresh memory, another name and another address than any before it."""
        self._made += 1
        number, namespace = self._made, f"{self._prefix}-{self._made}"
        _run("ip", "netns", "add", namespace)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        for network in range(self._networks):
            port = f"p{number}x{network}"
            pair = ("type", "veth", "peer", "name", f"eth{network}", "netns", namespace)
            _run("ip", "-n", self._prefix, "link", "add", port, *pair)
            _run("ip", "-n", self._prefix, "link", "set", port, "master", f"br{network}", "up")
            _run("ip", "-n", namespace, "addr", "add", f"10.77.{network}.{number}/24", "dev", f"eth{network}")
            _run("ip", "-n", namespace, "link", "set", f"eth{network}", "up")
        folder = self._folder / namespace
        for each in ("run", "tmp"):
            (folder / each).mkdir(parents=True, mode=0o700)
        (folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        host = Host(f"host-{number}", namespace, f"10.77.0.{number}", folder)
        self.hosts.append(host)
        return host

    def remove(self, host: Host) -> None:
        """Kill `host` and remove its namespace."""
        host.kill()
        _run("ip", "netns", "del", host.namespace)
        self.hosts.remove(host)

    def replace(self, host: Host) -> Host:
        """Return a new host in place of `host`, which is killed."""
        self.remove(host)
        return self.add()

    def close(self) -> None:
        """Kill all hosts and remove everything. Idempotent."""
        for host in [*self.hosts]:
            self.remove(host)
        _run("ip", "netns", "del", self._prefix)


@contextmanager
def network(networks: int = 1) -> Iterator[Hosts]:
    """Yield hosts without any yet; skip the test where this user may not make namespaces."""
    # Not the folder of the test: the path of a socket holds 107 letters.
    with tempfile.TemporaryDirectory(prefix="hosts-", dir="/tmp") as folder:
        try:
            hosts = Hosts(Path(folder), networks)
            hosts.add().start(["true"], Path(os.devnull)).wait()
            hosts.remove(hosts.hosts[0])
        except Refused as refusal:
            pytest.skip(f"hosts need network namespaces: {refusal}")
        try:
            yield hosts
        finally:
            hosts.close()


class Refused(Exception):
    """This system, or this user, cannot have network namespaces: the text says what failed."""


def torchrun(script: str, *arguments: str, nodes: int, rank: int, master: Host) -> list[str]:
    """Return the command of one node of `nodes` whose ranks run `script`; node 0 is `master`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--node-rank={rank}"]
    place = ["--nproc-per-node=1", f"--master-addr={master.address}", "--master-port=29400"]
    return [*launcher, *place, script, *arguments]


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0 or sets errno."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}{arguments}: {os.strerror(code)}")


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Refused(f"{command[0]} is not installed") from None
    if done.returncode:
        raise Refused(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
