"""Weights as safetensors: one file, or several with an index.

The header is written here by the format's specification: 8 bytes with its length, JSON with the place of each tensor,
and the elements without gaps. Tensors with the largest elements come first, so that all of them are aligned. The
library is needed only to check the result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchtitan_lite.checkpoint.format import dtypes
from torchtitan_lite.checkpoint.untrusted.safetensors_header import NAMES
from torchtitan_lite.converting.streamed_file import Advance, NewTensor, read_back, write_new
from torchtitan_lite.disk.durable import DISK
from torchtitan_lite.errors import ConfigError, ExtraMissing, TorchtitanLiteError
from torchtitan_lite.examining.tensor_stream import TensorStream
from torchtitan_lite.log import listed

DTYPES = {ours: name for name, ours in NAMES.items() if name not in ("F8_E8M0", "C64")}
"""The format's name of each dtype that every version of the library since 0.4 reads."""

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
SHARD_BYTES = 5_000_000_000
"""The largest file, unless the caller wants another size; what the libraries that read them use."""
_HEADER_GRAIN = 8
_MOST_HEADER_BYTES = 100_000_000
"""The library refuses more."""


def refuse_dtypes(tensors: Mapping[str, NewTensor]) -> None:
    """Raise ConfigError, naming the tensors, if the format lacks the dtype of some."""
    lacking = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in DTYPES]
    if lacking:
        raise ConfigError(
            f"safetensors has no such dtype: {listed(lacking)}; use --format torch or dcp, or leave them "
            "out with --exclude"
        )


def require_library() -> None:
    """Raise ExtraMissing if the library, which checks the result, is not installed."""
    try:
        import safetensors  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise ExtraMissing.of(error, "safetensors") from None


def sharded(tensors: Mapping[str, NewTensor], most_bytes: int) -> dict[str, dict[str, NewTensor]]:
    """Return the tensors of each file, by its name: at most `most_bytes` in each, or one larger tensor."""
    shards: list[dict[str, NewTensor]] = [{}]
    room = most_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.num_bytes > room:
            shards.append({})
            room = most_bytes
        shards[-1][name] = tensor
        room -= tensor.num_bytes
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{at:05}-of-{len(shards):05}{SUFFIX}": shard for at, shard in enumerate(shards, 1)}


def write_folder(
    folder: Path,
    tensors: Mapping[str, NewTensor],
    most_bytes: int,
    stream: TensorStream,
    advance: Advance,
    forms: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Write `tensors` into files in `folder`, and check them; return the names of these. `forms` as `write_file`."""
    shards = sharded(tensors, most_bytes)
    for name, shard in shards.items():
        write_file(folder / name, shard, stream, advance, forms)
    if len(shards) == 1:
        return [*shards]
    DISK.write_file(folder / INDEX, index_of(shards))
    return [*shards, INDEX]


def index_of(shards: Mapping[str, Mapping[str, NewTensor]]) -> bytes:
    """Return the contents of the index of `shards`, by the name of each file."""
    places = {name: file for file, shard in shards.items() for name in shard}
    size = sum(tensor.num_bytes for shard in shards.values() for tensor in shard.values())
    return (json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2) + "\n").encode()


def write_file(
    path: Path,
    tensors: Mapping[str, NewTensor],
    stream: TensorStream,
    advance: Advance,
    forms: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write `tensors` into the file `path`, and check it. Raises `TorchtitanLiteError` if the check fails.

    Its metadata have the `forms` of those that are made of others, as a checkpoint has them.
    """
    ordered = dict(sorted(tensors.items(), key=lambda named: (-dtypes.DTYPES[named[1].dtype].itemsize, named[0])))
    record = write_new(path, [_header(ordered, forms), *ordered.values()], stream, advance)
    _check_safetensors_file(path, tensors)
    read_back(path, record, stream.reader, advance)


def _header(tensors: Mapping[str, NewTensor], forms: Mapping[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **forms}}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.num_bytes
        table[name] = {"dtype": DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_GRAIN)
    if len(text) > _MOST_HEADER_BYTES:
        raise ConfigError(f"{len(tensors)} tensors are too many for one safetensors file: lower --max-shard-size")
    return len(text).to_bytes(8, "little") + text


def _check_safetensors_file(path: Path, expected: Mapping[str, NewTensor]) -> None:
    """Raise unless the library finds `expected` in the file. Reads no elements."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
            table = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in found.items()}
    except SafetensorError as error:
        raise TorchtitanLiteError(f"{path.name} was written, but safetensors does not open it: {error}") from None
    if table != {name: (DTYPES[tensor.dtype], tensor.shape) for name, tensor in expected.items()}:
        raise TorchtitanLiteError(f"{path.name} was written, but safetensors finds other tensors in it")
