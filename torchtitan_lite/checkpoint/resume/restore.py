"""Restores a run's objects from a checkpoint.

What can refuse a load comes first, on all ranks together: keys and shapes, the configuration, then the
small states (another corpus, for one). Tensors of the model change only after that. From then on only
the machine or a load hook of the user can fail, and a failure of one rank is raised on all. The random
generators come last, so that nothing draws from them in between.

Whether the loaded tensors equal the saved ones is verified where that is wanted. The manifest holds a digest of every
logical tensor that is the same for every topology. Each rank digests its own shards, the digests are summed over the
ranks, each shard once, and the sums must equal the manifest's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.format.flattening import flat_tensors
from torchtitan_lite.checkpoint.format.key_report import KeyReport
from torchtitan_lite.checkpoint.format.shards import Shape, local_shards
from torchtitan_lite.checkpoint.format.tensor_digest import TensorDigest, digest_chunk, finish
from torchtitan_lite.checkpoint.reading.files import Files
from torchtitan_lite.checkpoint.reading.load_rules import build_load_rules, unmatched_globs
from torchtitan_lite.checkpoint.reading.source import LoadSource, Wanted, recorded_section
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.checkpoint.reading.torchtitan_states import as_own_state, why_it_begins_fresh
from torchtitan_lite.checkpoint.resume.load_source import choose_source
from torchtitan_lite.checkpoint.resume.resume_report import ResumeReport, built_otherwise, other_groups, ways_out
from torchtitan_lite.checkpoint.state.model_wrapper import tensors_of
from torchtitan_lite.checkpoint.state.optimizer_state import ParameterSlot
from torchtitan_lite.checkpoint.state.per_rank import forget_iterator
from torchtitan_lite.checkpoint.state.rng import RNG, RngState
from torchtitan_lite.checkpoint.state.stateful import ModelWrapper, OptimizerWrapper, Stateful
from torchtitan_lite.collection import no_collection
from torchtitan_lite.config.drift import Rule, compare_configs
from torchtitan_lite.config.job_config import Checkpoint, JobConfig
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable, CheckpointUnsafe
from torchtitan_lite.log import counted, logger
from torchtitan_lite.store.manifest_fields import topology_in_words
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.stores import open_store, usable
from torchtitan_lite.torch_private import give_versions


def refuse_early(config: JobConfig, peers: Peers) -> None:
    """Raise what a load would refuse because of its step or configuration, before anything is built. **Collective**.

    A model of another size may not even fit into memory, and the load would refuse it anyway. Changes nothing.
    """
    checkpoint = config.checkpoint
    if not checkpoint.enable_checkpoint or checkpoint.create_seed_checkpoint:
        return
    store = open_store(checkpoint.folder, config.job.dump_folder)
    try:
        source = peers.on_coordinator(lambda: _usable_source(store, checkpoint))
    except (CheckpointDamaged, CheckpointUnreadable, CheckpointUnsafe):
        return  # The load meets it again, and reports it in an event.
    if source is not None and not source.model_only and source.recorded.config:
        refused = [
            f"  {change}" for change in compare_configs(source.recorded.config, config) if change.rule is Rule.REFUSED
        ]
        if refused:
            raise CheckpointMismatch(str(source.path), "\n".join(refused))


def _usable_source(store: StoresCheckpoints, config: Checkpoint) -> LoadSource | None:
    with usable(store.address):
        return choose_source(store, Wanted(config.load_step, config))


class Owners(NamedTuple):
    """The objects that take the state back."""

    model: ModelWrapper
    optimizer: OptimizerWrapper
    small: Mapping[str, Stateful] = {}  # never changed
    """All further states, by name."""


class Restore:
    """Loads `source` into its `owners`, in the order that the module describes. Every method is **collective**.

    Its bytes come from `files` if they are given, else from its folder.
    """

    def __init__(
        self,
        source: LoadSource,
        config: JobConfig,
        peers: Peers,
        owners: Owners,
        *,
        topology: str,
        files: Files | None = None,
    ) -> None:
        excluded, optimizer = source.excluded, owners.optimizer
        everything = not source.model_only
        self._source = source
        self._config = config
        self._peers = peers
        self._topology = topology
        self._model = owners.model
        self._optimizer = optimizer if optimizer and everything and "optimizer" not in excluded else None
        self._model_state: dict[str, Any] = {}
        self._slots: dict[str, ParameterSlot] = {}
        peers.together(self._read_owners)
        self._small = {name: s for name, s in owners.small.items() if everything and name not in excluded}
        self._restores_rng = everything and RNG not in excluded
        self.has_restored_rng = False
        """Whether `run` has given this rank the random generators that it had at the save."""
        # The initial weights of a new run may have any precision: an export has another one than training.
        self._cast = source.initial
        self._rules = rules = build_load_rules(config.checkpoint)
        self._stored = StoredCheckpoint(source.path, peers, rules, verify=source.verify(config.checkpoint), files=files)

    def _read_owners(self) -> None:
        self._model_state = self._model.state_dict()
        self._slots = self._optimizer.slots() if self._optimizer else {}

    def report(self) -> ResumeReport:
        """Return what `run` would do. Calls `check_state` of the small states that have it; changes nothing."""
        self._stored.read_contents()
        refused: list[str] = []
        keys = self._keys()
        for name, state in self._loaded.items():
            check = getattr(state, "check_state", None)
            if check is not None and name not in keys.missing:
                # `_read_small` raises its own errors on all ranks.
                refusal = _refusal_of_state(check, self._read_small(name))
                refused += [found for found in self._peers.gather(refusal) if found][:1]
        return self._report(keys, refused)

    @no_collection()
    def run(self) -> None:
        """Load everything.

        Raises `CheckpointMismatch`, and the error of a small state that refuses, on every rank, before the model
        changes. Raises what a load hook of an optimizer or a module raises, on every rank, after it has changed.
        """
        self._stored.read_contents()
        report = self._report(self._keys(), ())
        if report.refusals:
            # What the states refuse may be the cause: another tokenizer has other shapes.
            report = self.report()
            raise CheckpointMismatch(str(report.path), "\n".join([*report.refusals, *report.ways_out]))
        if not self._rules.is_partial:
            self._stored.verify_rest()
        self._warn_of_unmatched_globs()
        self._warn_of_other_optimizers()
        for change in report.changes:
            (logger.warning if change.rule is Rule.WARNED else logger.info)("Changed since the checkpoint: %s", change)
        self._warn_of_ignored_states()
        if self._source.recorded.has_nan:
            logger.warning(
                "%s was saved with NaN in its weights or optimizer; --checkpoint.load_step rolls back", report.path
            )
        if self._source.recorded.ranks_differ:
            logger.warning("%s was saved while ranks differed; --checkpoint.load_step loads another", report.path)
        for reason in report.fresh_states:
            logger.warning("%s", reason)
        for name, state in self._loaded.items():
            # Before the optimizer and the model: a state that refuses, such as a loader over other data, leaves both
            # unchanged.
            read = self._read_small(name)
            forget_iterator(state)
            self._load_together(state, read)
        self._begin_iterations()
        if self._optimizer is not None:
            self._load_together(self._optimizer, self._stored.read_optimizer(self._slots))
        whole = self._stored.read_model(self._model_state, cast=self._cast)
        self._model.keep([fqn for fqn in self._model_state if self._rules.wants(fqn)])
        # Most tensors were read in place. Extra state, and what hooks made of tensors, only the modules can load.
        self._peers.together(lambda: self._model.put_back(whole))
        if "load" in self._config.checkpoint.digest_tensors:
            self._verify()
        if self._restores_rng:
            self._restore_rng()

    def _warn_of_unmatched_globs(self) -> None:
        if self._rules.is_partial:
            fqns = [fqn for per_rank in self._peers.gather(list(self._model_state)) for fqn in per_rank]
            for glob in unmatched_globs(self._rules, fqns):
                logger.warning("checkpoint.load_include / load_exclude: %r matches no tensor of the model", glob)

    def _warn_of_other_optimizers(self) -> None:
        changed = self._stored.other_kinds(self._slots) if self._slots else {}
        for key, (name, there, here) in changed.items() if self._peers.is_coordinator else ():
            logger.warning(
                "The optimizer of %s has %s = %s, and continues with %s, as in the checkpoint. To start this "
                "run's optimizer from scratch: --checkpoint.exclude_from_loading=optimizer,lr_scheduler",
                name,
                key,
                here,
                there,
            )

    def _load_together(self, owner: Stateful | OptimizerWrapper, state: dict[str, Any]) -> None:
        """Give `state` to `owner`; raise what that raises on one rank on every rank."""
        self._peers.together(lambda: owner.load_state_dict(state))

    def _begin_iterations(self) -> None:
        """Have loaders make their iterators now: that draws random numbers, and `_restore_rng` comes later.

        torchdata's StatefulDataLoader makes one when its state is read, and otherwise at the first iteration, which in
        an uninterrupted run was before the save.
        """
        for name, state in self._loaded.items():
            if hasattr(type(state), "__iter__"):
                try:
                    state.state_dict()
                except Exception as error:
                    logger.warning(
                        "%s: its state cannot be read right after the load (%s). If its first iteration draws random "
                        "numbers, this run has others than one that was never interrupted",
                        name,
                        error,
                    )

    def _warn_of_ignored_states(self) -> None:
        known = {"model", "dataloader", RNG, *self._small, *self._source.excluded}
        known |= {"optimizer"} if self._optimizer is not None else set()
        # A path of one name is a tensor or value at the top, such as a weight under its bare FQN, and no state.
        paths = (path for path in self._stored.contents.paths.values() if len(path) > 1)
        left = sorted({str(path[0]) for path in paths} - known)
        if left and not self._source.model_only:
            logger.warning(
                "The checkpoint has states that this run does not load, and will not save: %s", ", ".join(left)
            )

    @cached_property
    def _fresh(self) -> dict[str, str]:
        """The states that begin fresh although everything is loaded, with the reason of each."""
        return {
            name: reason
            for name, state in self._small.items()
            if (reason := why_it_begins_fresh(name, state, self._stored.contents))
        }

    @property
    def _loaded(self) -> dict[str, Stateful]:
        """The small states that are loaded."""
        return {name: state for name, state in self._small.items() if name not in self._fresh}

    def _keys(self) -> KeyReport:
        lacks = self._stored.lacks_first_states(self._slots)
        self._model_state |= self._peers.together(lambda: self._stored_left_out(makes_states=lacks))
        self._model_state |= self._peers.together(self._resized)
        states = self._peers.together(lambda: [name for name, state in self._loaded.items() if state.state_dict()])
        return self._stored.report(self._model_state, self._slots, states, cast=self._cast)

    def _stored_left_out(self, *, makes_states: bool) -> dict[str, Any]:
        """Return the parameters that the checkpoint has although the run leaves them out, as they are frozen now.

        With `makes_states` the optimizer's first step also shows which classes its states are of.
        """
        if makes_states and self._optimizer is not None:
            self._optimizer.make_first_states()
            self._slots.update(self._optimizer.slots())  # In place: a rank alone may have to.
        return self._model.left_out(
            [fqn for fqn in self._stored.model_names(self._model_state) if self._rules.wants(fqn)]
        )

    def _resized(self) -> dict[str, Any]:
        """Return new memory for the buffers whose modules load them in the shape that the checkpoint has."""
        tensors, own = self._stored.contents.tensors, self._model_state
        names = {fqn: key for fqn, key in self._stored.model_names(own).items() if key in tensors and fqn in own}
        stored = {fqn: tensors[key] for fqn, key in names.items()}
        differ = tensors_of(own)
        differ = {name: each for name, each in differ.items() if name in stored and stored[name].shape != each.shape}
        return self._model.resized({name: stored[name] for name in differ}) if differ else {}

    def _report(self, keys: KeyReport, refused_states: Sequence[str]) -> ResumeReport:
        everything = not self._source.model_only
        # A state that is missing as a whole is an error with any strictness.
        strict = self._config.checkpoint.load_strictness == "error" or not {*keys.missing}.isdisjoint(self._loaded)
        names = self._stored.model_names(self._model_state) if keys.missing else {}
        frozen, own = self._model.frozen_names(), tensors_of(self._model_state)
        left_out_there = recorded_section(self._source.recorded.config, "checkpoint").get("save_trained_only")
        trainable = self._model.parameter_names() - frozen if left_out_there else ()
        known = [
            *ways_out(keys.missing, own, names, list(self._loaded), frozen, trainable),
            *other_groups(keys, self._model_state, {name for slot in self._slots.values() for name in slot.names}),
        ]
        recorded = self._source.recorded
        return ResumeReport(
            path=self._source.path,
            step=self._source.step,
            keys=keys,
            keys_are_refused=strict,
            changes=compare_configs(recorded.config, self._config) if everything and recorded.config else (),
            topology_before=recorded.topology,
            topology_now=self._topology,
            refused_states=refused_states,
            fresh_states=tuple(self._fresh.values()),
            ways_out=known or built_otherwise(keys, self._model_state),
        )

    def _read_small(self, name: str) -> dict[str, Any]:
        state = self._small[name]
        own = self._peers.together(state.state_dict)
        of_others = getattr(state, "is_of_another_rank", None)
        read = self._stored.read_state(name, own, *([of_others] if of_others else []))
        give_versions(read, own)  # Load hooks of modules read them.
        return as_own_state(name, read, own, self._stored)

    def _verify(self) -> None:
        if self._rules.changes_tensors or self._cast:
            logger.warning(
                "checkpoint.digest_tensors: nothing is compared after this load: with renames, casts or a lower "
                "load_strictness the loaded tensors need not equal the saved ones"
            )
            return
        digests = self._source.recorded.tensor_digests
        verify(str(self._source.path), self._state_to_verify, digests, self._peers)

    def _state_to_verify(self) -> dict[str, Any]:
        # A new state dict: the one that the load read into may hold copies, which prove nothing about the model.
        model = {fqn: value for fqn, value in self._model.state_dict().items() if self._rules.wants(fqn)}
        state: dict[str, Any] = {"model": model, **{name: state.state_dict() for name, state in self._loaded.items()}}
        if self._optimizer is not None:
            own = self._optimizer.state_dict()
            state["optimizer"] = {
                key: own[key] for key in own if self._rules.wants(key.partition(".")[2].rpartition(".")[0])
            }
        return state

    def _restore_rng(self) -> None:
        rng, rank = RngState(), self._peers.rank
        key = f"{RNG}.rank{rank}"
        # Only on the topology that saved them: on another one, rank N has another part of the work.
        has_own = bool(self._stored.keys(f"{key}.")) and self._source.recorded.topology == self._topology
        if not self._peers.max_over_ranks(not has_own)[0]:
            self._load_together(rng, self._stored.read_state(key, {}))
            self.has_restored_rng = True
            return
        rng.derive(torch.initial_seed(), self._source.step, rank)
        logger.info(
            "The random generators of %s do not fit %s: new ones begin, derived from seed, step and rank",
            topology_in_words(self._source.recorded.topology) or "the checkpoint",
            topology_in_words(self._topology),
        )


def _refusal_of_state(check: Any, state: dict[str, Any]) -> str:
    """Return what `check` raises for `state`; empty if it accepts it."""
    try:
        check(state)
    except Exception as error:
        return str(error)
    return ""


def verify(path: str, make_state: Callable[[], dict[str, Any]], expected: Mapping[str, str], peers: Peers) -> None:
    """Raise `CheckpointMismatch` for the first tensor of `make_state()` whose digest is not the `expected` one.

    `expected` has the manifest's digests by key; a key that is in only one of the two is skipped. What fails on one
    rank is raised on every rank. **Collective**.
    """
    if not expected:
        logger.warning("%s has no tensor digests: nothing to verify. Save with --checkpoint.digest_tensors=save", path)
        return
    per_rank = peers.gather(peers.together(lambda: _digest_shares(make_state(), expected)))
    found = _add_up([own for own, _ in per_rank])
    dtypes_and_shapes = {key: value for _, described in per_rank for key, value in described.items()}
    for key, digest in sorted(found.items()):
        if digest is None or finish(digest, *dtypes_and_shapes[key]).to_hex() != expected[key]:
            raise CheckpointMismatch(path, f"  {key} is not, after loading, what was saved")
    if not found:
        logger.warning("Verified nothing of %s: no tensor has the name that it was saved under", path)
        return
    logger.info(
        "Verified %s: %s what was saved", counted(len(found), "tensor"), "it is" if len(found) == 1 else "they are"
    )


def _digest_shares(
    state: dict[str, Any], expected: Mapping[str, str]
) -> tuple[dict[str, dict[Shape, TensorDigest]], dict[str, tuple[torch.dtype, Shape]]]:
    """Return this rank's part of each tensor's sum, and each tensor's dtype and shape."""
    tensors = flat_tensors(state)
    own = {key: _own_digests(key, tensor) for key, tensor in tensors.items() if key in expected}
    return own, {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}


