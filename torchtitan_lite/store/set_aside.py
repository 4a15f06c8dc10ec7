"""Checkpoints that were set aside, damaged or abandoned, and get the name of their step back.

A checkpoint that another one abandons is invisible whatever its name is, and the next start would rename it again. So
either the branch of that other one gives way, or nothing is changed. Whatever is cut, every checkpoint is complete
under one of its names, and after `CheckpointStore.recover` the same calls finish what the first ones began. **The
caller holds the lease**.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from torchtitan_lite.store import layout
from torchtitan_lite.store.known_manifests import manifest_in
from torchtitan_lite.store.layout import Listing, is_folder
from torchtitan_lite.store.lease import process_lock
from torchtitan_lite.store.manifest import CheckpointInfo
from torchtitan_lite.store.place import Place, on_disk
from torchtitan_lite.store.protocol import ABANDONED, CORRUPT, SetAside, StoresCheckpoints


class ShelfOnDisk:
    """What was set aside in the folder `root` of `store`; see `Shelf`."""

    def __init__(self, store: StoresCheckpoints, root: Path, durable: Durable) -> None:
        self._store, self._root, self._durable = store, root, durable

    def find(self, name: str) -> SetAside:
        """Return what is called `name`.

        Raises CheckpointNotFound for another name or if there is none, CheckpointDamaged without a manifest of that
        step, and what `Manifest.of_folder` raises.
        """
        folder, why = self._root / name, _why(name)
        if why is None or not is_folder(folder):
            there = ", ".join(names_of(self._root)) or "no damaged or abandoned step"
            finding = "it is neither step-N.corrupt nor step-N.abandoned-RUN" if why is None else "it does not exist"
            raise CheckpointNotFound(str(folder), None, finding=f"{finding} ({self._root} has {there})")
        if (manifest := manifest_in(folder, why[0])) is None:
            raise CheckpointDamaged(str(folder), f"{layout.MANIFEST} is missing, so nothing says what it was")
        return SetAside(folder, *why, manifest)

    def in_the_way(self, aside: SetAside) -> Path | None:
        final = self._root / layout.step_dir(aside.step)
        return final if os.path.lexists(final) else None

    def bring_back(self, aside: SetAside) -> list[Path]:
        final = self._root / layout.step_dir(aside.step)
        with process_lock(self._store.address):
            self._store.rollbacks.bring_back(aside.step, aside.manifest.lineage)
            abandoners, branch = abandoners_of(self._store, aside), branch_in_the_way(self._store, aside)
            # Until the last of the abandoners has lost its name the step is still abandoned, and a start after a crash
            # renames it again. So they go last, and the others before them, or a crash would leave two branches.
            order = sorted(branch, key=lambda info: (info in abandoners, info.path != final, -info.step))
            before = next((number for number, info in enumerate(order, 1) if info.path == final), 0)
            moved = self._leave(order[:before])
            self._take_name(aside, final)
            return sorted([*moved, *self._leave(order[before:])])

    def _take_name(self, aside: SetAside, final: Path) -> None:
        self._store.check_lease()
        folder = on_disk(aside.folder)
        if os.path.lexists(folder / layout.FINDINGS):
            # It is undamaged: these findings are no longer true.
            self._durable.remove_file(folder / layout.FINDINGS)
        self._durable.rename(folder, final)
        self._durable.fsync_dir(self._root)

    def _leave(self, infos: Iterable[CheckpointInfo]) -> list[Path]:
        """Set the checkpoints `infos` aside as abandoned, durably; return their new paths."""
        moved = []
        for info in infos:
            self._store.check_lease()
            moved.append(Listing(self._root).take_aside(info.step, f"abandoned-{info.run_id}"))
            self._durable.rename(on_disk(info.path), moved[-1])
            self._durable.fsync_dir(self._root)
        return moved


def names_of(root: Path) -> list[str]:
    """Return the names in `root` of what was set aside and may come back."""
    return [name for name in Listing(root).names if _why(name) is not None]


def _why(name: str) -> tuple[int, str] | None:
    found = layout.parse_set_aside(name)
    return found if found is not None and found[1] in (CORRUPT, ABANDONED) else None


def branch_in_the_way(store: StoresCheckpoints, aside: SetAside) -> list[CheckpointInfo]:
    """Return the committed checkpoints of the branches that have left `aside`, by ascending step; mostly none."""
    intact = store.intact()
    runs = {info.run_id for info in intact if info.lineage.leaves(aside.step, aside.run_id)}
    return [info for info in intact if info.run_id in runs]


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
    if branch and not leave_branch:
        left = abandoners_of(store, aside) or branch[:1]
        raise CheckpointError(
            f"{name} stays as it is: {_named(left)} of run {left[0].run_id} has left it behind. With --leave-branch it "
            f"comes back, and {_named(branch)} {'is' if len(branch) == 1 else 'are'} set aside in its place."
        )
    hidden = [
        info
        for info in store.committed()
        if (info.step, info.run_id) in aside.manifest.lineage.abandons and info.path not in given_up
    ]
    if hidden:
        raise CheckpointError(
            f"{name} stays as it is: it abandons {_named(hidden)} of run {hidden[0].run_id}, which no run would see "
            "any more. Remove or rename what it abandons first, or start another folder from it with "
            "--checkpoint.initial_load_path."
        )


def _named(infos: Iterable[CheckpointInfo]) -> str:
    return ", ".join(info.path.name for info in infos)
