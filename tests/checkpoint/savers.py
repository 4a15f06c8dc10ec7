"""Savers around other savers: one that managers share, and one whose writes a test can delay or cut."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.saving.savers import PendingSave, Saver
from torchtitan_lite.checkpoint.saving.target import SaveTarget
from torchtitan_lite.disk.block_writer import NewFileOnDisk
from torchtitan_lite.store.store import CheckpointStore

TIMEOUT_SECONDS = 120
"""The longest wait for a writer process, a peer or a save; on an idle machine these take no time."""


class Lent:
    """A saver that several managers use one after another; only its owner closes it."""

    def __init__(self, inner: Saver) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def close(self, timeout_seconds: float) -> None:
        """Do nothing: the owner closes the saver."""


class ObservedSaver(Lent):
    """Wraps `inner`: calls `before_write` before this rank writes its file, and lets a test wait for the last save."""

    def __init__(self, inner: Saver) -> None:
        super().__init__(inner)
        self.before_write: Callable[[Path], object] = lambda path: None
        self._over = threading.Event()
        self._over.set()

    def wait(self) -> None:
        """Wait until the last save has ended, with everything that the manager does then."""
        assert self._over.wait(TIMEOUT_SECONDS)

    def save(self, state: State, target: SaveTarget) -> PendingSave:
        self._over.clear()
        durable: Future[Any] = Future()
        watched = _WatchedStore(target.store, self.before_write)
        pending = self.inner.save(state, dataclasses.replace(target, store=watched))
        pending.durable.add_done_callback(lambda inner: self._pass_on(inner, durable))
        return PendingSave(target.step, pending.staged, durable, pending.differs)

    def close(self, timeout_seconds: float) -> None:
        self.wait()
        self.inner.close(timeout_seconds)

    def _pass_on(self, inner: Future[Any], durable: Future[Any]) -> None:
        error = inner.exception()
        if error is None:
            durable.set_result(inner.result())
        else:
            durable.set_exception(error)
        self._over.set()


class _WatchedStore(CheckpointStore):
    """Wraps `store`: calls `before_write` before this rank's file is written."""

    def __init__(self, store: CheckpointStore, before_write: Callable[[Path], object]) -> None:
        super().__init__(store.root, durable=store.durable, look_seconds=store._look_seconds)
        self._lease = store._lease
        self._before_write: Callable[[Path], object] | None = before_write

    def new_file(self, place: str, name: str) -> NewFileOnDisk:
        new = super().new_file(place, name)
        before_write, self._before_write = self._before_write, None
        if before_write is not None:
            before_write(new.path)
        return new
