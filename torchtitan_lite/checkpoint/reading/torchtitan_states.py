"""The small states of torchtitan's checkpoints, as this package's own have them.

Two layouts are known: that of November 2024 (loss lists as `BytesIO`, a whole `LambdaLR`) and that of
torchtitan 0.3 (plain numbers, `last_epoch` alone). Model and optimizer need nothing: they are found
under their names. A dataloader's position is pickled for a loader that is not here; it is not read,
and the data begin from their start. States that are not torchtitan's are returned as they were read.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import torch

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.checkpoint.state.stateful import Stateful
from torchtitan_lite.checkpoint.untrusted.safe_load import UnsafeItem, load_item
from torchtitan_lite.errors import CheckpointUnsafe

State = dict[str, Any]

_LOADER = "dataloader"
_LOADER_OF_RANK = "dp_rank_"
"""What torchtitan's dataloader calls the position of each data-parallel rank."""
_LISTS = {"log_steps": torch.int64, "global_avg_losses": torch.float64, "global_max_losses": torch.float64}


def why_it_begins_fresh(name: str, state: Stateful, contents: Contents) -> str:
    """Return why the run's `state` is not taken from the checkpoint though it is loaded whole; empty if it is."""
    if name == _LOADER and _is_of_torchtitan(contents) and not _has_positions(state.state_dict()):
        return "dataloader: its state is torchtitan's, and not read: the data begin from their start"
    if any(key.startswith(f"{name}.") for key in contents):
        return ""
    if isinstance(state, torch.amp.GradScaler):
        return f"{name}: not in the checkpoint, which was saved without a gradient scaler: a fresh one begins"
    if name == _LOADER and not state.state_dict():
        return "dataloader: it has no state, here and in the checkpoint: the data begin from their start"
    return ""


def as_ours(name: str, read: State, own: State, stored: StoredCheckpoint) -> State:
    """Return the state `name`, which was `read`, with the entries that `own`, the run's, has. **Collective**."""
    if name == "train_state" and {"n_tokens_seen", *_LISTS} <= own.keys() and "n_tokens_seen" not in read:
        return _train_state(read, own, stored)
    if name == "lr_scheduler" and "last_epoch" in read and "last_epoch" in own and own.keys() - read.keys():
        return _schedule(read, own, stored)
    return read


def _train_state(read: State, own: State, stored: StoredCheckpoint) -> State:
    """Each rank of torchtitan counts its own tokens; losses are there where they were saved."""
    tokens = int(read.get("ntokens_seen", 0)) * max(1, sum(1 for _ in _positions(stored.contents)))
    lists = {
        key: torch.tensor(_numbers(key, read[key], stored), dtype=dtype, device="cpu")
        for key, dtype in _LISTS.items()
        if key in read
    }
    counters = {"step": torch.tensor(int(read["step"]), device="cpu"), "n_tokens_seen": torch.tensor(tokens)}
    return own | counters | lists


def _schedule(read: State, own: State, stored: StoredCheckpoint) -> State:
    """What is not in the checkpoint is as the run has it, but for what follows from the step."""
    state = own | {"_step_count": int(read["last_epoch"]) + 1} | read
    if "_last_lr" not in read and "_last_lr" in own:
        keys = [key for key in stored.keys("optimizer.param_groups.") if key.endswith(".lr")]
        rates = {*stored.read_objects([key for key in keys if key in stored.contents.objects]).values()}
        # The scheduler's own step sets it; until then it is shown.
        state["_last_lr"] = [*rates] * len(own["_last_lr"]) if len(rates) == 1 else own["_last_lr"]
    return state


def _numbers(key: str, held: Any, stored: StoredCheckpoint) -> list[Any]:
    """The list that torchtitan saved with torch.save into a `BytesIO`."""
    try:
        numbers = load_item(held.getvalue()) if isinstance(held, io.BytesIO) else held
    except UnsafeItem as error:
        raise CheckpointUnsafe(str(stored.path), f"train_state.{key}: {error}") from None
    if not isinstance(numbers, list) or not all(type(number) in (int, float) for number in numbers):
        raise CheckpointUnsafe(str(stored.path), f"train_state.{key} is no list of numbers")
    return numbers


def _is_of_torchtitan(contents: Contents) -> bool:
    return any(True for _ in _positions(contents))


def _positions(contents: Contents) -> Iterable[str]:
    return (key for key in contents.objects if key.startswith(f"{_LOADER}.{_LOADER_OF_RANK}"))


def _has_positions(state: State) -> bool:
    return any(str(key).startswith(_LOADER_OF_RANK) for key in state)
