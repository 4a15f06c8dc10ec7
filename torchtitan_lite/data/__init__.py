"""Adapters that put the position of other libraries' data loaders into a checkpoint."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_lite.data.adapters import HuggingFaceStreamAdapter, StatefulDataLoaderAdapter

__all__ = ["HuggingFaceStreamAdapter", "StatefulDataLoaderAdapter"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("torchtitan_lite.data.adapters"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
