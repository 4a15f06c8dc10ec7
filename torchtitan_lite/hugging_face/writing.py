"""A model in the files that Hugging Face's libraries load: planned, written, and there only when complete.

A plan names every file. `write_planned` writes them all; or several ranks each write some of the shards into one
folder, and the coordinator the rest:

    planned = plan(opened, model, name=out.name, dtype="bfloat16")       # any rank, the same on each
    with new_output.new_folder(out) as folder:                           # the coordinator
        write_shards(planned, folder, [*planned.shards][rank::ranks])    # any rank, into the coordinator's folder
        write_rest(planned, folder)                                      # the coordinator, after all of them

Every tensor is read, cast and reordered in slices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.converting import new_output, safetensors_files
from torchtitan_lite.converting.exporting import Progress, new_tensors
from torchtitan_lite.converting.model_part import ModelKey, model_keys
from torchtitan_lite.converting.new_output import NewOutput
from torchtitan_lite.converting.streamed_file import Advance, NewTensor
from torchtitan_lite.disk.durable import DISK
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.examining.opened import OpenedCheckpoint
from torchtitan_lite.examining.tensor_stream import TensorStream
from torchtitan_lite.hugging_face.model_card import model_card
from torchtitan_lite.hugging_face.model_files import DescribedModel
from torchtitan_lite.hugging_face.rotary_rows import ReorderedStream
from torchtitan_lite.log import listed
from torchtitan_lite.store.manifest_fields import json_bytes

CONFIG = "config.json"
CARD = "README.md"
_DTYPES = ("dtype", "torch_dtype")
"""The key of transformers 5, and that of 4."""


@dataclass(frozen=True)
class PlannedExport:
    """All files of an export."""

    shards: Mapping[str, Mapping[str, NewTensor]]
    """The tensors of each file of weights, by its name."""
    files: Mapping[str, bytes]
    """The contents of every other file."""
    stream: TensorStream
    left_out: Sequence[str] = ()
    """The names of trained tensors that the format has no place for."""

    @property
    def num_tensors(self) -> int:
        return sum(map(len, self.shards.values()))

    @property
    def num_bytes(self) -> int:
        """The bytes of all elements."""
        return sum(tensor.num_bytes for shard in self.shards.values() for tensor in shard.values())


def plan(
    opened: OpenedCheckpoint,
    model: DescribedModel,
    *,
    name: str,
    dtype: str = "",
    max_shard_bytes: int | None = None,
    of_trainer: bool = False,
) -> PlannedExport:
    """Return the files of the model in `opened`, for the folder `name`. Any rank; changes nothing.

    `dtype` is that of floating tensors; "" leaves each as it is. `of_trainer` says that the recorded configuration
    describes this model. Raises ConfigError if `model` has other tensors than `opened`, and ExtraMissing.
    """
    safetensors_files.require_library()
    contents = opened.contents
    keys = [each for each in model_keys(contents, opened.manifest) if each.name not in model.left_out]
    if finding := model_mismatch(model, contents, keys):
        raise ConfigError(f"{opened.folder} does not have the weights of the model that is described: {finding}")
    stream = stream_of(opened, model, keys)
    tensors = new_tensors(contents, {each.key: model.places[each.name].name for each in keys}, dtype)
    shards = safetensors_files.sharded(tensors, max_shard_bytes or safetensors_files.SHARD_BYTES)
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += math.prod(tensor.shape)
    # That of most elements: in it the libraries make the model.
    main = sizes.most_common(1)[0][0]
    config = {key: value for key, value in model.config.items() if key not in _DTYPES}
    card = model_card(name, opened, stream, model, tensor_summary(contents, keys, tensors), of_trainer=of_trainer)
    files = {CONFIG: json_bytes({**config, **dict.fromkeys(_DTYPES, main)}, indent=2), **model.files, CARD: card}
    if len(shards) > 1:
        files[safetensors_files.INDEX] = safetensors_files.index_of(shards)
    return PlannedExport(shards, files, stream)


def model_mismatch(model: DescribedModel, contents: Contents, keys: Sequence[ModelKey]) -> str:
    """Return, in a few words, where `keys` of `contents` are not the tensors of `model`; "" if they are."""
    found = {each.name: each.key for each in keys}
    missing = [name for name in model.places if name not in found]
    unexpected = [name for name in found if name not in model.places]
    findings = [f"missing {listed(missing)}"] if missing else []
    findings += [f"unexpected {listed(unexpected)}"] if unexpected else []
    for name, place in model.places.items():
        tensor = contents.tensors.get(found.get(name, ""))
        if name in found and tensor is None:
            findings.append(f"{name} is no tensor")
        elif tensor is not None and tensor.shape != place.shape:
            findings.append(f"{name} has shape {list(tensor.shape)}, expected {list(place.shape)}")
    return listed(findings, "; ")


def stream_of(opened: OpenedCheckpoint, model: DescribedModel, keys: Iterable[ModelKey]) -> TensorStream:
    """Return what reads the tensors of `opened` with their rows in the order of Hugging Face's."""
    head_dims = {each.key: model.places[each.name].rotary_head_dim for each in keys}
    turned = {key: head_dim for key, head_dim in head_dims.items() if head_dim is not None}
    return ReorderedStream(opened.folder, opened.contents, opened.records, {}, turned, "halves")


def tensor_summary(contents: Contents, keys: Iterable[ModelKey], tensors: Mapping[str, NewTensor]) -> dict[str, str]:
    """Return what the card says of the tensors: how many parameters, of which dtypes."""
    before = Counter(str(contents.tensors[each.key].dtype) for each in keys)
    after = Counter(tensor.dtype for tensor in tensors.values())
    stored = "" if before == after else f", cast from {' and '.join(before)}"
    return {
        "parameters": f"{sum(math.prod(tensor.shape) for tensor in tensors.values()):,}",
        "dtype": " and ".join(after) + stored,
    }


def write_planned(planned: PlannedExport, out: Path, progress: Progress) -> NewOutput:
    """Write all of `planned` to the folder `out`, which must not exist.

    Raises ConfigError if it does, what the stream raises for a checkpoint that is damaged or cannot be read, and
    OSError. Whatever it raises, `out` is not there then.
    """
    with (
        progress(f"Exporting to {out.name}", 2 * planned.num_bytes) as advance,
        new_output.new_folder(out) as folder,
    ):
        write_shards(planned, folder, planned.shards, advance)
        write_rest(planned, folder)
    return NewOutput([*planned.shards, *planned.files], planned.num_tensors, planned.num_bytes)


def write_shards(
    planned: PlannedExport, folder: Path, names: Iterable[str], advance: Advance = lambda num_bytes: None
) -> None:
    """Write the files of weights in `names` into `folder`, synced and read back. Any rank. Raises as the stream."""
    for name in names:
        safetensors_files.write_file(folder / name, planned.shards[name], planned.stream, advance)


def write_rest(planned: PlannedExport, folder: Path) -> None:
    """Write every file but those of weights into `folder`, synced. Raise OSError."""
    for name, content in planned.files.items():
        DISK.write_file(folder / name, content)
