"""The weights of torchtitan's model in Hugging Face's format, as the adapter of the model names them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torchtitan.components.checkpointer import ModelWrapper

from torchtitan_lite.checkpoint.state.model_wrapper import EXPORT_DTYPES
from torchtitan_lite.config.address import is_in_object_store
from torchtitan_lite.disk.durable import DISK
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import logger


class HuggingFaceWeights:
    """The weights of the model `parts`; `adapter` is None for a model that has none. Methods are **collective**."""

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
