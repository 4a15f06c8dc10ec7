"""Weights that other software wrote, opened: which tensors there are, and where each is in the files.

A source is a safetensors file, a file of `torch.save`, or a folder of Hugging Face's with one file or several. Nothing
in it is run, and no tensor is read. Files may be links, as in the cache of Hugging Face's hub.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.format.chunk_runs import row_major_strides
from torchtitan_lite.checkpoint.format.contents import Chunk, Contents, Shape, StoredTensor
from torchtitan_lite.checkpoint.untrusted.safetensors_header import read_header
from torchtitan_lite.checkpoint.untrusted.saved_file import SavedFile
from torchtitan_lite.checkpoint.untrusted.stock_item import Layout
from torchtitan_lite.disk.plain_file import is_plain_name, read_plain
from torchtitan_lite.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, reading
from torchtitan_lite.examining.tensor_stream import TensorStream, is_row_major
from torchtitan_lite.log import listed
from torchtitan_lite.store import layout

SAFETENSORS = ".safetensors"
SAVED = (".pt", ".pth", ".bin", ".ckpt")
"""Suffixes of files of `torch.save`."""
CONFIG = "config.json"
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_INDEXES = tuple(f"{name}.index.json" for name in _SINGLE)
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_ZERO = "zero_pp_rank_"
"""How the names of files of DeepSpeed's ZeRO-3 begin."""
_MOST_JSON_BYTES = 64 << 20
_MOST_SHARED = 16
"""How many times the bytes of its file the tensors of one may have: tied weights share theirs."""


@dataclass(frozen=True)
class WeightsSource:
    """The weights at `path`."""

    path: Path
    kind: str
    """What it is, in words."""
    contents: Contents
    """Its tensors, by their names there; the files in it are absolute paths."""
    strides: Mapping[str, Shape] = field(default_factory=dict)
    """Of tensors that are not row-major in their file."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What its config.json holds; empty without one."""
    notes: Sequence[str] = ()
    """Facts about it that its user should see."""

    def stream(self) -> TensorStream:
        """Return what reads its tensors."""
        return TensorStream(self.path, self.contents, {}, self.strides)


def open_source(path: Path) -> WeightsSource:
    """Return the weights at `path`, a file or a folder.

    Raises CheckpointNotFound, ConfigError if it is something else, CheckpointDamaged, CheckpointUnsafe and
    CheckpointUnreadable.
    """
    with reading(path):
        if path.is_dir():
            return _source_of_folder(path)
        if path.exists():
            return _source_of_file(path)
    raise CheckpointNotFound(str(path), None, finding="it does not exist; a name on a hub is not downloaded")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in the JSON file `path`. Raises CheckpointDamaged, CheckpointUnsafe and OSError."""
    try:
        document = json.loads(read_plain(path.resolve(), _MOST_JSON_BYTES))
        if not isinstance(document, dict):
            raise ValueError(f"expected an object, found {type(document).__name__}")
        return document
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(str(path), f"it is not JSON as expected: {error!s:.200}") from None


def _source_of_file(path: Path) -> WeightsSource:
    if path.name in (layout.METADATA, layout.MANIFEST) or layout.is_data_file(path.name):
        raise ConfigError(f"{path} is a file of a checkpoint: {_name_the_checkpoint(path.parent)}")
    if path.name in _ADAPTERS:
        raise _adapter(path.parent)
    if path.suffix == SAFETENSORS:
        return _joined_source(path, "a safetensors file", [path])
    if path.suffix in SAVED:
        return _joined_source(path, "a file of torch.save", [path])
    expected = ", ".join((SAFETENSORS, *SAVED))
    raise ConfigError(f"{path} is no file of weights that is known: expected a folder with them, or one of {expected}")


def _source_of_folder(path: Path) -> WeightsSource:
    names = sorted(entry.name for entry in path.iterdir())
    if layout.METADATA in names:
        raise ConfigError(f"{path} is a checkpoint already: {_name_the_checkpoint(path)}")
    for single, index in zip(_SINGLE, _INDEXES, strict=True):
        if index in names:
            return _joined_source(path, "a folder of Hugging Face's", _indexed_files(path, index, names))
        if single in names:
            return _joined_source(path, "a folder of Hugging Face's", [path / single])
    if any(name in names for name in _ADAPTERS):
        raise _adapter(path)
    files = [name for name in names if name.endswith((SAFETENSORS, *SAVED))]
    if any(name.startswith(_ZERO) for name in files):
        raise ConfigError(f"{path} is {FROM_DEEPSPEED}")
    if len(files) == 1:
        return _joined_source(path, "a folder of weights", [path / files[0]])
    if files:
        raise ConfigError(f"{path} holds several files of weights and no index ({listed(files)}): name one of them")
    steps = {step: name for name in names if (step := layout.parse_step(name)) is not None}
    if steps:
        raise ConfigError(f"{path} holds checkpoints: {_name_the_checkpoint(path / steps[max(steps)])}")
    there = f"it has {listed(names)}" if names else "it is empty"
    raise CheckpointNotFound(
        str(path), None, finding=f"there are no weights in it: expected {', '.join(_SINGLE)} or an index; {there}"
    )


def _adapter(folder: Path) -> ConfigError:
    return ConfigError(
        f"{folder} holds an adapter of peft without its model. To train it on, make the model of your own loop by "
        f"PeftModel.from_pretrained(base, {str(folder)!r}, is_trainable=True), without an import; or merge the two by "
        "merge_and_unload, save the model and import that"
    )


def _name_the_checkpoint(folder: Path) -> str:
    return f"start a run from it with --checkpoint.initial_load_path={folder}, without initial_load_in_hf"


def _indexed_files(path: Path, index: str, names: Sequence[str]) -> list[Path]:
    """Return the files that the index names. Raise CheckpointDamaged if some are missing."""
    places = read_json(path / index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(type(file) is str for file in places.values()):
        raise CheckpointDamaged(str(path / index), "it has no weight_map of names to files")
    files = sorted({*places.values()})
    if odd := [file for file in files if not is_plain_name(file)]:
        raise CheckpointDamaged(str(path / index), f"{odd[0][:100]!r} is not the name of a file next to it")
    if missing := [file for file in files if file not in names]:
        finding = f"of the {len(files)} files in {index}, these are missing: {listed(missing)}. Download them"
        raise CheckpointDamaged(str(path), finding)
    return [path / file for file in files]


def _joined_source(path: Path, kind: str, files: Sequence[Path]) -> WeightsSource:
    """Return the tensors of all `files` as one source. Raises CheckpointDamaged if two have the same name."""
    tensors: dict[str, StoredTensor] = {}
    strides: dict[str, Shape] = {}
    sizes: dict[str, int] = {}
    notes: list[str] = []
    for file in files:
        real = str(file.resolve())
        found, note = tensors_in_file(file)
        notes += [note] if note else []
        sizes[real] = file.stat().st_size * (1 if file.suffix == SAFETENSORS else _MOST_SHARED)
        for name, place in found.items():
            if name in tensors:
                raise CheckpointDamaged(str(path), f"{name[:100]} is in two files, one of them {file.name}")
            chunk = Chunk(real, place.at, (0,) * len(place.shape), place.shape)
            tensors[name] = StoredTensor(place.dtype, place.shape, [chunk])
            if is_strided(place):
                strides[name] = place.strides
    contents = Contents(str(path), tensors, {}, described_in=files[0].name if len(files) == 1 else "an index")
    contents.check(sizes)
    config = (path if path.is_dir() else path.parent) / CONFIG
    return WeightsSource(path, kind, contents, strides, read_json(config) if config.is_file() else {}, notes)


def tensors_in_file(file: Path) -> tuple[Mapping[str, Layout], str]:
    """Return the place of each tensor in `file`, by name, and a fact about them that its user should see, or ""."""
    if file.suffix == SAFETENSORS:
        held = read_header(file).items()
        return {name: Layout(at, dtype, shape, row_major_strides(shape)) for name, (dtype, shape, at) in held}, ""
    tensors, entry = _tensors_of_torch(file)
    return tensors, f"the weights are the entry {entry!r} of {file.name}" if entry else ""


def is_strided(place: Layout) -> bool:
    """Return whether the elements of a tensor are in another order than row-major in its file."""
    return 0 not in place.shape and not is_row_major(place.shape, place.strides)


_USUAL = ("state_dict", "model_state_dict", "model", "module")
"""Names under which trainers save the model."""
_SHAPES = "param_shapes"
"""In DeepSpeed's files: the shape of each parameter. With ZeRO-3 the parameters next to it are empty."""
FROM_DEEPSPEED = (
    "a part of a checkpoint of DeepSpeed's ZeRO, whose weights are cut over all files: run the zero_to_fp32.py that "
    "DeepSpeed left next to it, and import what that writes"
)


