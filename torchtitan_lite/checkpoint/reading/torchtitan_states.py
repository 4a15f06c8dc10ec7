"""Convert the small states of torchtitan's checkpoints to this package's own.

It knows two layouts: that of November 2024 (loss lists as `BytesIO`, a complete `LambdaLR`) and that of
torchtitan 0.3 (plain numbers, `last_epoch` only). Model and optimizer need no conversion: they have the same
names. The position of torchtitan's dataloader is pickled for a loader that this package does not have, so
it is not read, and the data begin from their start. All other states are returned as they were read.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import torch

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.checkpoint.state.stateful import NUMBER, Stateful
from torchtitan_lite.checkpoint.untrusted.safe_load import UnsafeItem, load_item
from torchtitan_lite.errors import CheckpointUnsafe

_LOADER = "dataloader"
_LOADER_OF_RANK = "dp_rank_"
"""The key prefix of each data-parallel rank's position in torchtitan's dataloader state."""
_LISTS = {"log_steps": torch.int64, "global_avg_losses": torch.float64, "global_max_losses": torch.float64}


def why_it_begins_fresh(name: str, state: Stateful, contents: Contents) -> str:
    """Return why a load of the complete checkpoint does not restore `state`; the empty string if it does."""
    has_own = name == _LOADER and any(str(key).startswith(_LOADER_OF_RANK) for key in state.state_dict())
    if name == _LOADER and not has_own and any(_positions(contents)):
        return "dataloader: its state is torchtitan's, and not read: the data begin from their start"
    if any(key.startswith(f"{name}.") for key in contents):
        return ""
    if isinstance(state, torch.amp.GradScaler) and state.is_enabled():
        return f"{name}: not in the checkpoint, which was saved without a gradient scaler: a fresh one begins"
    if name == _LOADER and not state.state_dict():
        return "dataloader: it has no state, here and in the checkpoint: the data begin from their start"
    return ""


def as_own_state(name: str, read: State, own: State, stored: StoredCheckpoint) -> State:
    """Return the state `name`, as it was `read`, with the entries of the run's `own` state. **Collective**."""
    if name == "train_state" and {"n_tokens_seen", *_LISTS} <= own.keys() and "n_tokens_seen" not in read:
        return _train_state(read, own, stored)
    if name == "lr_scheduler" and "last_epoch" in read and "last_epoch" in own and own.keys() - read.keys() - {NUMBER}:
        return _schedule(read, own, stored)
    return read


def _train_state(read: State, own: State, stored: StoredCheckpoint) -> State:
    """Return torchtitan's `train_state` as ours.

    Each data-parallel rank of torchtitan counts its own tokens, so the total is that count times their number. Loss
    lists that the checkpoint does not have stay the run's own.
    """
    tokens = int(read.get("ntokens_seen", 0)) * max(1, sum(1 for _ in _positions(stored.contents)))
    lists = {
        key: torch.tensor(_saved_numbers(key, read[key], stored), dtype=dtype, device="cpu")
        for key, dtype in _LISTS.items()
        if key in read
    }
    numbers = {"step": int(read["step"]), "n_tokens_seen": tokens}
    counters = {key: torch.tensor(number, device="cpu") for key, number in numbers.items()}
    return own | counters | lists


def _schedule(read: State, own: State, stored: StoredCheckpoint) -> State:
    """Return torchtitan's `lr_scheduler` as ours: entries that it lacks are the run's, or follow from the step."""
    state = own | {"_step_count": int(read["last_epoch"]) + 1} | read
    if "_last_lr" not in read and "_last_lr" in own:
        keys = [key for key in stored.keys("optimizer.param_groups.") if key.endswith(".lr")]
        rates = {*stored.read_objects([key for key in keys if key in stored.contents.objects]).values()}
        # The scheduler's next step replaces it; until then it is what the logs show.
        state["_last_lr"] = [*rates] * len(own["_last_lr"]) if len(rates) == 1 else own["_last_lr"]
    return state


def _saved_numbers(key: str, held: Any, stored: StoredCheckpoint) -> list[Any]:
    """Return the list of numbers that torchtitan saved with torch.save into a `BytesIO`, or plainly."""
    try:
        numbers = load_item(held.getvalue()) if isinstance(held, io.BytesIO) else held
    except UnsafeItem as error:
        raise CheckpointUnsafe(str(stored.path), f"train_state.{key}: {error}") from None
    if not isinstance(numbers, list) or not all(type(number) in (int, float) for number in numbers):
        raise CheckpointUnsafe(str(stored.path), f"train_state.{key} is not a list of numbers")
    return numbers


def _positions(contents: Contents) -> Iterable[str]:
    return (key for key in contents.objects if key.startswith(f"{_LOADER}.{_LOADER_OF_RANK}"))
