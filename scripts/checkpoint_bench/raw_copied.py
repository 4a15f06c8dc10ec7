"""The least that a save in a thread costs: a copy into touched memory, which a thread hands to the raw disk.

It plans nothing, digests nothing, commits nothing and gives way to nobody. Who writes a copy when all of it is made is
durable no sooner.
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
    """The copy, and the write of it."""

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
