"""A checkpoint as it can be read: what is in it, and how it gets into what the run has.

What a checkpoint holds is known from its metadata before a byte of data is read, so a report of
what does not fit comes first. Small objects are read with `weights_only`, never unpickled freely.
States that grow (a loss history) are read at the size they were saved with.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence
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
from torchtitan_lite.checkpoint.key_report import KeyReport, TensorLike, compare_tensors, merged
from torchtitan_lite.checkpoint.load_rules import EVERYTHING, LoadRules
from torchtitan_lite.distributed.consensus import Peers
from torchtitan_lite.errors import CheckpointMismatch, CheckpointUnreadable
from torchtitan_lite.log import logger

State = dict[str, Any]


class StoredCheckpoint:
    """The checkpoint folder at `path`, ours or plain DCP's, as `rules` let it be loaded."""

    def __init__(self, path: Path, peers: Peers, rules: LoadRules = EVERYTHING) -> None:
        self.path = path
        self._peers = peers
        self._rules = rules

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

    def report(
        self, model: Mapping[str, torch.Tensor], optimizer: State, states: Sequence[str] = (), *, cast: bool = False
    ) -> KeyReport:
        """How the checkpoint differs from all of these, as all ranks see it. Reads nothing. **Collective**.

        What is not to be loaded is left out: an optimizer without keys, a state not named.
        """
        reports = [self._model_report(model, cast), KeyReport(missing=[n for n in states if not self.keys(f"{n}.")])]
        if optimizer:
            reports.append(self._optimizer_report(optimizer))
        return self._of_all_ranks(merged(*reports))

    def check(
        self, model: Mapping[str, torch.Tensor], optimizer: State, states: Sequence[str] = (), *, cast: bool = False
    ) -> None:
        """Raises `CheckpointMismatch` on every rank unless all of these are there and fit, if the rules are strict."""
        report = self.report(model, optimizer, states, cast=cast)
        if report and (self._rules.strictness == "error" or report.lost_states(states)):
            raise CheckpointMismatch(str(self.path), str(report))
        if report and self._rules.strictness == "warn":
            logger.warning("%s does not fit everywhere; the rest of it is loaded:\n%s", self.path, report)

    def read_model(self, model: Mapping[str, torch.Tensor], *, cast: bool = False) -> None:
        """Reads into the live tensors of `model`, from `model.<fqn>` or, in a weights-only checkpoint, bare FQNs.

        Exactly the keys that the rules ask for must be there, with the model's shapes and, unless `cast`, its
        dtypes; else `CheckpointMismatch` on every rank before a byte is read. **Collective**.
        """
        self.check(model, {}, cast=cast)
        names = self._names(self._prefix(model))
        skipped = self._model_report(model, cast).mismatched
        wanted = {fqn: tensor for fqn, tensor in model.items() if self._rules.wants(fqn) and fqn not in skipped}
        self._read({names[fqn]: tensor for fqn, tensor in wanted.items() if fqn in names})

    def read_optimizer(self, optimizer: State) -> State:
        """Reads the optimizer's flat state: tensors in place, the rest returned with them. **Collective**.

        Settings that this version of torch has and the checkpoint has not (`param_groups.*`) stay as they are.
        """
        self.check({}, optimizer)
        skipped = self._optimizer_report(optimizer).mismatched
        stored_names = {key: self._optimizer_name(key) for key in optimizer}
        known = self.metadata.state_dict_metadata
        names = {key: name for key, name in stored_names.items() if name in known and key not in skipped}
        read = {name: optimizer[key] for key, name in names.items()}
        self._read(read)
        return optimizer | {key: read[name] for key, name in names.items()}

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
            set_element(nested, _below(name, paths.get(key, (name, key.removeprefix(prefix)))), value)
        # DCP keeps leaves only: of a mapping that was empty there is no trace.
        return {key: {} for key, value in own.items() if isinstance(value, Mapping)} | nested

    def _read(self, flat: State) -> None:
        dcp.load(flat, FileSystemReader(self.path), SafeLoadPlanner(), self._peers.group, str(self.path))

    def _prefix(self, model: Mapping[str, torch.Tensor]) -> str:
        # A model whose own names begin with "model." is in a weights-only checkpoint under just these.
        keys = self.metadata.state_dict_metadata
        bare = any(fqn in keys for fqn in model) and not any(f"model.{fqn}" in keys for fqn in model)
        return "" if bare or not self.keys("model.") else "model."

    def _model_report(self, model: Mapping[str, torch.Tensor], cast: bool) -> KeyReport:
        if not model:
            return KeyReport()
        prefix = self._prefix(model)
        stored = self._stored_tensors(prefix)
        found = {fqn: stored[name] for fqn, name in self._names(prefix).items() if self._rules.wants(fqn)}
        expected = {fqn: tensor for fqn, tensor in model.items() if self._rules.wants(fqn)}
        report = compare_tensors(expected, found, cast=cast or self._rules.cast)
        # Under bare names a checkpoint may hold anything else besides the model.
        return report if prefix else dataclasses.replace(report, unexpected=())

    def _optimizer_report(self, optimizer: State) -> KeyReport:
        tensors = {key: value for key, value in optimizer.items() if isinstance(value, torch.Tensor)}
        expected = {self._optimizer_name(key): value for key, value in tensors.items() if self._optimizer_name(key)}
        unwanted = {key for key in self.keys("optimizer.state.") if not self._is_wanted(key)}
        found = {k: v for k, v in self._stored_tensors("optimizer.state.").items() if k not in unwanted}
        return compare_tensors(expected, found, cast=self._rules.cast)

    def _names(self, prefix: str) -> dict[str, str]:
        """The model's FQN to the checkpoint's key."""
        stored = [key.removeprefix(prefix) for key in self._stored_tensors(prefix)]
        return {fqn: prefix + name for fqn, name in self._rules.renamed(stored).items()}

    def _optimizer_name(self, key: str) -> str:
        """The checkpoint's key for the optimizer's own `key`; empty if the rules leave its parameter out."""
        kind, _, rest = key.partition(".")
        fqn, _, name = rest.rpartition(".")
        if not self._rules.wants(fqn):
            return ""
        return f"optimizer.{kind}.{self._parameter_names.get(fqn, fqn)}.{name}"

    @cached_property
    def _parameter_names(self) -> dict[str, str]:
        """The model's FQN to the checkpoint's."""
        return {fqn: key.removeprefix("model.") for fqn, key in self._names("model.").items()}

    def _is_wanted(self, key: str) -> bool:
        stored = key.removeprefix("optimizer.state.").rpartition(".")[0]
        return any(self._rules.wants(fqn) for fqn in self._rules.renamed([stored]))

    def _of_all_ranks(self, report: KeyReport) -> KeyReport:
        """One report of all ranks: unexpected is only what none of them has, for each may have a part of the model."""
        reports = self._peers.gather(report)
        unexpected = [key for key in report.unexpected if all(key in other.unexpected for other in reports)]
        together = merged(*reports)
        return KeyReport(
            missing=list(dict.fromkeys(together.missing)), unexpected=unexpected, mismatched=together.mismatched
        )

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


def _below(name: str, path: Sequence[Any]) -> tuple[Any, ...]:
    """What of `path` comes after the part that is spelt `name`."""
    depth = next(n for n in range(1, len(path) + 1) if ".".join(map(str, path[:n])) == name)
    return tuple(path[depth:])


class SafeLoadPlanner(DefaultLoadPlanner):
    """Loads into a flat state; small objects by `weights_only`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
