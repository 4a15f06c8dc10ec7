"""The small tensors that one rank reads completely and as they are stored, in columns.

A model may have tens of thousands of tensors of a few KiB, and then a load takes longer in Python than on the disk. So
these are not planned one by one: for each the load notes where it is in the file and in memory, and the disk's side
copies it there. What is not small, not complete or not in plain memory goes through regions, with the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchtitan_lite.checkpoint.format.tensor_table import TensorKind, TensorTable
from torchtitan_lite.disk.piece_table import PieceTable

SMALL_BYTES = 32 << 10
"""Up to this size, planning and reading a tensor by itself takes longer than one more copy of it."""
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def small_tensors(state: Mapping[str, Any], table: TensorTable) -> tuple[dict[str, PieceTable], dict[str, Any]]:
    """Return where the small tensors of `state` are, by file, and all other entries of `state`.

    The tensors must outlive the pieces: they hold addresses in their memory.
    """
    kinds, places = table.kinds, table.places
    # Complex tensors may be lazy conjugates: the bytes in their memory are not their elements.
    columns: dict[TensorKind, tuple[list[int], list[int]]] = {
        kind: ([], []) for kind in table.places_by_kind if 0 < kind.nbytes <= SMALL_BYTES and not kind.dtype.is_complex
    }
    others: dict[str, Any] = {}
    strided = torch.strided
    for key, target in state.items():
        kind = kinds.get(key)
        if (
            kind in columns
            and type(target) in _PLAIN_TENSORS
            and target.dtype is kind.dtype
            and target.is_cpu
            and target.layout is strided
            and target.is_contiguous()
            and target.shape == kind.shape
            and not target.is_neg()
        ):
            begins, addresses = columns[kind]
            begins.append(places[key])
            addresses.append(target.data_ptr())
        else:
            others[key] = target
    tables: dict[str, PieceTable] = {}
    for kind, (begins, addresses) in columns.items():
        if begins:
            tables.setdefault(kind.file, PieceTable()).add(begins, addresses, kind.nbytes)
    return tables, others
