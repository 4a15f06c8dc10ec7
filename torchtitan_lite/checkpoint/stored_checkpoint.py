"""A checkpoint as it can be read: what is in it, and how it gets into what the run has.

What a checkpoint holds is known before a byte of data is read, so a report of what does not fit comes
first. Small objects are never unpickled freely. States that grow (a loss history) are read at the size
they were saved with. Reading goes through `dcp.load`, but no rank's plan travels to another: each
knows by itself what it needs.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint import dcp
from torchtitan_lite.checkpoint.collection import no_collection
from torchtitan_lite.checkpoint.contents import Chunk, Contents, Shape, StoredTensor
from torchtitan_lite.checkpoint.folder import CheckpointFolder, Verify
from torchtitan_lite.checkpoint.key_report import KeyReport, TensorLike, compare_tensors, merged
from torchtitan_lite.checkpoint.load_rules import EVERYTHING, LoadRules
from torchtitan_lite.checkpoint.older_structure import Untyped, retyped
from torchtitan_lite.checkpoint.reader import CheckpointReader, Region, Wanted
from torchtitan_lite.checkpoint.shards import parts_of
from torchtitan_lite.checkpoint.structure import find, rebuild
from torchtitan_lite.distributed.consensus import Peers
from torchtitan_lite.errors import CheckpointDamaged, CheckpointMismatch
from torchtitan_lite.log import logger

State = dict[str, Any]
_ALL = "all"


class StoredCheckpoint:
    """The checkpoint folder at `path`, ours or plain DCP's, as `rules` let it be loaded."""

    def __init__(self, path: Path, peers: Peers, rules: LoadRules = EVERYTHING, *, verify: Verify = "full") -> None:
        self.path = path
        self._peers = peers
        self._rules = rules
        self._folder = CheckpointFolder(path, verify)
        self._reader = _Reader(self._folder)
        self._tensors_under: dict[str, dict[str, TensorLike]] = {}
        self._names_under: dict[str, dict[str, str]] = {}

    @property
    def contents(self) -> Contents:
        """What is in it. Any rank. Raises `CheckpointDamaged`, `CheckpointUnsafe` or `CheckpointUnreadable`."""
        return self._folder.contents

    def verify_rest(self) -> None:
        """What no tensor's reading looks at is what was committed, if all of it is to be verified. **Collective**.

        Raises on every rank if that is not so, or could not be found out, on one.
        """
        error: Exception | None = None
        try:
            self._reader.verify_rest(self._peers.rank, self._peers.world_size)
        except Exception as found:
            error = found
        self._peers.raise_together(error)

    def keys(self, prefix: str) -> list[str]:
        """The flat keys under `prefix`."""
        return [key for key in self.contents if key.startswith(prefix)]

    def has_state(self, name: str) -> bool:
        """Whether the nested state `name` is there; it may be empty."""
        structure = self.contents.structure
        return bool(self.keys(f"{name}.")) or (structure is not None and find(structure, name) is not None)

    def model_names(self, model: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """The names of tensors that `model` may be read from, as the renames leave them, to the checkpoint's keys."""
        return self._names(self._prefix(model))

    def read_objects(self, keys: Sequence[str]) -> State:
        """Return the objects under `keys`, none of which is a tensor. **Collective**."""
        read: State = dict.fromkeys(keys)
        self._read(read)
        return read

    @no_collection()
    def report(
        self, model: Mapping[str, torch.Tensor], optimizer: State, states: Sequence[str] = (), *, cast: bool = False
    ) -> KeyReport:
        """How the checkpoint differs from all of these, as all ranks see it. Reads nothing. **Collective**.

        What is not to be loaded is left out: an optimizer without keys, a state not named. Raises `CheckpointMismatch`
        on every rank, whatever the rules, if a tensor's memory is not what its placement says, on one.
        """
        self._peers.raise_together(_misplaced(str(self.path), {**model, **optimizer}))
        reports = [self._model_report(model, cast), KeyReport(missing=[n for n in states if not self.has_state(n)])]
        if optimizer:
            reports.append(self._optimizer_report(optimizer))
        return self._of_all_ranks(merged(*reports))

    def check(
        self, model: Mapping[str, torch.Tensor], optimizer: State, states: Sequence[str] = (), *, cast: bool = False
    ) -> None:
        """Raises `CheckpointMismatch` on every rank unless all of these are there and fit, if the rules are strict."""
        self._judge(self.report(model, optimizer, states, cast=cast), states)

    def _judge(self, report: KeyReport, states: Sequence[str] = ()) -> None:
        if report and (self._rules.strictness == "error" or report.lost_states(states)):
            raise CheckpointMismatch(str(self.path), str(report))
        if report and self._rules.strictness == "warn":
            logger.warning("%s does not fit everywhere; the rest of it is loaded:\n%s", self.path, report)

    @no_collection()
    def read_model(self, model: Mapping[str, torch.Tensor], *, cast: bool = False) -> None:
        """Reads into the live tensors of `model`, from `model.<fqn>` or, in a weights-only checkpoint, bare FQNs.

        Exactly the keys that the rules ask for must be there, with the model's shapes and, unless `cast`, its
        dtypes; else `CheckpointMismatch` on every rank before a byte is read. **Collective**.
        """
        own = self._model_report(model, cast)
        self._judge(self._of_all_ranks(own))
        names = self._names(self._prefix(model))
        skipped = own.mismatched
        self._read(
            {
                names[fqn]: tensor
                for fqn, tensor in model.items()
                if fqn in names and fqn not in skipped and self._rules.wants(fqn)
            }
        )

    @no_collection()
    def read_optimizer(self, optimizer: State) -> State:
        """Reads the optimizer's flat state: tensors in place, the rest returned with them. **Collective**.

        Settings that this version of torch has and the checkpoint has not (`param_groups.*`) stay as they are.
        """
        own = self._optimizer_report(optimizer) if optimizer else KeyReport()
        self._judge(self._of_all_ranks(own))
        skipped = own.mismatched
        stored_names = {key: self._optimizer_name(key) for key in optimizer}
        names = {key: name for key, name in stored_names.items() if name in self.contents and name not in skipped}
        read = {name: optimizer[key] for key, name in names.items()}
        self._read(read)
        return optimizer | {key: read[name] for key, name in names.items()}

    @no_collection()
    def read_state(self, name: str, own: State) -> State:
        """The nested state `name` as it was saved; sharded tensors are read into those of `own`. **Collective**.

        Raises `CheckpointMismatch` on every rank if the checkpoint has no such state, or one with other tensors, or
        is so old that its keys have no types and `own` does not tell them.
        """
        prefix = f"{name}."
        live, _ = flatten_state_dict({name: own})
        sharded = {key: value for key, value in live.items() if isinstance(value, DTensor)}
        stored = {key: tensor for key, tensor in self._stored_tensors(prefix).items() if key in sharded}
        mismatched = compare_tensors({key: sharded[key] for key in stored}, stored)
        missing = KeyReport(missing=[name] if own and not self.has_state(name) else [])
        self._refuse_together(merged(missing, mismatched))
        target = {key: sharded.get(key, self._placeholder(key)) for key in self.keys(prefix)}
        self._read(target)
        structure = self.contents.structure
        if structure is None:
            return self._retyped(name, target, own)
        branch = find(structure, name)
        return {} if branch is None else rebuild(branch, target, prefix)

    def _retyped(self, name: str, flat: State, own: State) -> State:
        """The nested state `name` of a checkpoint that has the names of `flat`, and not the types of their keys."""
        paths = self.contents.paths
        error: Exception | None = None
        nested: State = {}
        try:
            nested = retyped(name, {_below(name, paths.get(key), key): value for key, value in flat.items()}, own)
        except Untyped as found:
            error = CheckpointMismatch(str(self.path), str(found))
        except ValueError as found:
            error = CheckpointDamaged(str(self.path), str(found))
        self._peers.raise_together(error)
        return nested

    def _read(self, flat: State) -> None:
        # One entry: DCP looks at each at length.
        dcp.load({_ALL: flat}, self._reader, _OwnPlanner(self._folder), self._peers.group, str(self.path))

    def _prefix(self, model: Mapping[str, torch.Tensor]) -> str:
        # A model whose own names begin with "model." is in a weights-only checkpoint under just these.
        keys = self.contents
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
        if prefix not in self._names_under:
            stored = [key.removeprefix(prefix) for key in self._stored_tensors(prefix)]
            self._names_under[prefix] = {fqn: prefix + name for fqn, name in self._rules.renamed(stored).items()}
        return self._names_under[prefix]

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
        prefix = "model." if self.keys("model.") else ""
        return {fqn: key.removeprefix(prefix) for fqn, key in self._names(prefix).items()}

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
        if prefix not in self._tensors_under:
            self._tensors_under[prefix] = {
                key: TensorLike(torch.Size(tensor.shape), tensor.dtype)
                for key, tensor in self.contents.tensors.items()
                if key.startswith(prefix)
            }
        return self._tensors_under[prefix]

    def _placeholder(self, key: str) -> Any:
        stored = self.contents.tensors.get(key)
        return torch.empty(stored.shape, dtype=stored.dtype, device="cpu") if stored is not None else None

    def _refuse_together(self, report: KeyReport) -> None:
        self._peers.raise_together(CheckpointMismatch(str(self.path), str(report)) if report else None)


def _below(name: str, path: Sequence[str | int] | None, key: str) -> tuple[str | int, ...]:
    """What of `path`, which leads to `key`, comes after the part that is spelt `name`."""
    for depth in range(1, len(path or ())):
        if path is not None and ".".join(map(str, path[:depth])) == name:
            return tuple(path[depth:])
    return (key.removeprefix(f"{name}."),)


class _Reader(CheckpointReader):
    """Of the two, it is our planner that knows what there is."""

    def read_metadata(self) -> Metadata:
        return Metadata(state_dict_metadata={})


class _OwnPlanner(LoadPlanner):
    """Reads into a flat state. What it sends is an empty plan, and it goes on with its own when that comes back.

    Its own is made before it sends: what does not fit on one rank ends the load before a byte moves on any.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._state: State = {}
        self._wanted = Wanted()

    def set_up_planner(self, state_dict: State, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._state = state_dict[_ALL]

    @no_collection()
    def create_local_plan(self) -> LoadPlan:
        contents, self._wanted = self._folder.contents, Wanted()
        for key, target in self._state.items():
            if key in contents.objects:
                self._wanted.objects.append((key, partial(self._state.__setitem__, key)))
            else:
                self._wanted.regions += self._regions_of(key, contents.tensors[key], target)
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(central_plan, storage_data=self._wanted)

    def _regions_of(self, key: str, stored: StoredTensor, target: torch.Tensor) -> Iterator[Region]:
        """What of `stored` goes where in the memory of `target`. Raises `CheckpointMismatch` if it does not fit."""
        if tuple(target.shape) != stored.shape:
            found = f"shape {list(stored.shape)} in the checkpoint, {list(target.shape)} expected"
            raise CheckpointMismatch(str(self._folder.path), f"  {key}: {found}")
        if len(stored.chunks) == 1 and not isinstance(target, DTensor):
            yield Region(key, stored.chunks[0], (0,) * len(stored.shape), target.detach())
            return
        try:
            parts = list(parts_of(key, target))
        except ValueError as error:
            raise CheckpointMismatch(str(self._folder.path), f"  {error}") from None
        for offsets, memory in parts:
            yield from _regions(key, stored.chunks, offsets, memory)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("there are no items in our own plan")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        raise AssertionError("there are no items in our own plan")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        raise AssertionError("there are no items in our own plan")


def _misplaced(path: str, tensors: Mapping[str, Any]) -> CheckpointMismatch | None:
    """That one of `tensors` is not in memory what its placement says, if that is so."""
    for key, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            try:
                list(parts_of(key, tensor))
            except ValueError as error:
                return CheckpointMismatch(path, f"  {error}")
    return None


def _regions(key: str, chunks: Sequence[Chunk], offsets: Shape, local: torch.Tensor) -> Iterator[Region]:
    """What of each of `chunks` is in `local`, which is at `offsets` in the whole tensor."""
    sizes = tuple(local.shape)
    for chunk in chunks:
        if chunk.offsets == offsets and chunk.sizes == sizes:
            yield Region(key, chunk, (0,) * len(sizes), local)
            continue
        begins = tuple(map(max, chunk.offsets, offsets))
        lengths = tuple(
            min(stored + n, own + m) - begin
            for stored, n, own, m, begin in zip(chunk.offsets, chunk.sizes, offsets, sizes, begins, strict=True)
        )
        if min(lengths, default=1) <= 0:
            continue
        target = local
        for dim, (begin, own, length) in enumerate(zip(begins, offsets, lengths, strict=True)):
            target = target.narrow(dim, begin - own, length)
        yield Region(
            key, chunk, tuple(begin - stored for begin, stored in zip(begins, chunk.offsets, strict=True)), target
        )
