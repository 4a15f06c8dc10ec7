"""Checks that `initial_load_path` names a checkpoint, and says what it names instead.

People start from many things: a file of weights, the folder of a whole run, a name on a hub. None of
these is a checkpoint. The error names for each how to convert it, or where the checkpoint is. Looks at
names only, and reads no file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from torchtitan_lite.errors import CheckpointNotFound
from torchtitan_lite.store import layout
from torchtitan_lite.store.listing import Listing

_SCHEME = re.compile(r"[A-Za-z][\w+.-]*://")
_NAME_ON_A_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_NAME_A_STEP = "Name the folder of one step, such as outputs/checkpoint/step-500"
_SAFETENSORS = ".safetensors"
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_FROM_SAFETENSORS = (
    "Convert them, in Python: torch.distributed.checkpoint.save(safetensors.torch.load_file({file!r}), "
    "checkpoint_id='weights'), then name that folder; --checkpoint.load_rename adapts the names"
)
_FROM_TORCH_SAVE = (
    "Convert it, in Python: torch.distributed.checkpoint.format_utils.torch_save_to_dcp({file!r}, 'weights'), then "
    "name that folder; --checkpoint.load_rename adapts the names"
)


def checked_initial_path(given: str) -> Path:
    """Return the folder `given` if it holds a checkpoint; else raise `CheckpointNotFound` with what it is. Any rank."""
    path = Path(given)
    # A `.metadata` that is no regular file is refused when it is read.
    if not _SCHEME.match(given) and os.path.lexists(path / layout.METADATA):
        return path
    raise CheckpointNotFound(given, None, finding=_finding(given, path))


def _finding(given: str, path: Path) -> str:
    if _SCHEME.match(given):
        return (
            "it is an address, and only folders of a file system are read. Copy the checkpoint to one, and name the "
            "folder as a plain path"
        )
    if path.is_dir():
        return _of_folder(path)
    if path.exists():
        return _of_file(path)
    if _NAME_ON_A_HUB.fullmatch(given):
        return (
            f"there is no such folder in {Path.cwd()}. If it is a name on the Hugging Face hub: download it first, "
            "with hf download, and convert its weights"
        )
    place = "" if path.is_absolute() else f" in {Path.cwd()}, the working directory"
    return f"there is no such file or folder{place}. {_NAME_A_STEP}"


def _of_file(path: Path) -> str:
    if path.suffix == _SAFETENSORS:
        return f"it is a file of safetensors. {_FROM_SAFETENSORS.format(file=str(path))}"
    if path.suffix in _PICKLED:
        return f"it is a file of torch.save, not a folder. {_FROM_TORCH_SAVE.format(file=str(path))}"
    if layout.is_data_file(path.name) or path.name in (layout.METADATA, layout.MANIFEST):
        return f"it is one of a checkpoint's files. Name their folder, {path.parent}"
    return f"it is a file, not a folder. {_NAME_A_STEP}"


def _of_folder(path: Path) -> str:
    if found := _last_step(path):
        return f"it is the folder above the steps. Name one of them, such as {found}"
    for folder in sorted(path.iterdir()):
        if folder.is_dir() and (found := _last_step(folder)):
            return f"it is the dump folder of a run. Name one of its steps, such as {found}"
    names = sorted(entry.name for entry in path.iterdir())
    for suffix, what, convert in (
        (_SAFETENSORS, "safetensors", _FROM_SAFETENSORS),
        *((suffix, "weights as torch.save writes them", _FROM_TORCH_SAVE) for suffix in _PICKLED),
    ):
        if files := [name for name in names if name.endswith(suffix)]:
            return f"it is a folder of {what}. {convert.format(file=str(path / files[0]))}"
    if any(layout.is_data_file(name) for name in names):
        return f"it has a checkpoint's data and no {layout.METADATA}, as a save leaves it that was cut. Take another"
    return f"there is no {layout.METADATA} file in it" + ("" if names else ", it is empty") + f". {_NAME_A_STEP}"


def _last_step(folder: Path) -> Path | None:
    """Return the checkpoint with the highest step in `folder`, whichever tool wrote it; None if there is none."""
    steps = [places[0] for places in Listing(folder).places().values() if (places[0] / layout.METADATA).is_file()]
    return steps[-1] if steps else None
