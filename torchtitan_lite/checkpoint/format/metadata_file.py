"""The bytes of DCP's `.metadata`, in the oldest form that every supported version of torch writes.

torch 2.15 added strides to the properties of a tensor. It reads properties without them, and the tools of torch 2.11 to
2.14 read no others. Strides say nothing about a checkpoint, so they are left out under every version.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

_OLDEST = 5
"""The fields of `TensorProperties` in torch 2.11: dtype, layout, requires_grad, memory format, pin_memory."""


def metadata_bytes(metadata: Metadata) -> bytes:
    """Return `metadata` as its file holds it."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.dispatch_table = copyreg.dispatch_table | {TensorProperties: _reduced}
    pickler.dump(metadata)
    return buffer.getvalue()


def _reduced(properties: TensorProperties) -> tuple[Any, ...]:
    """Return what Python's own pickling of `properties` is made of, with the first fields of the state only."""
    state = properties.__getstate__()  # type: ignore[no-untyped-call]  # untyped in torch
    return copyreg.__newobj__, (TensorProperties,), state[:_OLDEST]  # type: ignore[attr-defined]  # not in the stubs
