"""Detect tensors that change while they are being staged.

The guard holds back optimizers; it cannot hold back other code (a thread that averages weights, a loader
that returns its live buffer). With "staging" in `checkpoint.digest_tensors` every tensor is digested before its
copy begins, and the copy when it is complete. A save for which the two differ fails and names the tensors,
instead of becoming a checkpoint that mixes two moments.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
import xxhash

from torchtitan_lite.checkpoint.format.file_data import FileData, copy_bytes
from torchtitan_lite.checkpoint.staging.stager import StagedCopy
from torchtitan_lite.config.job_config import Checkpoint

Compare = Callable[[StagedCopy], None]
"""Waits for the copy; raises RuntimeError if tensors changed meanwhile, and names them."""

StagingWatch = Callable[[FileData, Sequence[str]], Compare]
"""Called with a file and the names of its tensors, before they are staged."""

_PIECE_BYTES = 4 << 20


def watch(data: FileData, names: Sequence[str]) -> Compare:
    """Digest every tensor now, and return a function that compares the staged copies with these digests."""
    before = [_memory_digest(tensor) for tensor in data.tensors]

    def compare(staged: StagedCopy) -> None:
        staged.wait()
        after = [_memory_digest(tensor) for tensor in staged.tensors()]
        changed = [name for name, one, other in zip(names, before, after, strict=True) if one != other]
        if changed:
            more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
            raise RuntimeError(
                f"{', '.join(changed[:5])}{more} changed while being staged. Code that changes them must first call "
                "maybe_wait_for_staging() of the checkpoint manager"
            )

    return compare


def _do_not_watch(data: FileData, names: Sequence[str]) -> Compare:
    return lambda staged: staged.wait()


DO_NOT_WATCH: StagingWatch = _do_not_watch


def build_staging_watch(config: Checkpoint) -> StagingWatch:
    """Return `watch` if `digest_tensors` asks for it, else `DO_NOT_WATCH`."""
    return watch if "staging" in config.digest_tensors else DO_NOT_WATCH


def _memory_digest(tensor: torch.Tensor) -> int:
    state = xxhash.xxh3_64()
    num_bytes = tensor.numel() * tensor.element_size()
    buffer = bytearray(min(num_bytes, _PIECE_BYTES))
    for begin in range(0, num_bytes, _PIECE_BYTES):
        end = min(begin + _PIECE_BYTES, num_bytes)
        copy_bytes(tensor, begin, end, ctypes.addressof(ctypes.c_char.from_buffer(buffer)))
        state.update(memoryview(buffer)[: end - begin])
    return state.intdigest()