def _tensors_of_torch(path: Path) -> tuple[Mapping[str, Layout], str]:
    """Return the tensors of the state dict in the file `path`, and the entry that it is; "" if it is all of the file.

    Raises ConfigError, with what is there, if it holds no state dict or several, and what `SavedFile` raises.
    """
    file = SavedFile(path)
    root = file.mapping(file.root)
    if root is None:
        what = "one tensor" if file.layout(file.root) is not None else "no mapping of names to tensors"
        raise ConfigError(f"{path} holds {what}: save model.state_dict() with torch.save")
    inner = {name: found for name, value in root.items() if (found := _tensors_in_mapping(file, value))}
    usual = [name for name in _USUAL if name in inner]
    direct = _tensors_in_mapping(file, root)
    if len(usual) == 1 or (not direct and len(inner) == 1):
        entry = usual[0] if usual else next(iter(inner))
        if _SHAPES in root and any(0 in place.shape for place in inner[entry].values()):
            raise ConfigError(f"{path} is {FROM_DEEPSPEED}")
        _refuse_others(path, file, file.mapping(root[entry]) or {}, entry)
        return inner[entry], entry
    if direct and not usual:
        _refuse_others(path, file, root, "")
        return direct, ""
    there = ", ".join(map(repr, list(inner or root)[:8])) or "nothing"
    what = "several groups of tensors" if inner else "no tensors"
    raise ConfigError(f"{path} holds {what} ({there}): save the state dict of the model alone with torch.save")


def _tensors_in_mapping(file: SavedFile, value: Any) -> dict[str, Layout]:
    entries = file.mapping(value) or {}
    return {name: found for name, each in entries.items() if (found := file.layout(each)) is not None}


def _refuse_others(path: Path, file: SavedFile, entries: Mapping[str, Any], entry: str) -> None:
    """Raise ConfigError if some of `entries` are no tensors; settings next to a bare state dict are among them."""
    others = [name for name, value in entries.items() if file.layout(value) is None and value is not None]
    if others:
        where = f"{path}, {entry!r}" if entry else str(path)
        how = "save a state dict without them with torch.save"
        raise ConfigError(f"{where}: no plain tensors: {listed(others)}; {how}")
