"""The form that a loader's state has in a checkpoint if it differs between ranks.

Such a state fits only the same rank of the same number of ranks. Its key contains the rank, and its value is JSON in a
tensor of bytes: a copy that later steps do not change, and that needs no pickle. Ranks here are data-parallel ranks;
those that take the same data hold the same state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from torchtitan_lite.errors import ConfigError

TENSOR, TUPLE, PAIRS = "__tensor__", "__tuple__", "__pairs__"
"""Keys of what JSON has no form for; the last one is of a dict that has one of these keys itself."""
RESTART_DATA = "start the data from the beginning with --checkpoint.exclude_from_loading=dataloader"


def pack(state: object, *, rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
    """Return `state` of `rank` as tensors. Raise ConfigError if it holds more than JSON, tuples and tensors."""
    text = json.dumps(_plain_state(state, "state"))
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return {"num_ranks": torch.tensor(num_ranks, dtype=torch.int64, device="cpu"), f"rank{rank}": data}


def unpack(packed: Mapping[str, Any], *, rank: int, num_ranks: int) -> Any:
    """Return the state that `pack` was given on `rank`. Raise ConfigError if another number of ranks packed it."""
    if "num_ranks" not in packed:
        raise ConfigError(
            f"dataloader: the checkpoint was made with another kind of loader. Use that one, or {RESTART_DATA}."
        )
    saved = int(packed["num_ranks"])
    if saved != num_ranks:
        raise ConfigError(
            f"dataloader: its state is one for each of {saved} data-parallel ranks and does not fit {num_ranks}. "
            f"Resume on {saved} data-parallel ranks, or {RESTART_DATA}."
        )
    return json.loads(bytes(packed[f"rank{rank}"].tolist()), object_hook=_restored)


def _plain_state(value: object, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_plain_state(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {TUPLE: _plain_state(list(value), where)}
    if isinstance(value, torch.Tensor):
        return {TENSOR: value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        plain = {key: _plain_state(item, f"{where}.{key}") for key, item in value.items()}
        return {PAIRS: [*map(list, plain.items())]} if plain.keys() & {TUPLE, TENSOR, PAIRS} else plain
    raise ConfigError(
        f"dataloader: {where} is a {type(value).__name__}, which a checkpoint cannot hold without pickle. "
        "Let the dataset's state_dict return numbers, strings, lists, dicts with strings as keys, and tensors."
    )


def _restored(value: dict[str, Any]) -> Any:
    if PAIRS in value:
        return dict(value[PAIRS])
    if TUPLE in value:
        return tuple(value[TUPLE])
    if TENSOR in value:
        return torch.tensor(value[TENSOR], dtype=getattr(torch, value["dtype"]), device="cpu")
    return value
