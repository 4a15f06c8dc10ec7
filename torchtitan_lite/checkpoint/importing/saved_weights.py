"""The weights in a file of `torch.save`: a state dict, alone or as one entry of what a trainer saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.untrusted.saved_file import SavedFile
from torchtitan_lite.checkpoint.untrusted.stock_item import Layout
from torchtitan_lite.errors import ConfigError

_USUAL = ("state_dict", "model_state_dict", "model", "module")
"""Names under which trainers save the model."""
_SHAPES = "param_shapes"
"""In DeepSpeed's files: the shape of each parameter. With ZeRO-3 the parameters next to it are empty."""
FROM_DEEPSPEED = (
    "a part of a checkpoint of DeepSpeed's ZeRO, whose weights are cut over all files: run the zero_to_fp32.py that "
    "DeepSpeed left next to it, and import what that writes"
)


class Saved(NamedTuple):
    """The tensors of a state dict, and the entry of the file that it is; "" if it is all of the file."""

    tensors: Mapping[str, Layout]
    entry: str = ""


def read_saved(path: Path) -> Saved:
    """Return the weights in the file `path`.

    Raises ConfigError, with what is there, if it holds no state dict or several, and what `SavedFile` raises.
    """
    file = SavedFile(path)
    root = file.mapping(file.root)
    if root is None:
        what = "one tensor" if file.layout(file.root) is not None else "no mapping of names to tensors"
        raise ConfigError(f"{path} holds {what}: save model.state_dict() with torch.save")
    inner = {name: found for name, value in root.items() if (found := _tensors(file, value))}
    usual = [name for name in _USUAL if name in inner]
    direct = _tensors(file, root)
    if len(usual) == 1 or (not direct and len(inner) == 1):
        entry = usual[0] if usual else next(iter(inner))
        if _SHAPES in root and any(0 in place.shape for place in inner[entry].values()):
            raise ConfigError(f"{path} is {FROM_DEEPSPEED}")
        _refuse_others(path, file, file.mapping(root[entry]) or {}, entry)
        return Saved(inner[entry], entry)
    if direct and not usual:
        _refuse_others(path, file, root, "")
        return Saved(direct)
    there = ", ".join(map(repr, list(inner or root)[:8])) or "nothing"
    what = "several groups of tensors" if inner else "no tensors"
    raise ConfigError(f"{path} holds {what} ({there}): save the state dict of the model alone with torch.save")


def _tensors(file: SavedFile, value: Any) -> dict[str, Layout]:
    entries = file.mapping(value) or {}
    return {name: found for name, each in entries.items() if (found := file.layout(each)) is not None}


def _refuse_others(path: Path, file: SavedFile, entries: Mapping[str, Any], entry: str) -> None:
    """Raise ConfigError if some of `entries` are no tensors; settings next to a bare state dict are among them."""
    others = [name for name, value in entries.items() if file.layout(value) is None and value is not None]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        where = f"{path}, {entry!r}" if entry else str(path)
        raise ConfigError(
            f"{where}: no plain tensors: {', '.join(others[:3])}{more}; save a state dict without them with torch.save"
        )
