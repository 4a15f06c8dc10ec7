"""A dict of tensors as one file of `torch.save`, written without holding a tensor.

The file is a zip archive with stored entries: a pickle of the dict, in which each tensor refers to an entry, and one
entry for the elements of each tensor, from a multiple of 64 bytes on. As in the items of a checkpoint, the CRC of those
is 0, which torch does not check. `torch.load(weights_only=True)` reads it, also with `mmap=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from torchtitan_lite.checkpoint.format.dtypes import dtype_name
from torchtitan_lite.checkpoint.format.torch_contents import DTYPES
from torchtitan_lite.checkpoint.format.torch_item import Archive, pickled, tensor_call
from torchtitan_lite.converting.streamed_file import Advance, NewTensor, Part, read_back, write_new
from torchtitan_lite.errors import TorchtitanLiteError
from torchtitan_lite.examining.tensor_stream import TensorStream


def write_state(path: Path, state: Mapping[str, Any], stream: TensorStream, advance: Advance) -> None:
    """Write `state`, nested containers of `NewTensor` and plain objects, to the file `path`, and check it."""
    tensors: list[NewTensor] = []

    def call(tensor: NewTensor) -> Any:
        tensors.append(tensor)
        return tensor_call(DTYPES[tensor.dtype], tensor.shape, len(tensors) - 1)

    archive = Archive(pickled(_remade(state, call, lambda value: value)))
    parts: list[Part] = []
    begin = 0
    for number, tensor in enumerate(tensors):
        archive.announce(f"data/{number}", tensor.num_bytes)
        parts += [bytes(archive.data[begin:]), tensor]
        begin = len(archive.data)
    parts.append(bytes(archive.data[begin:]) + archive.directory())
    record = write_new(path, parts, stream, advance)
    _check_torch_file(path, state)
    read_back(path, record, stream.reader, advance)


def _check_torch_file(path: Path, state: Mapping[str, Any]) -> None:
    """Raise unless torch loads the same names, shapes and dtypes from the file. Reads no elements."""
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise TorchtitanLiteError(f"{path.name} was written, but torch does not load it: {error}") from None
    expected, found = (_remade(each, lambda t: (dtype_name(t.dtype), tuple(t.shape)), type) for each in (state, loaded))
    if expected != found:
        raise TorchtitanLiteError(f"{path.name} was written, but torch loads something else from it")


def _remade(value: Any, of_tensor: Callable[[Any], Any], of_other: Callable[[Any], Any]) -> Any:
    """Return the nested containers in `value` with what the functions return for all else."""
    if isinstance(value, NewTensor | torch.Tensor):
        return of_tensor(value)
    if type(value) is list:
        return [_remade(item, of_tensor, of_other) for item in value]
    if type(value) is dict:
        return {key: _remade(item, of_tensor, of_other) for key, item in value.items()}
    return of_other(value)
