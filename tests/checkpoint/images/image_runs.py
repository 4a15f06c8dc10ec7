"""Small runs that make images, and what the keeper then holds of them."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.checkpoint.companions import kept
from tests.checkpoint.small_run import SmallRun
from torchtitan_lite.checkpoint.format.file_data import FileData
from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.checkpoint.staging.copiers import Copied, HostCopier
from torchtitan_lite.checkpoint.staging.mark import read_mark
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.memory.images.card import Card
from torchtitan_lite.memory.images.run_images import KeptImages
from torchtitan_lite.memory.keeper.client import Keeper


class CopiesOnly:
    """Copies as `HostCopier` does, but leaves the digests to whoever reads the copy."""

    can_digest = False

    def copy(self, image: FileData, arena: StagingArena, *, digests: bool) -> Copied:
        return HostCopier().copy(image, arena, digests=False)


RUNS: list[SmallRun] = []
"""The runs that were started, for the test to close."""


def close_runs() -> None:
    """Close all runs that were started."""
    while RUNS:
        RUNS.pop().manager.close()


def images_of(run: SmallRun) -> KeptImages:
    found = kept(run.manager)
    assert found is not None
    return found


def step(run: SmallRun, *, last: bool = False) -> None:
    """Take a step, and wait for its image."""
    run.step(last=last)
    run.manager.maybe_wait_for_staging()  # Then the image of a save has begun, too.
    images_of(run).stager.finish_preparation()
    assert images_of(run).marker.wait(60)


def start(folder: Path, steps: int, **options: Any) -> SmallRun:
    """Return a run that has taken `steps`."""
    run = SmallRun(folder, **{"async_mode": "async", "interval": 100, "memory_interval": 1} | options)
    RUNS.append(run)
    run.manager.load()
    for _ in range(steps):
        step(run)
    return run


def held(run_root: Path, runtime: Path) -> dict[int, Card]:
    """Return the cards of rank 0's valid images at the keeper by step, after comparing each with its bytes."""
    return {step: card for (rank, step), card in held_by_rank(run_root, runtime).items() if rank == 0}


def held_by_rank(run_root: Path, runtime: Path) -> dict[tuple[int, int], Card]:
    """Return the cards of all valid images at the keeper by rank and step."""
    found = {}
    for each in Keeper(run_root, 600.0, runtime=runtime).held():
        marked = read_mark(each.mark_fd)
        if marked is not None:
            card = Card.parse(marked.card)
            size = os.fstat(each.arena_fd).st_size
            with mmap.mmap(each.arena_fd, size) as memory, memoryview(memory)[: marked.num_bytes] as view:
                assert card.record == FileRecord.of(view)
            assert card.key.step == marked.step
            found[card.rank, marked.step] = card
        each.close()
    return found


@contextmanager
def tier_on(folder: Path) -> Iterator[Path]:
    """Turn the tier on in this rank, with a short path for sockets that both ranks share."""
    before = {name: os.environ.get(name, "") for name in ("TORCHTITAN_LITE_MEMORY", "XDG_RUNTIME_DIR")}
    runtime = Path("/tmp") / f"ttl-{folder.parent.name[-3:]}-{os.getppid()}"
    runtime.mkdir(mode=0o700, exist_ok=True)
    os.environ.update({"TORCHTITAN_LITE_MEMORY": "on", "XDG_RUNTIME_DIR": str(runtime)})
    try:
        yield runtime
    finally:
        os.environ.update(before)
        close_runs()
        shutil.rmtree(runtime, ignore_errors=True)  # A keeper that a failed test left ends without its socket.
