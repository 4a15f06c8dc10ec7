"""A stored checkpoint: its contents, and reading them into the states of the run.

The contents are known before any data is read, so a report of what does not fit comes first. Small objects
are never loaded with an unrestricted unpickler. States that grow (a loss history) are read at the size
they were saved with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import chain
from typing import Any

from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.checkpoint.format.flattening import State, flat_tensors, refuse_piece
from torchtitan_lite.checkpoint.format.key_report import KeyReport, compare_tensors, merged
from torchtitan_lite.checkpoint.format.shards import PLAIN_TENSORS, local_shards
from torchtitan_lite.checkpoint.format.structure import Path, rebuild, without
from torchtitan_lite.checkpoint.reading.entries import Untyped, retyped, room_for
from torchtitan_lite.checkpoint.reading.files import Files
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder, Verify
from torchtitan_lite.checkpoint.reading.load_rules import EVERYTHING, LoadRules
from torchtitan_lite.checkpoint.reading.reader import CheckpointReader
from torchtitan_lite.checkpoint.reading.regions import RankReads, planned
from torchtitan_lite.checkpoint.reading.shared_reads import SharedReads
from torchtitan_lite.checkpoint.reading.stored_model import StoredModel
from torchtitan_lite.checkpoint.reading.stored_optimizer import RankNumbers, StoredOptimizer, read_listed_groups
from torchtitan_lite.checkpoint.state.optimizer_state import OF_OPTIMIZERS, OWNER_KEYS, ParameterSlot, nested_tensors
from torchtitan_lite.collection import no_collection
from torchtitan_lite.distributed.peers import Peers, together_or_worst
from torchtitan_lite.errors import CheckpointDamaged, CheckpointMismatch
from torchtitan_lite.log import logger
from torchtitan_lite.store.place import Place


class StoredCheckpoint:
    """The checkpoint folder at `path`, ours or plain DCP's, loaded by `rules`."""

    def __init__(
        self,
        path: Place,
        peers: Peers,
        rules: LoadRules = EVERYTHING,
        *,
        verify: Verify = "full",
        files: Files | None = None,
    ) -> None:
        self.path = path
        self._peers = peers
        self._rules = rules
        rank, world_size = peers.rank, peers.world_size
        self._folder = CheckpointFolder(path, verify, files=files, rank=rank, world_size=world_size, record_of=rank)
        self._blocks = self._folder.files.reader()
        self._optimizer: StoredOptimizer | None = None
        self._fitting: tuple[Mapping[str, Any], Mapping[str, ParameterSlot], bool] | None = None
        """The model, slots and `cast` of a report without a difference: nothing needs to be compared again."""

    @property
    def contents(self) -> Contents:
        """Its contents, which all ranks read: each looks at its share of the files.

        Raises `CheckpointDamaged`, `CheckpointUnsafe` or `CheckpointUnreadable`, on this rank only.
        """
        return self._folder.contents

    def verify_rest(self) -> None:
        """Verify the parts of the files that no tensor is read from, if `verify` has all verified. **Collective**.

        If they are not what was committed, or cannot be read, on one rank, it raises the worst error on every rank.
        """
        reader, peers = CheckpointReader(self._folder, blocks=self._blocks), self._peers
        together_or_worst(lambda: reader.verify_rest(peers.rank, peers.world_size), peers, str(self.path))

    def read_contents(self) -> None:
        """Read its contents on every rank, and raise the worst error on all of them. **Collective**."""
        together_or_worst(lambda: self.contents, self._peers, str(self.path))

    def keys(self, prefix: str) -> list[str]:
        """Return the flat keys that begin with `prefix`, which has a dot in it."""
        return [key for key in self._keys_by_state.get(prefix.partition(".")[0], ()) if key.startswith(prefix)]

    def has_state(self, name: str) -> bool:
        """Return whether the checkpoint has the nested state `name`, even an empty one."""
        prefix = f"{name}."
        return bool(self.keys(prefix)) or self.contents.container(name) is not None

    def model_names(self, model: Mapping[str, Any]) -> dict[str, str]:
        """Map the model's name of each stored entry, after the renames, to the checkpoint's flat key."""
        return self._model.keys(model)

    def read_objects(self, keys: Sequence[str]) -> State:
        """Return the objects under `keys`, none of which is a tensor. **Collective**."""
        return self._read(lambda: dict.fromkeys(keys))

    @no_collection()
    def report(
        self,
        model: Mapping[str, Any],
        slots: Mapping[str, ParameterSlot],
        states: Sequence[str] = (),
        *,
        cast: bool = False,
    ) -> KeyReport:
        """Return how the checkpoint differs from all of these, joined over all ranks. Reads no tensors. **Collective**.

        It covers only what is to be loaded: no optimizer if `slots` is empty, and only the named `states`. Raises
        `CheckpointMismatch` on every rank if a tensor's memory has not the shape that its placements give it.
        """
        optimizer = self._optimizer_for(slots)

        def own() -> KeyReport:
            _check_placements(str(self.path), model, slots)
            reports = [
                self._model.report(model, cast=cast),
                KeyReport(missing=[name for name in states if not self.has_state(name)]),
            ]
            return merged(*reports, *([optimizer.report()] if slots else []))

        report = self._joint_report(own)
        self._fitting = None if report else (model, slots, cast)
        return report

    def _apply_strictness(self, report: KeyReport) -> None:
        if report and self._rules.strictness == "error":
            raise CheckpointMismatch(str(self.path), str(report))
        if report and self._rules.strictness == "warn":
            logger.warning("%s does not fit this run in all parts; what fits is loaded:\n%s", self.path, report)

    @no_collection()
    def read_model(self, model: Mapping[str, Any], *, cast: bool = False) -> State:
        """Read into the live tensors of `model`, from `model.<fqn>` or, in a weights-only checkpoint, bare FQNs.

        Returns the complete state dict, for the model's `load_state_dict`. The checkpoint must have exactly the keys
        that the rules choose, with the model's shapes and, unless `cast`, its dtypes; otherwise this raises
        `CheckpointMismatch` on every rank before it reads any data. **Collective**.
        """
        if self._fitting is None or self._fitting[0] is not model or self._fitting[2] != cast:
            self._apply_strictness(self._joint_report(lambda: self._model.report(model, cast=cast)))
        read = self._read(lambda: self._model.targets(model, cast=cast))
        return self._peers.together(lambda: self._model.assembled(model, read))

    @no_collection()
    def read_optimizer(self, slots: Mapping[str, ParameterSlot]) -> State:
        """Read and return the optimizers' flat state, for their `load_state_dict`. **Collective**.

        Live tensors are read in place. Settings (`param_groups.*`) that only this version of torch has are not in it.
        """
        optimizer = self._optimizer_for(slots)
        if self._fitting is None or self._fitting[1] is not slots:
            self._apply_strictness(self._joint_report(optimizer.report))
        read = self._read(optimizer.targets)
        flat = self._peers.together(lambda: optimizer.assembled(read))
        name = f"optimizer.{OF_OPTIMIZERS}"
        if self.contents.structure is None and not self.has_state(name):
            return flat  # It does not say that there is none.
        return flat | {OF_OPTIMIZERS: self.read_state(name, {})}

    def lacks_first_states(self, slots: Mapping[str, ParameterSlot]) -> bool:
        """Return whether it has tensors that are made of others where `slots` have no state. **Collective**."""
        return self._optimizer_for(slots).lacks_first_states(slots)

    def other_kinds(self, slots: Mapping[str, ParameterSlot]) -> dict[str, tuple[str, Any, Any]]:
        """Return the settings that make another optimizer: a parameter, the checkpoint's value, that of `slots`."""
        return self._optimizer_for(slots).other_kinds()

    @no_collection()
    def read_state(self, name: str, own: State, leave_out: Callable[[str], bool] = lambda key: False) -> State:
        """Return the nested state `name` as it was saved; sharded tensors are read into those of `own`. **Collective**.

        Top-level entries for whose name `leave_out` returns True are not read. On every rank, raises
        `CheckpointMismatch` if the checkpoint has no such state, or one with other sharded tensors, or if it is of
        plain DCP and neither it nor `own` shows the type of a key.
        """
        prefix = f"{name}."
        sharded = self._peers.together(lambda: self._sharded(name, own))
        wanted = [key for key in self.keys(prefix) if not leave_out(key.removeprefix(prefix).partition(".")[0])]
        target = self._read(lambda: {key: sharded.get(key, room_for(self.contents, key)) for key in wanted})
        if self.contents.structure is None:
            return self._peers.together(lambda: self._retyped(name, target, own))
        branch = self.contents.container(name)
        return {} if branch is None else rebuild(without(branch, leave_out), target, prefix)

    def _sharded(self, name: str, own: State) -> dict[str, DTensor]:
        """Return the sharded tensors of `own` by flat key. Raises `CheckpointMismatch` if the checkpoint's differ."""
        live = flat_tensors({name: own})
        try:
            for key, value in live.items():
                refuse_piece(key, value)
        except TypeError as error:
            raise CheckpointMismatch(str(self.path), f"  {error}") from None
        sharded = {key: value for key, value in live.items() if isinstance(value, DTensor)}
        stored = {key: self.contents.tensors[key] for key in sharded if key in self.contents.tensors}
        mismatched = compare_tensors({key: sharded[key] for key in stored}, stored)
        report = merged(KeyReport(missing=[name] if own and not self.has_state(name) else []), mismatched)
        if report:
            raise CheckpointMismatch(str(self.path), str(report))
        return sharded

    def _retyped(self, name: str, flat: State, own: State) -> State:
        """Return the nested state `name` made of `flat`, from a checkpoint that does not store the types of keys."""
        entries: dict[Path, Any] = {}
        for key, value in flat.items():
            path = self.contents.paths.get(key, ())
            depths = (at for at in range(1, len(path)) if ".".join(map(str, path[:at])) == name)
            depth = next(depths, None)
            entries[path[depth:] if depth else (key.removeprefix(f"{name}."),)] = value
        try:
            return retyped(name, entries, own)
        except Untyped as found:
            raise CheckpointMismatch(str(self.path), str(found)) from None
        except ValueError as found:
            raise CheckpointDamaged(str(self.path), str(found)) from None

    def _read(self, make: Callable[[], State]) -> State:
        """Read into the flat state that `make` returns, and return it. **Collective**.

        If `make` fails on one rank, for lack of memory for example, every rank raises its error, and none reads.
        """
        path = str(self.path)

        def plan() -> tuple[State, RankReads]:
            state = make()
            return state, planned(state, self._folder)

        state, wanted = together_or_worst(plan, self._peers, path)
        shared = SharedReads(wanted, self._peers)

        def read() -> None:
            try:
                CheckpointReader(self._folder, blocks=blocks).read(wanted)
            finally:
                shared.leave()

        is_alone = self._folder.verify == "full_alone"
        with (
            nullcontext(self._blocks) if is_alone else self._folder.files.shared_reader(self._blocks, shared) as blocks
        ):
            together_or_worst(read, self._peers, path)
        return state

    @cached_property
    def _keys_by_state(self) -> Mapping[str, Sequence[str]]:
        """The flat keys by what is before their first dot: each state asks for its own, among those of all ranks."""
        keys: dict[str, list[str]] = {}
        for key in self.contents:
            keys.setdefault(key.partition(".")[0], []).append(key)
        return keys

    @cached_property
    def _model(self) -> StoredModel:
        return StoredModel(self.contents, self._rules)

    def _optimizer_for(self, slots: Mapping[str, ParameterSlot]) -> StoredOptimizer:
        """Return the stored optimizer. **Collective**."""
        if self._optimizer is None or self._optimizer.slots is not slots:
            names = self._model.names("model." if self.keys("model.") else "")
            listed = read_listed_groups(self.contents, slots, names, self._peers, self.read_objects)
            manifest, peers = self._folder.manifest_alone, self._peers
            numbers = RankNumbers(peers.rank, peers.world_size, manifest.world_size if manifest is not None else 0)
            owners = self._read_owners()
            self._optimizer = StoredOptimizer(self.contents, self._rules, names, listed, slots, numbers, owners)
        return self._optimizer

    def _read_owners(self) -> State:
        """Return what says which ranks had a state, by key; plain DCP has it in items. **Collective**."""
        objects = {key: each for key, each in self.contents.objects.items() if key.startswith(OWNER_KEYS)}
        in_items = [key for key, each in objects.items() if each.item is not None]
        return {key: each.value for key, each in objects.items()} | (self.read_objects(in_items) if in_items else {})

    def _joint_report(self, own: Callable[[], KeyReport]) -> KeyReport:
        """Return the joint report of all ranks. **Collective**.

        Each rank may have a part of the model, so a key is unexpected only if it is on every rank. What differs
        otherwise travels only where something does.
        """
        mine = self._peers.together(own)
        differs, none = self._peers.max_over_ranks(bool(mine.missing or mine.mismatched), not mine.unexpected)
        unexpected = [] if none else self._peers.on_all_ranks({*mine.unexpected}, self._known_names())
        if not differs:
            return KeyReport(unexpected=unexpected)
        together = merged(*self._peers.gather(dataclasses.replace(mine, unexpected=())))
        missing = list(dict.fromkeys(together.missing))
        return KeyReport(missing=missing, unexpected=unexpected, mismatched=together.mismatched)

    def _known_names(self) -> list[str]:
        """Return every name that a report may call unexpected, in an order that is the same on every rank."""
        own = self._folder.own_keys
        return list(dict.fromkeys([*(key for key in self.contents if key not in own), *self._model.names("model.")]))


def _check_placements(path: str, model: Mapping[str, Any], slots: Mapping[str, ParameterSlot]) -> None:
    """Raise `CheckpointMismatch` for the first tensor whose memory does not have the shape that its placements give."""
    states = ((f"{name}.{key}", value) for name, slot in slots.items() for key, value in slot.state.items())
    try:
        for key, value in chain(model.items(), ((name, slot.like) for name, slot in slots.items()), states):
            for tensor in nested_tensors(value) if type(value) not in PLAIN_TENSORS else ():
                list(local_shards(key, tensor))
    except ValueError as error:
        raise CheckpointMismatch(path, f"  {error}") from None
