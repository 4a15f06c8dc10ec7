"""The weights of a checkpoint in another format, in a file or a folder: streamed, checked, there only when complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.checkpoint.format.structure import FORM
from torchtitan_lite.checkpoint.format.structure import Path as KeyPath
from torchtitan_lite.converting import new_output, safetensors_files
from torchtitan_lite.converting.model_part import ModelKey, chosen, model_keys
from torchtitan_lite.converting.new_output import NewOutput
from torchtitan_lite.converting.streamed_file import Advance, NewTensor
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.examining.opened import OF_HUGGING_FACE, OpenedCheckpoint, WrittenBy
from torchtitan_lite.examining.other_libraries import WEIGHTS
from torchtitan_lite.examining.tensor_stream import TensorStream

if TYPE_CHECKING:
    from torchtitan_lite.checkpoint.reading.entries import Leaf
    from torchtitan_lite.converting.layouts import Reader

Format = Literal["safetensors", "torch", "dcp"]
Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Begins to show progress: called with what is done, and the bytes to do."""


def export(
    opened: OpenedCheckpoint,
    out: Path,
    progress: Progress,
    format: Format,
    dtype: str = "",
    max_shard_bytes: int | None = None,
    include: str = "",
    exclude: str = "",
) -> NewOutput:
    """Write the weights of `opened` to `out`, which must not exist; floating tensors as `dtype`, "" as each is.

    Raises ConfigError before anything is written if this does not fit the checkpoint, what the stream raises for a
    checkpoint that is damaged or cannot be read, and OSError. Whatever it raises, `out` is not there then.
    """
    contents = opened.contents
    keys = chosen(model_keys(contents, opened.manifest), include, exclude)
    tensors = [each for each in keys if each.key in contents.tensors]
    total = sum(NewTensor.of(contents, each.key, dtype).num_bytes for each in tensors)
    label = f"Exporting to {out.name}"
    if format == "safetensors":
        stream = TensorStream(opened.folder, contents, opened.records)
        with progress(label, 2 * total) as advance:
            return NewOutput(_to_safetensors(keys, out, dtype, max_shard_bytes, stream, advance), len(tensors), total)
    # It imports torch, which takes seconds, which are not to be seen as slow progress.
    from torchtitan_lite.converting.layouts import Reader

    write, reader = _to_torch if format == "torch" else _to_dcp, Reader(opened)
    with progress(label, 2 * total) as advance:
        return NewOutput(write(reader, keys, out, dtype, max_shard_bytes, advance), len(tensors), total)


def _to_safetensors(
    keys: Sequence[ModelKey], out: Path, dtype: str, most_bytes: int | None, stream: TensorStream, advance: Advance
) -> list[str]:
    safetensors_files.require_library()
    contents = stream.contents
    forms = {each.name: str(contents.objects[each.key].value) for each in keys if each.key.endswith(f".{FORM}")}
    objects = [each.name for each in keys if each.key in contents.objects and each.name not in forms]
    if objects:
        raise ConfigError(
            f"{objects[0]} is no tensor, and safetensors holds only tensors: use --format torch or dcp, or leave it "
            f"out with --exclude {objects[0]!r}"
        )
    names = {each.key: each.name for each in keys if each.key in contents.tensors}
    tensors = new_tensors(contents, names, dtype)
    if out.suffix == safetensors_files.SUFFIX:
        if most_bytes is not None:
            raise ConfigError(f"{out} is one file, and --max-shard-size makes several: name a folder as OUT")
        with new_output.new_file(out) as path:
            safetensors_files.write_file(path, tensors, stream, advance, forms)
        return [out.name]
    most = most_bytes or safetensors_files.SHARD_BYTES
    with new_output.new_folder(out) as folder:
        return safetensors_files.write_folder(folder, tensors, most, stream, advance, forms)


def _to_torch(
    reader: Reader, keys: Sequence[ModelKey], out: Path, dtype: str, most_bytes: int | None, advance: Advance
) -> list[str]:
    from torchtitan_lite.checkpoint.reading.entries import Leaf
    from torchtitan_lite.converting.torch_file import write_state

    if most_bytes is not None:
        raise ConfigError("--max-shard-size is for safetensors and dcp: torch.save makes one file")
    contents = reader.contents
    values: dict[str, Any] = {}
    leaves: dict[str, list[Leaf]] = {}
    for each in keys:
        if each.key in contents.tensors:
            values[each.key] = NewTensor.of(contents, each.key, dtype)
        else:
            values[each.key] = reader.value(each.key)
        leaves.setdefault(str(each.path[0]), []).append(Leaf(each.key, each.path[1:]))
    state = {name: _model_entry(contents, name, of_name, values) for name, of_name in leaves.items()}
    with new_output.new_file(out) as path:
        write_state(path, state, reader.stream, advance)
    return [out.name]