def _own_digests(key: str, tensor: torch.Tensor) -> dict[Shape, TensorDigest]:
    """Return the digest of each part of `tensor` on this rank, by the part's offsets."""
    if isinstance(tensor, DTensor) and _is_counted_elsewhere(tensor):
        return {}
    return {
        tuple(part.offsets): digest_chunk(part.memory.cpu(), global_shape=tensor.shape, offsets=part.offsets)
        for part in local_shards(key, tensor)
    }


def _is_counted_elsewhere(tensor: DTensor) -> bool:
    """Return whether another rank of the tensor's mesh counts the part that this one has."""
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and any(
        place.is_replicate() and coordinate[dim] != 0 for dim, place in enumerate(tensor.placements)
    )


def _add_up(per_rank: list[dict[str, dict[Shape, TensorDigest]]]) -> dict[str, TensorDigest | None]:
    """Return the sum over the parts of each tensor; None where two ranks hold different values of one part.

    Ranks of different meshes may hold the same parts: under FSDP2 with tensor parallelism, a layer that the latter does
    not shard is sharded by FSDP2 once for each tensor-parallel rank.
    """
    parts: dict[str, dict[Shape, TensorDigest]] = {}
    differing: set[str] = set()
    for own in per_rank:
        for key, shares in own.items():
            known = parts.setdefault(key, {})
            for offsets, digest in shares.items():
                if known.setdefault(offsets, digest) != digest:
                    differing.add(key)
    return {key: None if key in differing else sum(known.values(), TensorDigest()) for key, known in parts.items()}
