"""The differences between two checkpoints, however each of them is sharded.

`compare` reads descriptions and small objects, no tensor: where both manifests have digests of whole tensors, these
say which values differ, too. Names, dtypes, shapes, containers, objects and values are the state, and make two
checkpoints different. The clocks of their runs, and where they come from (step, run, ranks, configuration, versions)
are listed, and do not: the same state of two runs is equal. Without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torchtitan_lite.checkpoint.examining.object_digests import digest_of, shown
from torchtitan_lite.checkpoint.examining.opened import OpenedCheckpoint
from torchtitan_lite.checkpoint.format.clocks import is_clock
from torchtitan_lite.checkpoint.format.contents import StoredTensor
from torchtitan_lite.checkpoint.format.structure import Branch
from torchtitan_lite.config.job_config import flat

NOTHING = "-"
"""Stands for what one of the two does not have."""

Pairs = dict[str, tuple[str, str]]
"""What is in A and what in B, in a few words, by name."""


@dataclass(frozen=True)
class Difference:
    """What differs between checkpoint A and checkpoint B."""

    only_in_a: dict[str, str]
    """Each key with what it is."""
    only_in_b: dict[str, str]
    tensors: Pairs
    """Tensors of another dtype or shape."""
    containers: Pairs
    """Containers of another type, and containers that only one of the two has."""
    objects: Pairs
    origin: Pairs
    """Where the two come from; no difference of their state."""
    num_tensors: int = 0
    """Tensors of the same dtype and shape in both."""
    num_objects: int = 0
    """Objects in both."""
    clocks: frozenset[str] = frozenset()
    """Clocks of the same form in both, whose values are no difference of their state."""
    other_clocks: frozenset[str] = frozenset()
    """Those with another digest."""
    known_equal: frozenset[str] = frozenset()
    """Tensors with the same digest in both manifests."""
    known_different: frozenset[str] = frozenset()
    """Tensors with another one."""
    unknown: tuple[str, ...] = ()
    """Tensors of the same dtype and shape without digests: only their values can be compared."""
    comparable: tuple[str, ...] = field(default=(), repr=False)
    """Tensors of the same shape in both, whose values can be compared."""

    @property
    def has_any(self) -> bool:
        """Return whether the states differ, as far as this was compared."""
        return self.is_beyond_values or bool(self.known_different)

    @property
    def is_beyond_values(self) -> bool:
        """Return whether more differs than the values of tensors."""
        return any(map(bool, (self.only_in_a, self.only_in_b, self.tensors, self.containers, self.objects)))


def compare(a: OpenedCheckpoint, b: OpenedCheckpoint) -> Difference:
    """Return the differences between `a` and `b`. Raises `CheckpointDamaged`, `CheckpointUnreadable` and so on."""
    in_a, in_b = a.contents.tensors, b.contents.tensors
    tensors = {
        key: (described(in_a[key]), described(in_b[key]))
        for key in in_a
        if key in in_b and _form(in_a[key]) != _form(in_b[key])
    }
    same = [key for key in in_a if key in in_b and key not in tensors]
    digests_a, digests_b = _digests(a), _digests(b)
    clocks = frozenset(key for key in same if is_clock(key, in_a))
    known = [key for key in same if key in digests_a and key in digests_b]
    equal = frozenset(key for key in known if digests_a[key] == digests_b[key])
    return Difference(
        only_in_a=_only_in(a, b),
        only_in_b=_only_in(b, a),
        tensors=tensors,
        containers=_containers(a.contents.structure, b.contents.structure),
        objects=_objects(a, b),
        origin=_origin(a, b),
        num_tensors=len(same),
        num_objects=sum(key in b.contents.objects for key in a.contents.objects),
        clocks=clocks,
        other_clocks=clocks & frozenset(known) - equal,
        known_equal=equal,
        known_different=frozenset(known) - equal - clocks,
        unknown=tuple(key for key in same if key not in clocks and (key not in digests_a or key not in digests_b)),
        comparable=tuple(key for key in in_a if key in in_b and in_a[key].shape == in_b[key].shape),
    )


def described(tensor: StoredTensor) -> str:
    """Return dtype and shape of `tensor`."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def _form(tensor: StoredTensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype), tuple(tensor.shape)


