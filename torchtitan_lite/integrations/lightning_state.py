"""What a checkpoint has of Lightning: the loops, the position in the training data, and the parts with a state.

The loops get their own state back in the form that it has at the end of a batch: from there Lightning resumes without
running anything twice. At the last batch of an epoch it does not: its loader's iterator is at the end, no other one is
made, and an epoch without batches follows, whose hooks run. The beginning of the next epoch is saved in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch

from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.data.positioned_loader import PositionedLoader
from torchtitan_lite.data.rank_state import pack, unpack
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import logger

_BASES = ("Callback", "CheckpointHooks")
"""Classes of Lightning whose hooks do nothing."""


class LoopState:
    """The state of `trainer.fit_loop`, at the end of a step, at an epoch's first batch, or after the last one.

    Lightning's loops resume from the end of a batch: `completed` is one less than `processed` then, and the batch is
    counted by the load. At the beginning of an epoch the inner loops are not resumed, but begin.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._noted: dict[str, Any] = {}
        self.begins = ""
        """Where the state that was noted or loaded begins: "step", "epoch" or "end"; empty for none."""

    @property
    def is_in_epoch(self) -> bool:
        """Whether batches of the present epoch are left."""
        return not self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch

    def note(self, begins: str, *, ended: bool = False) -> None:
        """Keep the present state, as one that `begins` there; `ended` if the hooks of an epoch's end are running."""
        self.begins, self._noted = begins, self._now(begins)
        if ended:
            _uncount(self._noted["epoch_progress"], "processed")

    def forget(self) -> None:
        """Return the present state from now on."""
        self.begins, self._noted = "", {}

    def state_dict(self) -> dict[str, Any]:
        begins = self.begins or ("epoch" if self._trainer.fit_loop.batch_idx < 0 else "step")
        return {"begins": begins, "loops": self._noted or self._now(begins)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.begins, self._noted = state_dict["begins"], state_dict["loops"]
        fit_loop = self._trainer.fit_loop
        fit_loop.load_state_dict(deepcopy(self._noted))
        if self.begins != "step":
            fit_loop.epoch_loop.restarting = False
            fit_loop.epoch_loop.val_loop.restarting = True  # Else Lightning runs its sanity check again.

    def _now(self, begins: str) -> dict[str, Any]:
        state: dict[str, Any] = self._trainer.fit_loop.state_dict()
        state["state_dict"].pop("combined_loader", None)  # The position in the data is a state of its own.
        if begins == "step":
            _uncount(state["epoch_loop.batch_progress"], "completed")
            state["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
        return state


def _uncount(progress: dict[str, Any], name: str) -> None:
    for counts in (progress["total"], progress["current"]):
        counts[name] -= 1


class DataState:
    """The position of each training loader on this rank, and the metrics of this rank that callbacks see."""

    def __init__(self, trainer: Any, config: Checkpoint, before_batch: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._place = {"rank": trainer.global_rank, "num_ranks": trainer.world_size}
        self._metrics: dict[str, torch.Tensor] = {}
        self._loaders = _replace_loaders(
            trainer,
            lambda each: PositionedLoader(
                each, **self._place, before_batch=before_batch, preemption_signals=config.preemption_signals
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        metrics = {**self._metrics, **self._trainer.callback_metrics}
        metrics = {name: value.detach() for name, value in metrics.items() if value.numel() == 1}
        loaders = {f"loader{number}": each.position() for number, each in enumerate(self._loaders)}
        return {"metrics": pack(metrics, **self._place), **loaders}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._metrics = unpack(state_dict["metrics"], **self._place)
        found = sum(name.startswith("loader") for name in state_dict)
        if found != len(self._loaders):
            raise ConfigError(
                f"dataloader: expected {found} training loaders, as saved, found {len(self._loaders)}. Give fit those "
                "of that run, or start the data from the beginning with --checkpoint.exclude_from_loading=dataloader."
            )
        for number, each in enumerate(self._loaders):
            each.seek(state_dict[f"loader{number}"])

    def leave(self) -> None:
        """Note that the epoch is over: the next batch is that of another one."""
        for each in self._loaders:
            each.leave()

    def restore_metrics(self) -> None:
        """Let schedulers and callbacks find what was logged last before the save."""
        device = self._trainer.strategy.root_device
        self._trainer.callback_metrics.update({name: each.to(device) for name, each in self._metrics.items()})


def _replace_loaders(trainer: Any, replacement: Callable[[Any], PositionedLoader]) -> list[PositionedLoader]:
    """Put a replacement of each training loader in its place; return these. **Collective**.

    Before the load: what `train_dataloader` draws, such as a split of the data, is then what it was in the first start.
    """
    trainer.fit_loop.setup_data()
    fetcher = trainer.fit_loop._data_fetcher  # It has no public name.
    if fetcher is None:  # There is nothing to train.
        return []
    _refuse_prefetching(fetcher)
    combined = fetcher.combined_loader
    replaced = [replacement(each) for each in combined.flattened]
    combined.reset()  # Ends workers that it has begun.
    combined.flattened = replaced
    iter(fetcher)
    return replaced


def _refuse_prefetching(fetcher: Any) -> None:
    """Raise ConfigError if Lightning reads batches before the step that takes them."""
    if type(fetcher).__name__ == "_DataLoaderIterDataFetcher":
        raise ConfigError(
            "training_step: expected (batch, batch_idx), found dataloader_iter, which may read batches of later steps. "
            "Take the batch as an argument."
        )
    if fetcher.length is None:
        raise ConfigError(
            "train_dataloader: expected a length, found none: Lightning then reads a batch ahead, which a resume would "
            "lose. Give the dataset __len__, or set Trainer(limit_train_batches=N)."
        )


class PartsState:
    """What is saved of Lightning, the same on all ranks."""

    def __init__(self, trainer: Any, loops: LoopState) -> None:
        self._trainer, self._loops = trainer, loops

    def state_dict(self) -> dict[str, Any]:
        parts = {name: deepcopy(part.state_dict()) for name, part in self._parts().items()}
        return {**self._loops.state_dict(), "parts": parts, "added": self._added()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loops.load_state_dict(state_dict)
        saved, parts = state_dict.get("parts", {}), self._parts()
        for name in saved.keys() & parts.keys():
            if saved[name]:
                parts[name].load_state_dict(saved[name])
        if missing := sorted(name for name in saved.keys() - parts.keys() if saved[name]):
            logger.warning("Not loaded, because this run has none of it: %s", ", ".join(missing))
        for owner, arguments in self._hooks("on_load_checkpoint"):
            owner.on_load_checkpoint(*arguments, dict(state_dict.get("added", {})))

    def _parts(self) -> dict[str, Any]:
        trainer = self._trainer
        parts: dict[str, Any] = {each.state_key: each for each in trainer.callbacks}
        parts["precision plugin"] = trainer.precision_plugin
        if trainer.datamodule is not None:
            parts["datamodule"] = trainer.datamodule
        return parts

    def _added(self) -> dict[str, Any]:
        """Return what hooks add to a checkpoint: they get an empty one. Raises ConfigError for one that needs more."""
        added: dict[str, Any] = {}
        for owner, arguments in self._hooks("on_save_checkpoint"):
            try:
                owner.on_save_checkpoint(*arguments, added)
            except KeyError as error:
                raise ConfigError(
                    f"{type(owner).__name__}.on_save_checkpoint: expected a hook that adds entries to a checkpoint, "
                    f"found one that needs its entry {error}, which this kind of checkpoint does not have. Give the "
                    "callback or module state_dict and load_state_dict, or buffers."
                ) from None
        return added

    def _hooks(self, name: str) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """Yield the other callbacks, the module and the datamodule if they have the hook, and its first arguments."""
        trainer, module = self._trainer, self._trainer.lightning_module
        owners: list[tuple[Any, tuple[Any, ...]]] = [(each, (trainer, module)) for each in trainer.callbacks]
        owners += [(each, ()) for each in (module, trainer.datamodule) if each is not None]
        for owner, arguments in owners:
            hook = getattr(owner, name)
            if getattr(hook, "__qualname__", "").partition(".")[0] not in _BASES:
                yield owner, arguments
