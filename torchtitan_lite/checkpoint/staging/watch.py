"""Whether something changed while it was being staged.

The guard keeps optimizers from it; other code (an averaging of weights in a thread, a loader that
hands out its live buffer) is out of its reach. Who suspects such a thing switches the watch on: every
tensor is digested before its copy begins, the copy is digested when it is made, and a save for which
the two differ fails and names the tensors, instead of being a checkpoint of no moment.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
import xxhash

from torchtitan_lite.checkpoint.format.file_image import FileImage, copy_bytes
from torchtitan_lite.checkpoint.staging.stager import Staged
from torchtitan_lite.config.job_config import Checkpoint

Compare = Callable[[Staged], None]
"""Waits for the copy; raises RuntimeError, naming them, if tensors in it are not as they were."""

StagingWatch = Callable[[FileImage, Sequence[str]], Compare]
"""Called before the tensors of an image, whose names are given, are staged."""

_PIECE_BYTES = 4 << 20


def watch(image: FileImage, names: Sequence[str]) -> Compare:
    """Looks at every tensor before and after."""
    before = [_digest(tensor) for tensor in image.tensors]

    def compare(staged: Staged) -> None:
        staged.wait()
        after = [_digest(tensor) for tensor in staged.tensors()]
        changed = [name for name, one, other in zip(names, before, after, strict=True) if one != other]
        if changed:
            more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
            raise RuntimeError(
                f"{', '.join(changed[:5])}{more} changed while being staged. Whoever changes them has to call "
                "maybe_wait_for_staging() of the checkpoint manager first"
            )

    return compare


def _do_not_watch(image: FileImage, names: Sequence[str]) -> Compare:
    return lambda staged: staged.wait()


DO_NOT_WATCH: StagingWatch = _do_not_watch


def build_staging_watch(config: Checkpoint) -> StagingWatch:
    """As `debug_staging` says."""
    return watch if config.debug_staging else DO_NOT_WATCH


def _digest(tensor: torch.Tensor) -> int:
    state = xxhash.xxh3_64()
    num_bytes = tensor.numel() * tensor.element_size()
    buffer = bytearray(min(num_bytes, _PIECE_BYTES))
    for begin in range(0, num_bytes, _PIECE_BYTES):
        end = min(begin + _PIECE_BYTES, num_bytes)
        copy_bytes(tensor, begin, end, ctypes.addressof(ctypes.c_char.from_buffer(buffer)))
        state.update(memoryview(buffer)[: end - begin])
    return state.intdigest()
