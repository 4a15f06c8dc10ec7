"""What a training loop of your own imports.

    from torchtitan_lite.checkpoint import CheckpointManager, TrainState

Importing the package alone imports no torch; the first use of a name does. What is not in `__all__` may move without
notice.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_lite.checkpoint.manager import CheckpointManager
    from torchtitan_lite.checkpoint.reading.reader import CheckpointReader
    from torchtitan_lite.checkpoint.resume.evaluation import load_model
    from torchtitan_lite.checkpoint.schedule.interval import AnyOf, AtStep, EverySeconds, EverySteps, SavePolicy, Tick
    from torchtitan_lite.checkpoint.schedule.optimum import Past
    from torchtitan_lite.checkpoint.seams import Seams
    from torchtitan_lite.checkpoint.state.per_rank import PerRank
    from torchtitan_lite.checkpoint.state.stateful import Stateful
    from torchtitan_lite.checkpoint.state.train_state import TrainState
    from torchtitan_lite.hugging_face.known_model import HuggingFaceModel
    from torchtitan_lite.hugging_face.model_files import Place
    from torchtitan_lite.store.manifest import CheckpointInfo
    from torchtitan_lite.store.retention import (
        KeepAny,
        KeepBest,
        KeepEvery,
        KeepFor,
        KeepLatest,
        RetentionPolicy,
        Ruling,
    )

__all__ = [
    "AnyOf",
    "AtStep",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointReader",
    "EverySeconds",
    "EverySteps",
    "HuggingFaceModel",
    "KeepAny",
    "KeepBest",
    "KeepEvery",
    "KeepFor",
    "KeepLatest",
    "Past",
    "PerRank",
    "Place",
    "RetentionPolicy",
    "Ruling",
    "SavePolicy",
    "Seams",
    "Stateful",
    "Tick",
    "TrainState",
    "load_model",
]

_NAMES = {
    "torchtitan_lite.checkpoint.manager": "CheckpointManager",
    "torchtitan_lite.checkpoint.reading.reader": "CheckpointReader",
    "torchtitan_lite.checkpoint.resume.evaluation": "load_model",
    "torchtitan_lite.checkpoint.schedule.interval": "AnyOf AtStep EverySeconds EverySteps SavePolicy Tick",
    "torchtitan_lite.checkpoint.schedule.optimum": "Past",
    "torchtitan_lite.checkpoint.seams": "Seams",
    "torchtitan_lite.checkpoint.state.per_rank": "PerRank",
    "torchtitan_lite.checkpoint.state.stateful": "Stateful",
    "torchtitan_lite.checkpoint.state.train_state": "TrainState",
    "torchtitan_lite.hugging_face.known_model": "HuggingFaceModel",
    "torchtitan_lite.hugging_face.model_files": "Place",
    "torchtitan_lite.store.manifest": "CheckpointInfo",
    "torchtitan_lite.store.retention": "KeepAny KeepBest KeepEvery KeepFor KeepLatest RetentionPolicy Ruling",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
