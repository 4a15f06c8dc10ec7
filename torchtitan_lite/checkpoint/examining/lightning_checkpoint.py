"""A checkpoint that Lightning wrote, called NAME.ckpt: one file of `torch.save`, or a folder of DCP with a meta.pt.

The file is a pickle, which is not parsed: its size is known, its entries have checksums, and its bytes can be compared.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from torchtitan_lite.checkpoint.format.contents import Contents, Item, StoredObject
from torchtitan_lite.store import layout
from torchtitan_lite.store.listing import is_folder

_SUFFIX = ".ckpt"
META = "meta.pt"
"""Of a folder: what is in a file but the tensors."""
_STEP = re.compile(r"(?:^|\W)step=(0|[1-9][0-9]*)(?:\W|$)")


def is_lightning_file(path: Path) -> bool:
    """Return whether `path` is a checkpoint in one file; a link to one is none."""
    return path.suffix == _SUFFIX and path.is_file() and not path.is_symlink()


def is_lightning_folder(folder: Path) -> bool:
    """Return whether `folder` is a checkpoint that Lightning wrote with DCP."""
    if folder.suffix != _SUFFIX or not is_folder(folder):
        return False
    # Not pathlib: of a folder that this user cannot read nothing is known.
    return all(os.path.isfile(folder / name) for name in (META, layout.METADATA))  # noqa: PTH113


def is_half_written(folder: Path) -> bool:
    """Return whether `folder` is named like a checkpoint of Lightning and has a part of one of DCP."""
    if folder.suffix != _SUFFIX or os.path.lexists(folder / layout.METADATA):
        return False
    return any(layout.is_data_file(path.name) for path in folder.iterdir())


def lightning_step_of(name: str) -> int | None:
    """Return the step in `name`, as in epoch=0-step=10.ckpt; None if it has none."""
    match = _STEP.search(name.removesuffix(_SUFFIX))
    return int(match[1]) if match else None


def contents_of(path: Path) -> Contents:
    """Return the contents of the file `path`, one object that is all of it; they name its folder. Raises OSError."""
    stored = StoredObject(item=Item(path.name, 0, path.lstat().st_size), is_file=True)
    return Contents(str(path.parent), {}, {"checkpoint": stored}, described_in=path.name)
