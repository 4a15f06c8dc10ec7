"""The lower bound of a save in a thread: a copy into touched memory, which a thread writes to the raw disk.

It does not plan, digest, commit or lower its priority. A save that starts to write after its copy is complete cannot be
durable earlier.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

from checkpoint_bench import disk
from checkpoint_bench.contenders import Pending, RawDisk
from checkpoint_bench.in_turn import memcpy
from checkpoint_bench.states import BenchState


class RawCopied:
    """A copy, and the write of it in a thread."""

    name, who_syncs = "raw copied", RawDisk.who_syncs

    def prepare(self, state: BenchState) -> None:
        self._buffer = disk.Touched(state.num_bytes)

    def save(self, state: BenchState, folder: Path) -> Pending:
        memcpy(state, self._buffer)
        durable: Future[None] = Future()

        def write() -> None:
            try:
                disk.Raw(self._buffer).write(folder)
            except Exception as error:
                durable.set_exception(error)
            else:
                durable.set_result(None)

        threading.Thread(target=write).start()
        return Pending(lambda: None, durable)

    def settle(self) -> None: ...

    def close(self) -> None: ...
