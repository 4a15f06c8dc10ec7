"""The manager in torchtitan's own trainer, through torchtitan's own interface for managers.

In a registry:

    checkpoint=CheckpointManager.Config(enable=True, interval=500)

With a registry as it is:

    torchrun ... -m torchtitan_lite.integrations.torchtitan --module llama3 --config llama3_debugmodel
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from torchtitan_lite.checkpoint import CheckpointManager as OwnManager
from torchtitan_lite.checkpoint.state.model_wrapper import EXPORT_DTYPES
from torchtitan_lite.checkpoint.untrusted.inert_pickle import InertPickleError, parse_pickle
from torchtitan_lite.config.address import is_in_object_store
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.durable import DISK
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import ConfigError, ExtraMissing
from torchtitan_lite.integrations.loop_exit import leave, warn_of_another_version
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout

try:
    from torchtitan.components.checkpointer import TRAIN_STATE, BaseCheckpointManager, ModelWrapper
    from torchtitan.components.checkpointer import CheckpointManager as TitanManager
except ImportError as error:
    raise ExtraMissing.of(error, "torchtitan") from None

__all__ = ["CheckpointManager"]

TRIED = "0.3"
"""The versions of torchtitan with which this was tried."""
_PREFIXES = ("torchtitan.models.", "torchtitan.experiments.", "")
"""Where torchtitan looks for the module that --module names."""
_SAME_NAMES = (
    *("interval", "export_dtype", "keep_latest_k", "enable_first_step_checkpoint", "load_only"),
    *("create_seed_checkpoint", "async_mode"),
)
"""Keys of torchtitan that mean the same in ours."""
_OWN_KEYS = (
    *("or_every_seconds", "keep_every_n_steps", "keep_for_hours", "min_free_disk_gb", "memory_interval"),
    *("memory_ttl_seconds", "digest_tensors", "upload_folder", "timeout_seconds", "preemption_grace_seconds"),
)
"""Keys of ours that torchtitan does not have; docs/config.md describes them."""


class TorchtitanCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]  # torchtitan need not be installed
    """A manager for `torchtitan.trainer.Trainer`: `Config.build` takes what torchtitan gives to its own.

    It saves what torchtitan's saves, and the random generators. A checkpoint is there complete or not at all, so
    `keep_latest_k = 1` is allowed. On SIGTERM, SIGUSR1 or SIGINT all ranks save the same step, complete, and leave
    with 128 + signal, unless `exit_on_signal` is false.

    Raises ConfigError for a key that has no meaning here, at construction. Every method is **collective**.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]  # nor here
        """torchtitan's keys with their meaning, and keys of ours."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
        """How much of a save training waits for: all, the copy, or the copy before a process writes it."""

        keep_latest_k: int = 10
        """Number of recent checkpoints that stay; 0: all. 1 is enough here: a checkpoint is there complete, or not."""

        exit_on_signal: bool = True
        """Whether all ranks save and leave on SIGTERM, SIGUSR1 or SIGINT."""

        or_every_seconds: float = Checkpoint.or_every_seconds
        """Also save once this many seconds have passed since the last save; 0: off."""

        keep_every_n_steps: int = Checkpoint.keep_every_n_steps
        """Also keep the checkpoints whose step is a multiple of this; 0: off."""

        keep_for_hours: float = Checkpoint.keep_for_hours
        """Also keep the checkpoints that were saved at most this many hours ago; 0: off."""

        min_free_disk_gb: float = Checkpoint.min_free_disk_gb
        """Free space in GB on the disk; while there is less after a save, the oldest ones are removed; 0: off."""

        memory_interval: int = Checkpoint.memory_interval
        """Steps from one copy in memory to the next, which outlives the trainer; 0: only those of saves."""

        memory_ttl_seconds: float = Checkpoint.memory_ttl_seconds
        """Seconds for which copies in memory outlive the trainer; 0: none do."""

        digest_tensors: list[str] = field(default_factory=list)
        """When every tensor is digested: "save", "load", "staging", "ranks"."""

        upload_folder: str = Checkpoint.upload_folder
        """Second folder, to which each checkpoint is uploaded in the background; empty: none."""

        timeout_seconds: int = Checkpoint.timeout_seconds
        """Longest wait for a save or a load."""

        preemption_grace_seconds: int = Checkpoint.preemption_grace_seconds
        """Seconds from the signal until a rank that could not leave is ended."""

        def __post_init__(self) -> None:
            kept = self.keep_latest_k
            # Saves of torchtitan are not atomic, so it refuses 1: ours are.
            self.keep_latest_k = 0 if kept == 1 else kept
            BaseCheckpointManager.Config.__post_init__(self)
            self.keep_latest_k = kept

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: Sequence[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: Mapping[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: Future[Any] | None = None
        self._config, self._states = config, states
        if config.enable:  # Else torchtitan calls no method that needs one, and nothing is refused.
            keys, folder = _keys_of(config), config.folder
            if not is_in_object_store(folder):
                folder = str(Path(base_folder, folder))
            self._weights_folder = Path(folder).parent / "hf"
            self._own = OwnManager.for_loop(
                model=list(model_parts),
                optimizer=list(optimizers),
                lr_scheduler=list(lr_schedulers),
                dataloader=None if dataloader is None else CheckedDataloader(dataloader),
                states=dict(states),
                folder=folder,
                **keys,
            )
            self._weights = HuggingFaceWeights(model_parts, sd_adapter, config)
            if config.last_save_in_hf:
                self._weights.refuse_to_save()
            warn_of_another_version("torchtitan", TRIED)

    def _load(self, step: int = -1) -> bool:
        has_loaded = self._own.load(step)
        if not has_loaded and self._config.initial_load_in_hf:
            path, is_quantized = self._config.initial_load_path, self._config.initial_load_in_hf_quantized
            self._weights.load(path, is_quantized=is_quantized)
            has_loaded = True
        self._own.reset()
        self._leave_if_agreed()
        return has_loaded

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        saved = self._own.save(curr_step, force=last_step)
        self.save_future = Future() if saved and not last_step else self.save_future
        self._leave_if_agreed()
        if last_step and self._config.last_save_in_hf and not self._config.load_only:
            self._weights.save(self._weights_folder / layout.step_dir(curr_step))
        return saved

    def _wait_for_saving(self) -> None:
        self._own.wait()
        self.save_future = None

    def _maybe_wait_for_staging(self) -> None:
        self._own.maybe_wait_for_staging()

    def _close(self) -> None:
        self._own.close()

    def _leave_if_agreed(self) -> None:
        """Leave with 128 + signal if the ranks agreed to: torchtitan's loop has no exit."""
        signal = self._own.preempted_by
        if not signal:
            return
        trainer = self._states.get(TRAIN_STATE)
        self._own.close()
        if callable(close := getattr(trainer, "close", None)):
            close()  # Its metrics; it closes this manager once more, which does nothing.
        leave(self._own, signal)


