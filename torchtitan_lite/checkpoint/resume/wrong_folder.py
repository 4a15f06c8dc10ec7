"""Folders that are not what a start takes them for.

A run writes into no checkpoint, and does not start from scratch over checkpoints of another tool or another format: all
are refused before anything is written or renamed. A fresh start next to checkpoints, one level above or below, is named
in a warning. Every function is **coordinator only**.
"""

from __future__ import annotations

import os
import re
import shlex
from contextlib import suppress
from pathlib import Path

from torchtitan_lite.checkpoint.run_folders import RunFolders
from torchtitan_lite.config.address import is_in_object_store
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.errors import CheckpointNotFound, CheckpointUnreadable, ConfigError, TorchtitanLiteError
from torchtitan_lite.store import layout
from torchtitan_lite.store.layout import Listing, is_checkpoint
from torchtitan_lite.store.place import Place
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.stores import open_store, usable

_SCHEME = re.compile(r"[A-Za-z][\w+.-]*://")
_NAME_ON_A_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_NAME_A_STEP = "Name the folder of one step, such as outputs/checkpoint/step-500"
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_WEIGHTS = (".safetensors", *_PICKLED)
_DESCRIPTIONS = ("config.json", "params.json")
_IMPORT = "Make a checkpoint out of it with: torchtitan-lite import-weights {source} OUT{names}; then name OUT here"
_WEIGHTS_ALONE = "OUT has the weights alone; docs/moving.md says how an optimizer in the file comes along"
_SAME_NAMES = " --names same"
"""For weights without a description of their model: those of a loop of one's own."""


def checked_initial_path(given: str) -> Place:
    """Return the folder `given` if it holds a checkpoint; else raise `CheckpointNotFound` with what it is. Any rank.

    Raises `CheckpointUnreadable` where the system does not let this rank see.
    """
    try:
        return _checked_place(given)
    except TorchtitanLiteError:
        raise
    except OSError as error:
        raise CheckpointUnreadable(given, f"{type(error).__name__}: {error}") from error


def _checked_place(given: str) -> Place:
    if is_in_object_store(given):
        return _place_in_store(given)
    path = Path(given)
    # A `.metadata` that is no regular file is refused when it is read.
    if not _SCHEME.match(given) and any(os.path.lexists(path / name) for name in (layout.METADATA, layout.MANIFEST)):
        return path
    raise CheckpointNotFound(given, None, finding=_place_finding(given, path))


def _place_in_store(given: str) -> Place:
    """Return the checkpoint that the address `given` names, which ends in step-N. Raises as the store's `get`."""
    folder, _, name = given.rstrip("/").rpartition("/")
    # As `ls` shows it, a name has the attempt, too.
    if (step := layout.parse_step(name.partition(".")[0])) is None:
        raise CheckpointNotFound(given, None, finding="it does not end in the name of a checkpoint, such as step-1000")
    place = open_store(folder).get(step).path
    if "." in name and place.name != name:
        raise CheckpointNotFound(given, None, finding=f"that step is now {place}")
    return place


def _place_finding(given: str, path: Path) -> str:
    if _SCHEME.match(given):
        return (
            "it is an address, and only folders of a file system are read. Copy the checkpoint to one, and name the "
            "folder as a plain path"
        )
    if path.is_dir():
        return _folder_finding(path)
    if path.exists():
        return _file_finding(path)
    if _NAME_ON_A_HUB.fullmatch(given):
        return (
            f"there is no such folder in {Path.cwd()}. If it is a name on the Hugging Face hub: download it first, "
            f"with hf download, and make a checkpoint with torchtitan-lite import-weights FOLDER OUT"
        )
    place = "" if path.is_absolute() else f" in {Path.cwd()}, the working directory"
    return f"there is no such file or folder{place}. {_NAME_A_STEP}"


def _file_finding(path: Path) -> str:
    if path.suffix in _WEIGHTS:
        alone = f". {_WEIGHTS_ALONE}" if path.suffix in _PICKLED else ""
        return f"it is a file of weights. {_import_command(path, path.parent)}{alone}"
    if layout.is_data_file(path.name) or path.name in (layout.METADATA, layout.MANIFEST):
        return f"it is one of a checkpoint's files. Name their folder, {path.parent}"
    return f"it is a file, not a folder. {_NAME_A_STEP}"


def _folder_finding(path: Path) -> str:
    if found := last_step(path):
        return f"it is the folder above the steps. Name one of them, such as {found}"
    for folder in sorted(path.iterdir()):
        if folder.is_dir() and (found := last_step(folder)):
            return f"it is the dump folder of a run. Name one of its steps, such as {found}"
    names = sorted(entry.name for entry in path.iterdir())
    if any(name.endswith(_WEIGHTS) for name in names):
        return f"it is a folder of weights. {_import_command(path, path)}"
    if any(layout.is_data_file(name) for name in names):
        return f"it has a checkpoint's data but no {layout.METADATA}: its save did not end. Name another checkpoint"
    return f"there is no {layout.METADATA} file in it" + ("" if names else ", it is empty") + f". {_NAME_A_STEP}"


