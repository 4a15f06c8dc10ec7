"""Values that several ranks hold under one name: which rank's is saved, and whether they are equal.

Training keeps parameters and the state of their optimizers equal on all ranks that hold them
(rank_comparison.py looks), so any of these ranks may write them, and the bytes are spread evenly. Nothing
guarantees that for the rest (buffers, the caller's states, settings): the lowest rank that has a value
writes it, so that a load gets what one rank had and never a mixture. At the first save or image of a start,
and when the structure changes, the ranks compare these values, and one warning names those that differ. A value
that is meant to differ needs another name on each rank, as `PerRank` and the random generators give it; a copy of a
rank's shard is no value of its name, and refused.
"""

from __future__ import annotations

import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.format.shards import local_of, local_shards
from torchtitan_lite.checkpoint.state.optimizer_state import OWNERS, STATE
from torchtitan_lite.disk.digest import text_digest
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import RanksDiffer
from torchtitan_lite.log import listed, logger

SHOWN = 4
"""Number of keys that a warning names; it counts the others."""
AS_DTENSOR = (
    "Keep it as a DTensor, as parameter.detach().clone() or torch.zeros_like(parameter) makes it, or wrap the state in "
    "PerRank to resume on as many ranks"
)
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9]")
"""What copies of parameters leave out of their names, or replace, to be buffers."""
_WEIGHTS = ""
"""The only section of a weights-only checkpoint, whose keys do not begin with a state's name."""


class Replicated:
    """Compares values across ranks, except the model's `parameters` (FQNs).

    Except also what one of the `states`, by name, has in `may_differ_between_ranks`.
    """

    def __init__(
        self, parameters: Callable[[], Collection[str]] = tuple, states: Mapping[str, object] | None = None
    ) -> None:
        self._parameters = parameters
        named = (states or {}).items()
        self._may_differ = {f"{name}.{key}" for name, s in named for key in getattr(s, "may_differ_between_ranks", ())}
        self._warned: set[str] = set()

    def compare(
        self, state: State, flat: State, peers: Peers, odd_containers: Mapping[str, int], owners: Mapping[str, str]
    ) -> None:
        """Warn, on the coordinator, about keys whose values differ between ranks. **Collective**.

        Each rank sends one digest a state, and for states that differ one a key, if no lower rank has the same of it.
        `odd_containers` as in `warn`; states that have `owners` may differ. Raises RanksDiffer, on all ranks, for a
        part of a sharded tensor.
        """
        if peers.world_size == 1:
            return
        sections = self._sections(state, flat)
        summaries = peers.gather({name: _joint_digest(digests) for name, digests in sections.items()})
        mine: dict[str, str] = {}
        is_suspicious = False
        for name in sorted({name for of_rank in summaries for name in of_rank}):
            held = [of_rank.get(name) for of_rank in summaries]
            if len({*held} - {None}) > 1:
                is_suspicious = True
                # Of a pipeline whose stages have other names each, one rank of each stage.
                if name in sections and held.index(held[peers.rank]) == peers.rank:
                    mine |= sections[name]
        found: dict[str, int] = {}
        if is_suspicious:
            copies = [key for key in mine if _is_full(state) and not key.startswith("model.")]
            found, part = peers.scatter_answers((mine, _parts_of_shards(flat, copies)), _different)
            if part:
                raise RanksDiffer(part, AS_DTENSOR)
        owned = (key.replace(f".{OWNERS}.", f".{STATE}.", 1) for key in owners)
        within = tuple(f"{name}." for name in (*odd_containers, *owned))
        self.warn({**{key: rank for key, rank in found.items() if not f"{key}.".startswith(within)}, **odd_containers})

    def warn(self, different: Mapping[str, int]) -> None:
        """Warn of names of which ranks hold `different` values, each with the rank whose value is saved; once of each.

        On the coordinator, others give nothing.
        """
        new = [name for name in different if name not in self._may_differ | self._warned]
        self._warned.update(new)
        if not new:
            return
        # A warning and not an error: which rank is right cannot be known here. With DDP it is the lowest one.
        logger.warning(
            "Ranks hold different values of %s. A checkpoint has one value of each, which a load gives to every "
            "rank. If each rank needs its own, wrap the state in PerRank; buffers under DDP follow rank 0 anyway",
            listed([f"{name} (rank {different[name]}'s is saved)" for name in new], most=SHOWN),
        )

    def _sections(self, state: State, flat: State) -> dict[str, dict[str, str]]:
        """Return the digests of values that must be equal on all ranks that have them, by state and key."""
        is_same, is_full = self.sameness(state), _is_full(state)
        sections: dict[str, dict[str, str]] = defaultdict(dict)
        for key, value in flat.items():
            is_compared_apart = is_same(key) and isinstance(value, torch.Tensor)
            if not is_compared_apart and key not in self._may_differ:
                section = sections[key.partition(".")[0] if is_full else _WEIGHTS]
                if isinstance(value, torch.Tensor):
                    for part in local_shards(key, value):
                        # Another label for each shard of a tensor, the same for its replicas.
                        label = f"{key} at {list(part.offsets)}" if any(part.offsets) else key
                        section[label] = _value_digest(part.memory)
                else:
                    section[key] = _value_digest(value)
        return sections

    def sameness(self, state: State) -> Callable[[str], bool]:
        """Return a test whether training keeps a key equal on all ranks: a parameter, or its optimizer state."""
        parameters = frozenset(self._parameters())
        if not _is_full(state):
            return lambda key: key in parameters
        return lambda key: (
            key.startswith("optimizer.state.")
            or (key.startswith("model.") and key.removeprefix("model.") in parameters)
        )


