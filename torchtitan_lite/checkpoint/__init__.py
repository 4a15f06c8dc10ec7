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

_HOMES = {
    "AnyOf": "torchtitan_lite.checkpoint.schedule.interval",
    "AtStep": "torchtitan_lite.checkpoint.schedule.interval",
    "CheckpointInfo": "torchtitan_lite.store.manifest",
    "CheckpointManager": "torchtitan_lite.checkpoint.manager",
    "CheckpointReader": "torchtitan_lite.checkpoint.reading.reader",
    "EverySeconds": "torchtitan_lite.checkpoint.schedule.interval",
    "EverySteps": "torchtitan_lite.checkpoint.schedule.interval",
    "HuggingFaceModel": "torchtitan_lite.hugging_face.known_model",
    "KeepAny": "torchtitan_lite.store.retention",
    "KeepBest": "torchtitan_lite.store.retention",
    "KeepEvery": "torchtitan_lite.store.retention",
    "KeepFor": "torchtitan_lite.store.retention",
    "KeepLatest": "torchtitan_lite.store.retention",
    "Past": "torchtitan_lite.checkpoint.schedule.optimum",
    "PerRank": "torchtitan_lite.checkpoint.state.per_rank",
    "Place": "torchtitan_lite.hugging_face.model_files",
    "RetentionPolicy": "torchtitan_lite.store.retention",
    "Ruling": "torchtitan_lite.store.retention",
    "SavePolicy": "torchtitan_lite.checkpoint.schedule.interval",
    "Seams": "torchtitan_lite.checkpoint.seams",
    "Stateful": "torchtitan_lite.checkpoint.state.stateful",
    "Tick": "torchtitan_lite.checkpoint.schedule.interval",
    "TrainState": "torchtitan_lite.checkpoint.state.train_state",
    "load_model": "torchtitan_lite.checkpoint.resume.evaluation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
