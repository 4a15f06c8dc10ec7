"""A folder through a client of a network file system that misbehaves: a passthrough of FUSE with knobs.

    python -m tests.network_disk SOURCE MOUNT KNOBS

serves SOURCE at MOUNT as the JSON file KNOBS says, which is read again when it changes. Two mounts of one SOURCE are
the clients of two hosts. A client remembers names and folders until it opens the folder that has them, which is what
NFS does with its times left out. It works in the folder that it remembers, whatever name that has by now. A file that
is removed while it is open gets another name.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CHANGES = ("rename", "link", "unlink", "mkdir", "rmdir", "create", "write", "truncate", "fsync", "fsyncdir")
_OTHERS = ("open", "read", "opendir", "readdir", "flush", "statfs", "fallocate", "getattr")
_START_SECONDS = 20.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Answer:
    """`code`, in place of the result of calls of `operation` from number `after` on, `times` times."""

    operation: str
    """Of `CHANGES` and others; "change": each of `CHANGES`; "any": each."""
    code: int
    is_done: bool = False
    """Whether the operation is carried out nevertheless: a request that was sent twice."""
    after: int = 0
    times: int = 1 << 30
    name: str = ""
    """A part of the path."""
    only_direct: bool = False
    """Whether only files count that were opened with O_DIRECT."""


@dataclass(frozen=True)
class Knobs:
    """How a client behaves."""

    answers: tuple[Answer, ...] = ()
    remembers: bool = False
    """Names and folders, until it opens the folder that has them."""
    restarts: int = 0
    """Of the server: a file that was opened before the last one cannot be used any more (ESTALE)."""
    has_no_figures: bool = False
    """statvfs has zeros."""
    never_cuts: bool = False
    """truncate does not make a file shorter."""
    delay_seconds: float = 0.0
    """Before each operation."""
    number: int = 0
    """Another one counts the calls from 0."""


@dataclass
class Client:
    """A mount of the folder `source` at `folder`."""

    source: Path
    folder: Path
    _control: Path
    _number: int = 0
    _knobs: dict[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def set(self, *answers: Answer, **knobs: Any) -> None:
        """Answer as `answers` say from now on, and as `knobs` and those that were set before. Any thread."""
        with self._lock:
            self._number += 1
            self._knobs |= knobs
            text = json.dumps(asdict(Knobs(answers, number=self._number, **self._knobs)))
            temporary = self._control.with_suffix(".new")
            temporary.write_text(text)
            temporary.replace(self._control)

    def reset(self) -> None:
        """Behave from now on."""
        self._knobs = {"restarts": self._knobs.get("restarts", 0)}
        self.set()


@contextmanager
def clients(base: Path, count: int = 2) -> Iterator[list[Client]]:
    """Mount one folder `count` times, in `base`; skip the test where that is not possible."""
    pytest.importorskip("mfusepy", exc_type=(ImportError, OSError))
    if not os.access("/dev/fuse", os.W_OK):
        pytest.skip("there is no /dev/fuse that this user may open")
    source = base / "source"
    source.mkdir(parents=True)
    with ExitStack() as stack:
        found = [stack.enter_context(_mounted(source, base / f"client{number}")) for number in range(count)]
        yield found


REAL = {
    "bindfs": ("bindfs",),
    "mergerfs": ("mergerfs", "-o", "category.create=rand,cache.files=partial,dropcacheonclose=true"),
}
"""File systems of FUSE that mount a folder, by their commands."""


class BehavingClient(Client):
    """A mount that has no knobs."""

    def set(self, *answers: Answer, **knobs: Any) -> None:
        """Do nothing."""


@contextmanager
def real_clients(base: Path, kind: str) -> Iterator[list[Client]]:
    """Mount one folder twice with a file system of `REAL`; skip the test where that is not possible."""
    if shutil.which(kind) is None:
        pytest.skip(f"{kind} is not installed")
    found: list[Client] = []
    (base / "source").mkdir()
    with ExitStack() as stack:
        for number in range(2):
            mount = base / f"client{number}"
            mount.mkdir()
            command = [*REAL[kind], str(base / "source"), str(mount)]
            mounted = subprocess.run(command, capture_output=True, text=True, check=False)
            if mounted.returncode != 0 or not mount.is_mount():
                pytest.skip(f"{kind} does not mount here: {mounted.stderr.strip()}")
            stack.callback(subprocess.run, ["umount", "--lazy", str(mount)], check=False, capture_output=True)
            found.append(BehavingClient(base / "source", mount, base / "unused"))
        yield found


@contextmanager
def _mounted(source: Path, mount: Path) -> Iterator[Client]:
    mount.mkdir()
    control = mount.with_suffix(".json")
    client = Client(source, mount, control)
    client.set()
    command = [sys.executable, "-m", "tests.network_disk", str(source), str(mount), str(control)]
    log = mount.with_suffix(".log")
    with log.open("wb") as output:
        daemon = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
    try:
        _wait_for(mount, daemon, log)
        yield client
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=False, capture_output=True)
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(5)
        daemon.kill()
        daemon.wait()


def _wait_for(mount: Path, daemon: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _START_SECONDS
    while not mount.is_mount():
        if daemon.poll() is not None or time.monotonic() > until:
            pytest.skip(f"FUSE does not mount here: {log.read_text(errors='replace')[-500:]}")
        time.sleep(0.005)


def serve(source: str, mount: str, control: str) -> None:
    """Serve `source` at `mount` until it is unmounted."""
    import mfusepy

    class Fuse(mfusepy.FUSE):  # type: ignore[misc]  # it has no types
        def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
            if flags:
                raise OSError(errno.EINVAL, "no exchange")  # As most network file systems.
            return int(super().rename_fuse_3(old, new, flags))

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # Then FUSE unmounts and ends.
    served = Passthrough(source, Path(control))
    options = {"foreground": True, "nothreads": True, "default_permissions": True, "use_ino": True}
    times = dict.fromkeys(("attr_timeout", "entry_timeout", "negative_timeout"), 0)
    Fuse(served, mount, fsname="network", **options, **times)


class Passthrough:
    """The operations of mfusepy; each `path` begins at the folder that is mounted."""

    use_ns = True

    def __init__(self, source: str, control: Path) -> None:
        self._control = control
        self._seen: tuple[int, int] | None = None
        self._knobs = Knobs()
        self._counts: dict[int, int] = {}
        self._folders = {"/": os.open(source, os.O_PATH | os.O_DIRECTORY)}
        self._names: dict[str, bool] = {}
        """Whether there is what a path names, as this client remembers it."""
        self._opened: dict[int, tuple[int, bool]] = {}
        """By descriptor: how often the server had restarted, and whether it is direct."""
        for name in (*CHANGES, *_OTHERS):
            setattr(self, name, self._answering(name, getattr(self, f"do_{name}")))

    def _answering(self, name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._read_knobs()
            time.sleep(self._knobs.delay_seconds)
            answer = self._answer(name, arguments)
            if answer is not None and not answer.is_done:
                raise OSError(answer.code, os.strerror(answer.code))
            result = do(*arguments)
            if answer is not None:
                raise OSError(answer.code, os.strerror(answer.code))
            return result

        return call

    def _read_knobs(self) -> None:
        found = self._control.stat()
        if self._seen != (found.st_ino, found.st_mtime_ns):
            self._seen = found.st_ino, found.st_mtime_ns
            read = json.loads(self._control.read_text())
            answers = tuple(Answer(**each) for each in read.pop("answers"))
            self._knobs, self._counts = Knobs(answers, **read), {}
        if not self._knobs.remembers:
            self._forget("/")

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> Answer | None:
        paths = " ".join(each for each in arguments if isinstance(each, str))
        if ".fuse_hidden" in paths:
            return None  # FUSE itself gives a removed open file another name.
        for number, answer in enumerate(self._knobs.answers):
            is_change = answer.operation == "change" and name in CHANGES
            if not is_change and answer.operation not in (name, "any"):
                continue
            if answer.name not in paths:
                continue
            if answer.only_direct and not self._opened.get(arguments[-1], (0, False))[1]:
                continue
            count = self._counts[number] = self._counts.get(number, 0) + 1
            if answer.after < count <= answer.after + answer.times:
                return answer
        return None

    # What a client remembers.

    def _folder(self, path: str) -> int:
        """Return a descriptor of the folder `path`, as this client knows it."""
        if path not in self._folders:
            parent, name = self._place(path)
            self._folders[path] = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        return self._folders[path]

    def _place(self, path: str) -> tuple[int, str]:
        """Return the folder that `path` is in, and its name there."""
        pure = PurePosixPath(path)
        folder = self._folder(str(pure.parent))
        if os.fstat(folder).st_nlink == 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return folder, pure.name or "."

    def _forget(self, folder: str) -> None:
        """Forget what is in `folder`, and below."""
        below = folder.rstrip("/") + "/"
        for path in [path for path in self._folders if path.startswith(below) and path != "/"]:
            os.close(self._folders.pop(path))
        self._names = {path: there for path, there in self._names.items() if not path.startswith(below)}

    def _changed(self, *paths: str) -> None:
        for path in paths:
            self._names.pop(path, None)
            self._forget(path)
            if path in self._folders:
                os.close(self._folders.pop(path))

    # Names.

    def do_getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        if self._names.get(path) is False:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        try:
            if fh is not None:
                found = os.fstat(fh)
            elif path in self._folders:
                found = os.fstat(self._folders[path])
            else:
                folder, name = self._place(path)
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    self._folder(path)
        except FileNotFoundError:
            self._names[path] = False
            raise
        kept = ("ino", "mode", "nlink", "uid", "gid", "size", "blocks", "blksize")
        times = {f"st_{name}": getattr(found, f"st_{name}_ns") for name in ("atime", "mtime", "ctime")}
        return {f"st_{name}": getattr(found, f"st_{name}") for name in kept} | times

    def do_opendir(self, path: str) -> int:
        self._forget(path)  # Who opens a folder asks the server.
        self._folder(path)
        return 0

    def do_readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._folder(path))
        try:
            names = [".", "..", *os.listdir(fd)]  # noqa: PTH208  # names
            found = [(name, os.stat(name, dir_fd=fd, follow_symlinks=False)) for name in names]
        finally:
            os.close(fd)
        return [(name, {"st_ino": each.st_ino, "st_mode": each.st_mode}, 0) for name, each in found]

    def do_mkdir(self, path: str, mode: int) -> None:
        folder, name = self._place(path)
        self._changed(path)  # Also where it is there.
        os.mkdir(name, mode, dir_fd=folder)

    def do_rmdir(self, path: str) -> None:
        folder, name = self._place(path)
        os.rmdir(name, dir_fd=folder)
        self._changed(path)

    def do_unlink(self, path: str) -> None:
        folder, name = self._place(path)
        os.unlink(name, dir_fd=folder)
        self._changed(path)

    def do_rename(self, old: str, new: str) -> None:
        (old_folder, old_name), (new_folder, new_name) = self._place(old), self._place(new)
        os.rename(old_name, new_name, src_dir_fd=old_folder, dst_dir_fd=new_folder)
        self._changed(old, new)

    def do_link(self, target: str, source: str) -> None:
        (folder, name), (there, other) = self._place(source), self._place(target)
        os.link(name, other, src_dir_fd=folder, dst_dir_fd=there, follow_symlinks=False)
        self._changed(target)

    def do_fsyncdir(self, path: str, datasync: int, fh: int) -> None:
        self._folder(path)

    def readlink(self, path: str) -> str:
        folder, name = self._place(path)
        return os.readlink(name, dir_fd=folder)

    def symlink(self, target: str, source: str) -> None:
        folder, name = self._place(target)
        os.symlink(source, name, dir_fd=folder)
        self._changed(target)

    def chmod(self, path: str, mode: int) -> None:
        folder, name = self._place(path)
        os.chmod(name, mode, dir_fd=folder)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        folder, name = self._place(path)
        os.utime(name, ns=times, dir_fd=folder) if times else os.utime(name, dir_fd=folder)

    # Files.

    def do_open(self, path: str, flags: int) -> int:
        return self._open(path, flags)

    def do_create(self, path: str, mode: int, flags: int) -> int:
        fd = self._open(path, flags | os.O_CREAT, mode)
        self._names.pop(path, None)
        return fd

    def _open(self, path: str, flags: int, mode: int = 0) -> int:
        folder, name = self._place(path)
        fd = os.open(name, flags & ~os.O_DIRECT | os.O_NOFOLLOW, mode, dir_fd=folder)
        self._opened[fd] = self._knobs.restarts, bool(flags & os.O_DIRECT)
        return fd

    def _usable(self, fd: int) -> int:
        if self._opened[fd][0] != self._knobs.restarts:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fd

    def do_read(self, path: str, size: int, offset: int, fd: int) -> bytes:
        return os.pread(self._usable(fd), size, offset)

    def do_write(self, path: str, data: bytes, offset: int, fd: int) -> int:
        return os.pwrite(self._usable(fd), data, offset)

    def do_truncate(self, path: str, length: int, fd: int | None = None) -> None:
        folder, name = self._place(path)
        fd = os.open(name, os.O_WRONLY, dir_fd=folder)
        try:
            if not self._knobs.never_cuts or length > os.fstat(fd).st_size:
                os.ftruncate(fd, length)
        finally:
            os.close(fd)

    def do_fallocate(self, path: str, mode: int, offset: int, size: int, fd: int) -> None:
        os.posix_fallocate(self._usable(fd), offset, size)

    def do_fsync(self, path: str, datasync: int, fd: int) -> None:
        self._usable(fd)

    def do_flush(self, path: str, fd: int) -> None:
        """Do nothing: the answer is that of close."""

    def release(self, path: str, fd: int) -> None:
        del self._opened[fd]
        os.close(fd)

    def do_statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._folders["/"])
        names = ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail", "namemax")
        zero = ("blocks", "bfree", "bavail") if self._knobs.has_no_figures else ()
        return {f"f_{name}": 0 if name in zero else getattr(found, f"f_{name}") for name in names}


if __name__ == "__main__":
    serve(*sys.argv[1:])