def _digests(checkpoint: OpenedCheckpoint) -> Mapping[str, str]:
    found: dict[str, str] = {}
    if checkpoint.manifest is not None:
        found = checkpoint.manifest.extra.get("tensor_digests", {})
    return found


def _only_in(one: OpenedCheckpoint, other: OpenedCheckpoint) -> dict[str, str]:
    """Return the keys of `one` that `other` has not, or has as another kind of thing."""
    tensors, objects = one.contents.tensors, one.contents.objects
    found = {key: described(tensors[key]) for key in tensors if key not in other.contents.tensors}
    for key, stored in objects.items():
        if key not in other.contents.objects:
            found[key] = "an object" if stored.item is not None else shown(stored.value)
    return found


def _objects(a: OpenedCheckpoint, b: OpenedCheckpoint) -> Pairs:
    found = {}
    for key, stored in a.contents.objects.items():
        other = b.contents.objects.get(key)
        if other is None or (stored.item is other.item is None and _is_same(stored.value, other.value)):
            continue
        digest_a, words_a = digest_of(a.home, key, stored)
        digest_b, words_b = digest_of(b.home, key, other)
        if digest_a != digest_b:
            found[key] = words_a, words_b
    return found


def _is_same(a: object, b: object) -> bool:
    """Return whether two values are certainly the same: types within containers are left to the digests."""
    return type(a) is type(b) and type(a) in (int, bool, str, type(None)) and a == b


def _containers(a: Branch | None, b: Branch | None) -> Pairs:
    """Return the containers that differ; nothing if one checkpoint does not record its containers."""
    return {} if a is None or b is None else dict(_differing(a, b, ""))


def _differing(a: Branch, b: Branch, name: str) -> Iterator[tuple[str, tuple[str, str]]]:
    if a.kind != b.kind:
        yield name or "the complete state", (a.kind, b.kind)
    below_a, below_b = _below(a), _below(b)
    for key in sorted(below_a.keys() | below_b.keys()):
        one, other = below_a.get(key), below_b.get(key)
        path = f"{name}.{key[0]}" if name else key[0]
        if one is not None and other is not None:
            yield from _differing(one, other, path)
        elif one is not None or other is not None:
            yield path, (one.kind if one else NOTHING, other.kind if other else NOTHING)


def _below(branch: Branch) -> dict[tuple[str, str], Branch]:
    """Return the containers in `branch` by key, and by its type."""
    pairs = zip(branch.keys, branch.children, strict=True)
    return {(str(key), type(key).__name__): child for key, child in pairs if child is not None}


def _origin(a: OpenedCheckpoint, b: OpenedCheckpoint) -> Pairs:
    both_ours = a.manifest is not None and b.manifest is not None
    of_a, of_b = dict(_facts(a, both_ours)), dict(_facts(b, both_ours))
    names = [*of_a, *(name for name in of_b if name not in of_a)]
    return {
        name: (of_a.get(name, NOTHING), of_b.get(name, NOTHING))
        for name in names
        if of_a.get(name, NOTHING) != of_b.get(name, NOTHING)
    }


def _facts(checkpoint: OpenedCheckpoint, in_detail: bool) -> Iterator[tuple[str, str]]:
    """Yield what is known; `in_detail` what only our manifests have, which says nothing next to one that has none."""
    manifest = checkpoint.manifest
    yield "written by", checkpoint.origin.value
    yield "kind", checkpoint.kind.value
    for name, value in (("step", checkpoint.step), ("ranks", checkpoint.world_size)):
        yield name, NOTHING if value is None else str(value)
    if manifest is not None and in_detail:
        yield "topology", checkpoint.topology or NOTHING
        lineage = manifest.lineage
        yield "run", lineage.run_id
        for name, step in (("parent step", lineage.parent_step), ("branched at step", lineage.branch_point)):
            yield name, NOTHING if step is None else str(step)
        yield from ((f"version of {name}", version) for name, version in sorted(manifest.versions.items()))
        for key, value in flat(checkpoint.config).items():
            yield key, value if isinstance(value, str) else shown(value)
