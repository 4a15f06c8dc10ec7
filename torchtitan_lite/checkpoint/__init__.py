"""What a training loop of your own imports.

    from torchtitan_lite.checkpoint import CheckpointManager, TrainState

Importing the package alone imports no torch; the first use of a name does. What is not in `__all__` may move without
notice.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_lite.checkpoint.hugging_face.described import Place
    from torchtitan_lite.checkpoint.hugging_face.description import HuggingFaceModel
    from torchtitan_lite.checkpoint.manager import CheckpointManager
    from torchtitan_lite.checkpoint.reading.reader import CheckpointReader
    from torchtitan_lite.checkpoint.resume.evaluation import load_model
    from torchtitan_lite.checkpoint.state.per_rank import PerRank
    from torchtitan_lite.checkpoint.state.stateful import Stateful
    from torchtitan_lite.checkpoint.state.train_state import TrainState

__all__ = [
    "CheckpointManager",
    "CheckpointReader",
    "HuggingFaceModel",
    "PerRank",
    "Place",
    "Stateful",
    "TrainState",
    "load_model",
]

_HOMES = {
    "CheckpointManager": "torchtitan_lite.checkpoint.manager",
    "CheckpointReader": "torchtitan_lite.checkpoint.reading.reader",
    "HuggingFaceModel": "torchtitan_lite.checkpoint.hugging_face.description",
    "Place": "torchtitan_lite.checkpoint.hugging_face.described",
    "PerRank": "torchtitan_lite.checkpoint.state.per_rank",
    "Stateful": "torchtitan_lite.checkpoint.state.stateful",
    "TrainState": "torchtitan_lite.checkpoint.state.train_state",
    "load_model": "torchtitan_lite.checkpoint.resume.evaluation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
