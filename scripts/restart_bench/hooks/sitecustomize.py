"""Make each rank of a job record the moments of its start, without a change of the job.

Python imports this module at its start if its folder is in PYTHONPATH. In a rank it wraps the functions of the trainer
as soon as their modules are imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import ModuleType
from typing import Any

import restart_times


def _wrap(owner: Any, name: str, before: str = "", after: Callable[..., None] | None = None) -> None:
    inner = getattr(owner, name)

    @wraps(inner)
    def outer(*args: Any, **options: Any) -> Any:
        if before:
            restart_times.stamp(before)
        result = inner(*args, **options)
        if after is not None:
            after(*args)
        return result

    setattr(owner, name, outer)


def _of_process_group(module: ModuleType) -> None:
    _wrap(module, "_open_world", "imported", lambda config: restart_times.stamp("met"))


def _of_trainer(module: ModuleType) -> None:
    _wrap(module.Trainer, "__init__", "", lambda *args: restart_times.stamp("built"))
    _wrap(module.Trainer, "_train", "loaded")
    _wrap(
        module.Trainer,
        "_train_step",
        "",
        lambda trainer, batch: restart_times.stamp("trained", trainer.train_state.step),
    )


WRAPPED = {
    "torchtitan_lite.distributed.process_group": _of_process_group,
    "torchtitan_lite.trainer": _of_trainer,
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in WRAPPED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            _wrap(spec.loader, "exec_module", "", WRAPPED[fullname])
        return spec


# The writer process inherits the variables of its rank, but runs no script.
if restart_times.FILE and "RANK" in os.environ and any(word.endswith(".py") for word in sys.orig_argv):
    restart_times.stamp_process()
    sys.meta_path.insert(0, _Finder())