def _is_full(state: State) -> bool:
    """Return whether `state` is a full checkpoint's; a weights-only one has no state "model", only tensors."""
    return isinstance(state.get("model"), Mapping)


def _joint_digest(digests: Mapping[str, str]) -> str:
    return text_digest(part for pair in digests.items() for part in (pair[0].encode(), b"\0", pair[1].encode()))


def _parts_of_shards(flat: State, keys: Collection[str]) -> dict[str, str]:
    """Return those of `keys` that are a plain copy of this rank's shard of a tensor, each with what it is.

    Its shape and the end of its name say so, or its shape where it is an item of a list.
    """
    shards: dict[torch.Size, list[str]] = defaultdict(list)
    for key, value in flat.items() if keys else ():
        if isinstance(value, DTensor) and (local := local_of(value)).numel() > 1 and local.shape != value.shape:
            shards[local.shape].append(key)
    found = {}
    for key in keys:
        value = flat.get(key)
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            of = [other for other in shards.get(value.shape, ()) if _is_key_of_copy(key, other)]
            if of:
                found[key] = f"{key} has the shape {list(value.shape)} of one rank's shard of {of[0]}"
    return found


def _is_key_of_copy(key: str, original: str) -> bool:
    own, name = key.rpartition(".")[2], original.partition(".")[2]
    return own.isdecimal() or _NOT_IN_NAMES.sub("", key).endswith(_NOT_IN_NAMES.sub("", name))


def _different(
    per_rank: Sequence[tuple[Mapping[str, str], Mapping[str, str]]],
) -> list[tuple[dict[str, int], str]]:
    """Return, for the coordinator alone, the keys of which ranks sent other digests, each with the lowest sender.

    And for all ranks which of them is a part of a sharded tensor, as one of the senders says.
    """
    holders: dict[str, list[tuple[int, str]]] = defaultdict(list)
    parts: dict[str, str] = {}
    for rank, (digests, parts_of_shards) in enumerate(per_rank):
        parts |= parts_of_shards
        for key, digest in digests.items():
            holders[key].append((rank, digest))
    different = {key: held[0][0] for key, held in holders.items() if len({digest for _, digest in held}) > 1}
    part = next((parts[key] for key in different if key in parts), "")
    return [(different, part), *(({}, part) for _ in per_rank[1:])]


def _value_digest(value: Any) -> str:
    """Return a text that is the same for equal values on every rank; for a value that cannot be pickled, its type's."""
    if type(value) in (bool, int, float, type(None)):
        # The fast way for thousands of them, the settings of every parameter.
        return repr(value)
    try:
        return text_digest(_canonical(value))
    except Exception:
        return text_digest([type(value).__qualname__.encode()])


def _canonical(value: Any) -> Iterator[bytes | memoryview]:
    """Yield bytes that stand for `value`, whatever the order of sets and mappings and however parts are shared."""
    kind = type(value)
    yield f"{kind.__module__}.{kind.__qualname__}:".encode()
    if isinstance(value, torch.Tensor):
        yield from _elements(value)
    elif isinstance(value, Mapping):
        yield from _sorted(part for pair in value.items() for part in [text_digest(_canonical(pair))])
    elif isinstance(value, set | frozenset):
        yield from _sorted(text_digest(_canonical(part)) for part in value)
    elif isinstance(value, list | tuple):
        yield str(len(value)).encode()
        for part in value:
            yield from _canonical(part)
    elif isinstance(value, bytes | bytearray):
        yield bytes(value)
    elif value is None or isinstance(value, bool | int | float | complex | str | torch.dtype | torch.device):
        yield repr(value).encode("utf-8", "surrogatepass") + b";"
    else:
        yield pickle.dumps(value)


def _elements(tensor: torch.Tensor) -> Iterator[bytes | memoryview]:
    yield f"{tensor.dtype}{list(tensor.shape)}".encode()
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if plain.numel():
        yield plain.view(torch.uint8).numpy().data.cast("B")


def _sorted(digests: Iterable[str]) -> Iterator[bytes]:
    yield from (digest.encode() for digest in sorted(digests))
