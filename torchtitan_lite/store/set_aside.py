"""Checkpoints that were set aside, damaged or abandoned, and get the name of their step back.

A checkpoint that another one abandons is invisible whatever its name is, and the next start would rename it again. So
either the branch of that other one gives way, or nothing is changed. Whatever is cut, every checkpoint is complete
under one of its names, and after `CheckpointStore.recover` the same calls finish what the first ones began. **The
caller holds the lease**.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from torchtitan_lite.disk.block_reader import BlockReader, DamagedRange
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord, num_blocks
from torchtitan_lite.disk.plain_file import size_finding, sizes_of
from torchtitan_lite.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, CheckpointUnsafe
from torchtitan_lite.store import layout
from torchtitan_lite.store.known_manifests import damage_in
from torchtitan_lite.store.listing import Listing, is_folder
from torchtitan_lite.store.manifest import CheckpointInfo, Manifest
from torchtitan_lite.store.place import Place, on_disk
from torchtitan_lite.store.protocol import StoresCheckpoints, nothing
from torchtitan_lite.store.rank_records import RecordedFiles, RecordsOfRanks
from torchtitan_lite.store.store import CheckpointStore

CORRUPT, ABANDONED = "corrupt", "abandoned"
_BLOCKS_AT_A_TIME = 64


@dataclass(frozen=True)
class SetAside:
    """A checkpoint that was set aside, with its manifest."""

    folder: Place
    step: int
    why: str
    """`CORRUPT` or `ABANDONED`."""
    manifest: Manifest

    @property
    def run_id(self) -> str:
        """Return the id of its run."""
        return self.manifest.lineage.run_id


class VerifiesBlocks(Protocol):
    """Verifies blocks of files, as `BlockReader` does."""

    def verify(self, path: Path, record: FileRecord, blocks: Sequence[int]) -> None: ...


class Shelf(Protocol):
    """What was set aside in one folder of checkpoints."""

    def find(self, name: str) -> SetAside:
        """Return what is called `name`. Raises CheckpointNotFound, and CheckpointDamaged without its manifest."""
        ...

    def check(self, aside: SetAside, advance: Callable[[int], object]) -> None:
        """Raise CheckpointDamaged unless `aside` is what was committed.

        Reads and digests every byte of a damaged one, and calls `advance` with the number of bytes that it read. Of an
        abandoned one, in which nothing was ever wrong, it compares the sizes of files: a load verifies it anyway.
        """
        ...

    def in_the_way(self, aside: SetAside) -> Place | None:
        """Return what has the place of the step of `aside` now; None if nothing has."""
        ...

    def bring_back(self, aside: SetAside, fence: Callable[[], object]) -> Sequence[Place]:
        """Make `aside` the checkpoint of its step, durably; return what was set aside of the branch that abandons it.

        After `check` and `refuse_harm`. `fence` raises if the folder belongs to another job by now.
        """
        ...


class ShelfOnDisk:
    """What was set aside in the folder of `store`."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store

    def find(self, name: str) -> SetAside:
        return find(self._store.root, name)

    def check(self, aside: SetAside, advance: Callable[[int], object]) -> None:
        check(aside, advance)

    def in_the_way(self, aside: SetAside) -> Place | None:
        final = self._store.root / layout.step_dir(aside.step)
        return final if os.path.lexists(final) else None

    def bring_back(self, aside: SetAside, fence: Callable[[], object] = nothing) -> Sequence[Place]:
        return bring_back(self._store, aside, fence)


def names_of(root: Path) -> list[str]:
    """Return the names in `root` of what was set aside and may come back."""
    return [name for name in Listing(root).names if _why(name) is not None]


def find(root: Path, name: str) -> SetAside:
    """Return what is called `name` in `root`.

    Raises CheckpointNotFound for another name or if there is none, CheckpointDamaged without a manifest of that step,
    and what `Manifest.of_folder` raises.
    """
    folder, why = root / name, _why(name)
    if why is None or not is_folder(folder):
        there = ", ".join(names_of(root)) or "nothing that was set aside"
        finding = "it is neither step-N.corrupt nor step-N.abandoned-RUN" if why is None else "it does not exist"
        raise CheckpointNotFound(str(folder), None, finding=f"{finding} ({root} has {there})")
    try:
        manifest = Manifest.of_folder(folder)
    except CheckpointUnsafe as error:
        raise damage_in(folder, error) from error
    if manifest is None:
        raise CheckpointDamaged(str(folder), f"{layout.MANIFEST} is missing, so nothing says what it was")
    step = why[0]
    if manifest.step != step:
        raise CheckpointDamaged(str(folder), f"{layout.MANIFEST}: it is the manifest of step {manifest.step}")
    return SetAside(folder, step, why[1], manifest)


def _why(name: str) -> tuple[int, str] | None:
    found = layout.parse_set_aside(name)
    return found if found is not None and found[1] in (CORRUPT, ABANDONED) else None


def check(aside: SetAside, advance: Callable[[int], object]) -> None:
    """Raise as `Shelf.check` does."""
    folder, reader = on_disk(aside.folder), BlockReader()
    sizes = partial(sizes_of, folder)
    files = RecordedFiles(aside.manifest, RecordsOfRanks(aside.manifest, str(folder), reader, folder.joinpath, sizes))
    for name, known in sorted(aside.manifest.files.items()):
        finding = size_finding(folder / name, known.size)
        if not finding and aside.why == CORRUPT:
            finding = digest_finding(reader, folder / name, files[name], advance)
        if finding:
            raise CheckpointDamaged(str(aside.folder), finding)


