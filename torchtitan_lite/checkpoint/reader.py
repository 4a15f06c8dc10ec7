"""A checkpoint as it can be read: what is in it, and how it gets into what the run has.

What a checkpoint holds is known from its metadata before a byte of data is read, so a report of
what does not fit comes first. Small objects are read with `weights_only`, never unpickled freely.
States that grow (a loss history) are read at the size they were saved with.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint import dcp
from torchtitan_lite.checkpoint.key_report import KeyReport, TensorLike, compare_tensors
from torchtitan_lite.distributed.consensus import Peers
from torchtitan_lite.errors import CheckpointMismatch, CheckpointUnreadable

State = dict[str, Any]


class StoredCheckpoint:
    """The checkpoint folder at `path`, ours or plain DCP's."""

    def __init__(self, path: Path, peers: Peers) -> None:
        self.path = path
        self._peers = peers

    @cached_property
    def metadata(self) -> Metadata:
        """DCP's metadata. Any rank."""
        try:
            return FileSystemReader(self.path).read_metadata()
        except Exception as error:
            raise CheckpointUnreadable(str(self.path), f"{type(error).__name__}: {error}") from error

    def keys(self, prefix: str) -> list[str]:
        """The flat keys under `prefix`."""
        return [key for key in self.metadata.state_dict_metadata if key.startswith(prefix)]

    def read_model(self, model: Mapping[str, torch.Tensor], *, cast: bool) -> None:
        """Reads into the live tensors of `model`, from `model.<fqn>` or, in a weights-only checkpoint, bare FQNs.

        Exactly the model's keys must be there, with its shapes and, unless `cast`, its dtypes; else
        `CheckpointMismatch` on every rank before a byte is read. **Collective**.
        """
        prefix = "model." if self.keys("model.") else ""
        report = self._report(model, prefix, cast)
        self._refuse_together(report if prefix else KeyReport(report.missing, (), report.mismatched))
        self._read({prefix + fqn: tensor for fqn, tensor in model.items()})

    def check_model(self, model: Mapping[str, torch.Tensor]) -> None:
        """What `read_model` would refuse is refused, and nothing is read. **Collective**."""
        self._refuse_together(self._report(model, "model.", cast=False))

    def read_optimizer(self, optimizer: State) -> State:
        """Reads the optimizer's flat state: tensors in place, the rest returned with them. **Collective**.

        Settings that this version of torch has and the checkpoint has not (`param_groups.*`) stay as they are.
        """
        stored = self.metadata.state_dict_metadata
        wanted = {f"optimizer.{key}": value for key, value in optimizer.items()}
        tensors = {key: value for key, value in wanted.items() if isinstance(value, torch.Tensor)}
        self._refuse_together(compare_tensors(tensors, self._stored_tensors("optimizer.state.")))
        read = {key: value for key, value in wanted.items() if key in stored}
        self._read(read)
        return optimizer | {key.removeprefix("optimizer."): value for key, value in read.items()}

    def read_state(self, name: str, own: State) -> State:
        """The nested state `name` as it was saved; sharded tensors are read into those of `own`. **Collective**.

        Raises `CheckpointMismatch` on every rank if the checkpoint has no such state.
        """
        prefix = f"{name}."
        self._refuse_together(KeyReport(missing=[name] if own and not self.keys(prefix) else []))
        live, _ = flatten_state_dict({name: own})
        sharded = {key: value for key, value in live.items() if isinstance(value, DTensor)}
        target = {key: sharded.get(key, self._placeholder(key)) for key in self.keys(prefix)}
        self._read(target)
        paths = self.metadata.planner_data or {}
        nested: State = {}
        for key, value in target.items():
            set_element(nested, paths.get(key, (name, key.removeprefix(prefix))), value)
        return dict(nested.get(name, {}))

    def _read(self, flat: State) -> None:
        dcp.load(flat, FileSystemReader(self.path), SafeLoadPlanner(), self._peers.group, str(self.path))

    def _report(self, expected: Mapping[str, torch.Tensor], prefix: str, cast: bool) -> KeyReport:
        # A rank of a pipeline has part of the model: keys that no part of this rank has are not unexpected.
        stored = {key.removeprefix(prefix): value for key, value in self._stored_tensors(prefix).items()}
        return compare_tensors(expected, stored, cast=cast)

    def _stored_tensors(self, prefix: str) -> dict[str, TensorLike]:
        return {
            key: TensorLike(value.size, value.properties.dtype)
            for key, value in self.metadata.state_dict_metadata.items()
            if key.startswith(prefix) and isinstance(value, TensorStorageMetadata)
        }

    def _placeholder(self, key: str) -> Any:
        stored = self.metadata.state_dict_metadata[key]
        if isinstance(stored, TensorStorageMetadata):
            return torch.empty(stored.size, dtype=stored.properties.dtype)
        return None

    def _refuse_together(self, report: KeyReport) -> None:
        self._peers.raise_together(CheckpointMismatch(str(self.path), str(report)) if report else None)


class SafeLoadPlanner(DefaultLoadPlanner):
    """Loads into a flat state; small objects by `weights_only`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