CheckpointManager = TorchtitanCheckpointManager  # The name to import.


class HuggingFaceWeights:
    """The weights of the model `parts` in Hugging Face's format, as its `adapter` names them.

    `adapter` is None for a model that has none. Methods are **collective**.
    """

    def __init__(self, parts: Sequence[nn.Module], adapter: Any, config: Any) -> None:
        self._model, self._adapter, self._config = ModelWrapper(list(parts)), adapter, config

    def refuse_to_save(self) -> None:
        """Raise ConfigError if the model has no adapter, or the folder of the run is in an object store."""
        folder = self._config.folder
        if self._adapter is None or is_in_object_store(folder):
            raise ConfigError(
                "checkpoint.last_save_in_hf: expected a model with an adapter and a folder on a disk, found "
                f"{'no adapter' if self._adapter is None else folder}. Leave it out, and make the weights from the "
                "last checkpoint: torchtitan-lite export."
            )

    def save(self, folder: Path) -> None:
        """Write the weights to `folder`, durably, in the dtype of exports: it is there complete or not at all."""
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        dtype = EXPORT_DTYPES[self._config.export_dtype]
        floating = {name: value.to(dtype) for name, value in self._model.state_dict().items()}
        with closing(Peers(timedelta(seconds=self._config.timeout_seconds))) as peers:
            peers.on_coordinator(lambda: _remove(unfinished))
            writer = HuggingFaceStorageWriter(
                str(unfinished),
                fqn_to_index_mapping=self._adapter.fqn_to_index_mapping,
                save_distributed=True,
                enable_consolidation=True,
            )
            dcp_save(self._adapter.to_hf(floating), storage_writer=writer)
            peers.on_coordinator(lambda: _commit_weights(unfinished, folder))
        logger.info("Saved the weights in Hugging Face's format, in %s", folder)

    def load(self, path: str | None, *, is_quantized: bool) -> None:
        """Load weights from `path`, by default the folder of the model's assets. Raises ConfigError without one."""
        folder = path or getattr(self._adapter, "hf_assets_path", None)
        if self._adapter is None or not folder or not Path(folder).is_dir():
            raise ConfigError(
                f"checkpoint.initial_load_in_hf: expected a model with an adapter and a folder of weights, found "
                f"{'no adapter' if self._adapter is None else f'the folder {folder}'}. Name a folder in "
                "checkpoint.initial_load_path."
            )
        state = self._adapter.to_hf(self._model.state_dict())
        dcp_load(state, storage_reader=self._adapter.get_hf_storage_reader(str(folder), is_quantized))
        self._model.load_state_dict(self._adapter.from_hf(state))
        logger.info("Loaded weights in Hugging Face's format from %s", folder)


def _remove(folder: Path) -> None:
    if os.path.lexists(folder):
        DISK.remove_tree(folder)