def digest_finding(reader: VerifiesBlocks, path: Path, record: FileRecord, advance: Callable[[int], object]) -> str:
    """Return what is wrong with the bytes of the file `path`; the empty string if nothing is."""
    if record.size and not record.blocks:
        return f"{path.name} has no digests in {layout.MANIFEST}, so it cannot be verified"
    count = num_blocks(record.size)
    for begin in range(0, count, _BLOCKS_AT_A_TIME):
        end = min(begin + _BLOCKS_AT_A_TIME, count)
        try:
            reader.verify(path, record, range(begin, end))
        except DamagedRange as damage:
            return f"{path.name}: bytes {damage.begin} to {damage.end} are not those that were written"
        advance(min(end * BLOCK_BYTES, record.size) - begin * BLOCK_BYTES)
    return ""


def branch_in_the_way(store: StoresCheckpoints, aside: SetAside) -> list[CheckpointInfo]:
    """Return the committed checkpoints of the branches that abandon `aside`, by ascending step; mostly none."""
    runs = {info.run_id for info in abandoners_of(store, aside)}
    return [info for info in store.intact() if info.run_id in runs]


def abandoners_of(store: StoresCheckpoints, aside: SetAside) -> list[CheckpointInfo]:
    """Return the committed checkpoints that abandon `aside`."""
    return [info for info in store.intact() if (aside.step, aside.run_id) in info.lineage.abandons]


def refuse_harm(store: StoresCheckpoints, aside: SetAside, there: Place | None, *, leave_branch: bool) -> None:
    """Raise CheckpointError, with the names, if `aside` cannot come back next to the checkpoints that are there.

    `there`: what has the place of its step. `leave_branch`: whether the branch that abandons it is set aside.
    """
    name = aside.folder.name
    branch = branch_in_the_way(store, aside)
    given_up = {info.path for info in branch}
    if there is not None and there not in given_up:
        raise CheckpointError(f"{name} stays as it is: {there} is there already. Rename or remove that one first.")
    if (abandoners := abandoners_of(store, aside)) and not leave_branch:
        raise CheckpointError(
            f"{name} stays as it is: {_listed(abandoners)} of run {abandoners[0].run_id} abandons it, and no run would "
            f"see it. With --leave-branch it comes back, and {_listed(branch)} {'is' if len(branch) == 1 else 'are'} "
            "set aside in its place."
        )
    hidden = [
        info
        for info in store.committed()
        if (info.step, info.run_id) in aside.manifest.lineage.abandons and info.path not in given_up
    ]
    if hidden:
        raise CheckpointError(
            f"{name} stays as it is: it abandons {_listed(hidden)} of run {hidden[0].run_id}, which no run would see "
            "any more. Remove or rename what it abandons first, or start another folder from it with "
            "--checkpoint.initial_load_path."
        )


def bring_back(store: CheckpointStore, aside: SetAside, fence: Callable[[], object] = nothing) -> list[Path]:
    """Give `aside` the name of its step, and return the new paths of the branch; see `Shelf.bring_back`."""
    final = store.root / layout.step_dir(aside.step)
    with store.exclusive:
        abandoners, branch = abandoners_of(store, aside), branch_in_the_way(store, aside)
        rest = [info for info in reversed(branch) if info not in abandoners]
        # Until the last of the abandoners has lost its name the step is still abandoned, and a start after a crash
        # renames it again. So they go last, and the others before them, or a crash would leave two branches.
        if any(info.path == final for info in abandoners):
            moved = [*_leave(store, rest, fence), *_leave(store, abandoners, fence)]
            _take_name(store, aside, final, fence)
            return sorted(moved)
        moved = _leave(store, [info for info in rest if info.path == final], fence)
        _take_name(store, aside, final, fence)
        moved += _leave(store, [info for info in rest if info.path != final], fence)
        return sorted([*moved, *_leave(store, abandoners, fence)])


def _take_name(store: CheckpointStore, aside: SetAside, final: Path, fence: Callable[[], object]) -> None:
    fence()
    folder = on_disk(aside.folder)
    if os.path.lexists(folder / layout.FINDINGS):
        # It is undamaged: these findings are no longer true.
        store.durable.remove_file(folder / layout.FINDINGS)
    store.durable.rename(folder, final)
    store.durable.fsync_dir(store.root)


def _leave(store: CheckpointStore, infos: Iterable[CheckpointInfo], fence: Callable[[], object]) -> list[Path]:
    """Set the checkpoints `infos` aside as abandoned, durably; return their new paths."""
    moved = []
    for info in infos:
        spell = functools.partial(layout.abandoned_dir, info.step, info.run_id)
        fence()
        store.durable.rename(on_disk(info.path), place := Listing(store.root).free(spell))
        moved.append(place)
    if moved:
        store.durable.fsync_dir(store.root)
    return moved


def _listed(infos: Iterable[CheckpointInfo]) -> str:
    return ", ".join(info.path.name for info in infos)