def _model_entry(contents: Contents, name: str, leaves: Sequence[Leaf], values: Mapping[str, Any]) -> Any:
    """Return the model's entry `name`, made of `leaves`: usually one tensor."""
    from torchtitan_lite.checkpoint.reading.entries import assembled_entry

    below = ".".join(map(str, leaves[0].path))
    key = leaves[0].key.removesuffix(f".{below}") if below else leaves[0].key
    try:
        return assembled_entry(contents, key, leaves, values)
    except KeyError:
        raise ConfigError(f"--include and --exclude take a part of {name}: take all of it, or nothing") from None


def _to_dcp(
    reader: Reader, keys: Sequence[ModelKey], out: Path, dtype: str, most_bytes: int | None, advance: Advance
) -> list[str]:
    from torchtitan_lite.converting.dcp_folder import write_checkpoint
    from torchtitan_lite.converting.layouts import as_weights

    state = as_weights(reader, keys, dtype)
    total = sum(tensor.num_bytes for tensor in state.tensors.values())
    num_files = -(-total // most_bytes) if most_bytes else 1
    with new_output.new_folder(out) as folder:
        written = write_checkpoint(folder, state, max(num_files, 1), reader.stream, advance)
    return [*written.files]


def new_tensors(contents: Contents, names: Mapping[str, str], dtype: str) -> dict[str, NewTensor]:
    """Return the tensors to write: of each key in `names`, under its name.

    Raises ConfigError for an odd dtype, and for two of one name.
    """
    by_name = {name: key for key, name in names.items()}
    if twice := [(key, name) for key, name in names.items() if by_name[name] != key]:
        key, name = twice[0]
        raise ConfigError(f"{key} and {by_name[name]} would both be {name}: give each a name of its own there")
    tensors = {name: NewTensor.of(contents, key, dtype) for key, name in names.items()}
    safetensors_files.refuse_dtypes(tensors)
    return tensors


# The weights in a checkpoint of transformers, accelerate or Lightning, as far as they can be read without a pickle.
#
# Their names are the model's own: those in the safetensors files, or below `state_dict` in Lightning's folders of DCP.


_LIGHTNING_MODEL = "state_dict"


def weights_alone(opened: OpenedCheckpoint) -> OpenedCheckpoint:
    """Return `opened` with nothing but weights if one of these libraries wrote it, and unchanged otherwise.

    Raises ConfigError where they are in a pickle, or in a folder below.
    """
    contents, folder = opened.contents, opened.folder
    if opened.origin is WrittenBy.LIGHTNING:
        if folder.is_file():
            raise _in_pickle(opened, folder.name)
        paths = {key: contents.paths.get(key, (key,)) for key in contents}
        below = {key: path[1:] for key, path in paths.items() if path[0] == _LIGHTNING_MODEL and len(path) > 1}
        return _only(opened, below)
    if opened.origin in OF_HUGGING_FACE:
        bare = [key for key, tensor in contents.tensors.items() if not any(chunk.item for chunk in tensor.chunks)]
        if bare:
            return _only(opened, {key: (key,) for key in bare})
        if folders := sorted({file.partition("/")[0] for file in contents.files if "/" in file}):
            names = " and ".join(folders)
            raise ConfigError(f"{folder} has its tensors in {names}: name the folder with the weights, as STEP")
        pickled = sorted(filter(WEIGHTS.fullmatch, contents.files))
        raise _in_pickle(opened, pickled[0] if pickled else "no safetensors file")
    return opened


def _only(opened: OpenedCheckpoint, paths: dict[str, KeyPath]) -> OpenedCheckpoint:
    """Return `opened` with the keys in `paths`, which are their paths in the state of the model."""
    contents = dataclasses.replace(
        opened.contents,
        tensors={key: tensor for key, tensor in opened.contents.tensors.items() if key in paths},
        objects={key: stored for key, stored in opened.contents.objects.items() if key in paths},
        paths=paths,
    )
    return dataclasses.replace(opened, contents=contents)


def _in_pickle(opened: OpenedCheckpoint, name: str) -> ConfigError:
    return ConfigError(
        f"{opened.folder}: expected weights in safetensors files or a folder of DCP, found {name}, and export reads no "
        "pickle: try import-weights, which takes plain tensors out of one without running it"
    )