def _commit_weights(unfinished: Path, folder: Path) -> None:
    """Make what is written durable, and give it its name."""
    _remove(unfinished / "sharded")
    for path in unfinished.iterdir():
        with path.open("rb") as file:
            DISK.fsync_file(file.fileno())
    DISK.fsync_dir(unfinished)
    _remove(folder)
    DISK.rename(unfinished, folder)
    DISK.fsync_dir(folder.parent)


class CheckedDataloader:
    """A dataloader of torchtitan, whose state is a pickle for each data-parallel rank.

    Before it unpickles one, that is read without running anything: a file may be hostile.
    """

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        if getattr(dataloader, "generator", self) is None:
            # Each start draws from it when it begins to iterate: from torch's own, dropout would continue elsewhere.
            dataloader.generator = torch.Generator().manual_seed(torch.initial_seed())

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._dataloader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the state back. Raises ConfigError for a pickle of more than plain values, and for other ranks."""
        for name, value in state_dict.items():
            if isinstance(value, bytes):
                _refuse_code(name, value)
        saved, now = state_dict.get("world_size"), getattr(self._dataloader, "dp_world_size", None)
        if saved is not None and now is not None and saved != now:
            raise ConfigError(
                f"dataloader: expected {saved} data-parallel ranks, as saved, found {now}: torchtitan's dataloader "
                "cannot be resharded. Add dataloader to checkpoint.exclude_from_loading: the data begin from the start."
            )
        self._dataloader.load_state_dict(state_dict)


def _refuse_code(name: str, data: bytes) -> None:
    try:
        parse_pickle(data, {})
    except InertPickleError as error:
        raise ConfigError(
            f"dataloader.{name}: expected a pickle of lists, dicts, numbers and strings, found others: {error}. "
            "Add dataloader to checkpoint.exclude_from_loading, to start the data from the beginning."
        ) from None


def _keys_of(config: CheckpointManager.Config) -> dict[str, Any]:
    """Return the keys of ours that mean what `config` says. Raises ConfigError for what has no meaning here."""
    keys = {name: getattr(config, name) for name in (*_SAME_NAMES, *_OWN_KEYS)}
    keys |= {
        "enable_checkpoint": config.enable,
        "model_weights_only": config.last_save_model_only,
        "exclude_from_loading": tuple(config.exclude_from_loading),
        "digest_tensors": tuple(config.digest_tensors),
    }
    if config.initial_load_path and not config.initial_load_in_hf:
        keys |= {
            "initial_load_path": config.initial_load_path,
            "initial_load_model_only": config.initial_load_model_only,
        }
    if not config.exit_on_signal:
        keys["preemption_signals"] = ()
    return keys


registry: str = ""
"""The module whose configurations this one gives out, with this manager in them: that of --module."""


def __getattr__(name: str) -> Callable[[], Any]:
    """Return the configuration `name` of `registry` with this manager: torchtitan imports it by this module's name."""
    if not registry or name.startswith("_"):
        raise AttributeError(name)
    function = _function(registry, name)

    def with_this_manager() -> Any:
        config = function()
        config.checkpoint = of_torchtitan(config.checkpoint)
        return config

    return with_this_manager


def of_torchtitan(config: Any) -> CheckpointManager.Config:
    """Return the configuration of this manager with the values of torchtitan's. Raises ConfigError for another's."""
    if isinstance(config, CheckpointManager.Config):
        return config
    if type(config) is not TitanManager.Config:
        raise ConfigError(
            f"--config: expected a configuration with torchtitan's CheckpointManager, found one with "
            f"{type(config).__qualname__}. Put CheckpointManager.Config of {__name__} into the registry."
        )
    return CheckpointManager.Config(**{each.name: getattr(config, each.name) for each in dataclasses.fields(config)})


def _function(module: str, name: str) -> Callable[[], Any]:
    tried = [f"{prefix}{module}.config_registry" for prefix in _PREFIXES] + [module]
    for each in tried:
        try:
            found = importlib.import_module(each)
        except ModuleNotFoundError as error:
            if error.name is None or not each.startswith(error.name):
                raise
            continue
        function = getattr(found, name, None)
        if callable(function):
            return function  # type: ignore[no-any-return]  # a registry has such functions
        raise ConfigError(f"--config: expected a function of {each}, found {name!r}, which it does not have.")
    raise ConfigError(f"--module: expected a module of torchtitan or of your own, found {module!r}, which is none.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run torchtitan's trainer with the command line `arguments`, and with this manager."""
    from torchtitan.train import main as train

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--module", nargs="?", default="", const="")
    given, rest = parser.parse_known_args(arguments)
    if not given.module:
        raise ConfigError("--module: expected the module of a registry, such as llama3, found none.")
    # By its qualified name: this one may be __main__.
    own = importlib.import_module("torchtitan_lite.integrations.torchtitan")
    own.registry = given.module  # type: ignore[attr-defined]  # this module
    sys.argv = [sys.argv[0], "--module", own.__name__, *rest]
    train()


if __name__ == "__main__":
    main()