def _import_command(source: Path, folder: Path) -> str:
    """Return the command that makes a checkpoint out of `source`, whose model is described in `folder` or nowhere."""
    is_described = any((folder / name).is_file() for name in _DESCRIPTIONS)
    return _IMPORT.format(source=shlex.quote(str(source)), names="" if is_described else _SAME_NAMES)


def last_step(folder: Path) -> Path | None:
    """Return the checkpoint with the highest step in `folder`, whichever tool wrote it; None if there is none.

    Looks at names only. Any rank.
    """
    described = (layout.METADATA, layout.MANIFEST)
    steps = [places[0] for places in Listing(folder).places().values()]
    return next((step for step in reversed(steps) if any((step / name).is_file() for name in described)), None)


_MOST_NAMES = 8


def refuse_wrong_folders(folders: RunFolders, config: Checkpoint, step: int) -> None:
    """Raise ConfigError if one of `folders` is a checkpoint, or has checkpoints of another tool alone.

    The latter are no error where `step`, -1 for none, or `config` names what to load. Raises `FolderUnusable`, and
    FormatTooNew or FormatTooOld for a checkpoint of another format.
    """
    for each in folders.on_disk:
        with usable(each.address):
            _refuse_checkpoint(Path(each.address))
            each.intact()
    if step == config.load_step == -1 and not config.initial_load_path:
        with usable(folders.checkpoints.address):
            _refuse_foreign_only(folders.checkpoints)


def neighbour_with_steps(root: Path) -> Path | None:
    """Return the latest step of a folder in `root`, or of the folder above it; None if none of them has one."""
    below: list[Path] = []
    with suppress(OSError):
        below = sorted(root.iterdir())
    for folder in (*below, root.parent):
        with suppress(OSError):  # What is next to the run need not be readable.
            if not is_checkpoint(folder) and (found := last_step(folder)):
                return found
    return None


def _refuse_checkpoint(root: Path) -> None:
    """Raise ConfigError if `root` is a checkpoint, or in one."""
    place = _checkpoint_around(root)
    if place is None:
        return
    what = "is a checkpoint" if place == root else f"is in the checkpoint {place}"
    above = place.parent
    resume = (
        f"To resume its run, name the folder above it: folder={str(above)!r} in a loop of your own, or "
        f"--job.dump_folder={above.parent} --checkpoint.folder={above.name}. "
        if layout.parse_step(place.name) is not None
        else ""
    )
    raise ConfigError(
        f"{root} {what}, and no run writes into a checkpoint. {resume}To start a new run from it, name another folder, "
        f"and --checkpoint.initial_load_path={place}."
    )


def _checkpoint_around(root: Path) -> Path | None:
    """Return the checkpoint that `root` is or is in; None if there is none."""
    if root.is_dir() and is_checkpoint(root) and not Listing(root).steps():
        return root
    return next((place for place in (root, *root.resolve().parents) if _is_whole_checkpoint(place)), None)


def _is_whole_checkpoint(folder: Path) -> bool:
    """Return whether `folder` is certainly a checkpoint: other programs have files of these names, too."""
    # Of a folder above that lets this user pass, and not look.
    with suppress(PermissionError):
        if (folder / layout.METADATA).is_file():
            others = (layout.MANIFEST, layout.data_file(0, 0))
            return layout.parse_step(folder.name) is not None or any((folder / name).is_file() for name in others)
        return layout.parse_step(folder.name) is not None and (folder / layout.MANIFEST).is_file()
    return False


def _refuse_foreign_only(store: StoresCheckpoints) -> None:
    """Raise ConfigError if all that is in the folder of `store` are checkpoints that no run of ours wrote."""
    foreign = store.unmanaged()
    if not foreign or Listing(root := Path(store.address)).has_ours():
        return
    latest = foreign[-1]
    more = "..., " if len(foreign) > _MOST_NAMES else ""
    there = more + ", ".join(path.name for path in foreign[-_MOST_NAMES:])
    out = f"NEW/{root.name}/{latest.name}"
    raise ConfigError(
        f"{root} has checkpoints of another tool ({there}, without {layout.MANIFEST}) and none of this one, and "
        f"a run does not choose such a checkpoint by itself. Start from one with --checkpoint.initial_load_path="
        f"{latest}; or continue from one in a new folder, after torchtitan-lite convert {latest} {out} --layout ours; "
        "or move them away to start from scratch."
    )
