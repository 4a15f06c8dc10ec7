"""Values that several ranks hold under one name: which rank's is saved, and whether they are equal.

Training keeps parameters and the state of their optimizers equal on all ranks that hold them
(rank_comparison.py looks), so any of these ranks may write them, and the bytes are spread evenly. Nothing
guarantees that for the rest (buffers, the caller's states, settings): the lowest rank that has a value
writes it, so that a load gets what one rank had and never a mixture. At the first save or image of a start
the ranks compare these values, and one warning names those that differ. A value that is meant to differ
needs another name on each rank, as `PerRank` and the random generators give it.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.format.shards import LocalShard, parts_of
from torchtitan_lite.disk.digest import text_digest
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.log import logger

SHOWN = 4
"""Number of keys that a warning names; it counts the others."""

_WEIGHTS = ""
"""The only section of a weights-only checkpoint, whose keys do not begin with a state's name."""


def _none() -> Collection[str]:
    return ()


class Replicas:
    """Compares values across ranks, except the model's `parameters` (FQNs) and the keys that `may_differ`."""

    def __init__(self, parameters: Callable[[], Collection[str]] = _none, may_differ: Collection[str] = ()) -> None:
        self._parameters = parameters
        self._may_differ = frozenset(may_differ)
        self._warned: set[str] = set()

    def of_lowest_rank(self, state: State, items: Sequence[WriteItem]) -> frozenset[int]:
        """Return the numbers of the tensors in `items` that only the lowest rank that has them may write. Any rank."""
        is_same = self._sameness(state)
        return frozenset(n for n, item in enumerate(items) if item.tensor_data and not is_same(item.index.fqn))

    def compare(self, state: State, flat: State, peers: Peers, odd_containers: Mapping[str, int]) -> None:
        """Warn, on the coordinator, about keys whose values differ between ranks. **Collective**.

        Each rank sends one digest a state, and for states that differ one a key, if no lower rank has the same of it.
        `odd_containers` as in `warn`.
        """
        if peers.world_size == 1:
            return
        sections = self._sections(state, flat)
        summaries = peers.gather({name: _summary(digests) for name, digests in sections.items()})
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
            found = peers.scatter_answers(mine, _different)
        self.warn({**odd_containers, **found})

    def warn(self, different: Mapping[str, int]) -> None:
        """Warn of names of which ranks hold `different` values, each with the rank whose value is saved; once of each.

        On the coordinator, others give nothing.
        """
        new = [name for name in different if name not in self._may_differ | self._warned]
        self._warned.update(new)
        if not new:
            return
        named = ", ".join(f"{name} (rank {different[name]}'s is saved)" for name in new[:SHOWN])
        # A warning and not an error: which rank is right cannot be known here. With DDP it is the lowest one.
        logger.warning(
            "Ranks hold different values of %s%s. A checkpoint has one of each, and every rank gets that one when it "
            "is loaded. If each rank needs its own, wrap the state in PerRank; buffers under DDP follow rank 0 anyway",
            named,
            f" and {len(new) - SHOWN} more" if len(new) > SHOWN else "",
        )

    def _sections(self, state: State, flat: State) -> dict[str, dict[str, str]]:
        """Return the digests of values that must be equal on all ranks that have them, by state and key."""
        is_same, is_full = self._sameness(state), _is_full(state)
        sections: dict[str, dict[str, str]] = defaultdict(dict)
        for key, value in flat.items():
            is_compared_apart = is_same(key) and isinstance(value, torch.Tensor)
            if not is_compared_apart and key not in self._may_differ:
                section = sections[key.partition(".")[0] if is_full else _WEIGHTS]
                if isinstance(value, torch.Tensor):
                    section |= {_label(key, part): _digest(part.memory) for part in parts_of(key, value)}
                else:
                    section[key] = _digest(value)
        return sections

    def _sameness(self, state: State) -> Callable[[str], bool]:
        """Return a test whether training keeps a key equal on all ranks: a parameter, or its optimizer state."""
        parameters = frozenset(self._parameters())
        if not _is_full(state):
            return lambda key: key in parameters
        return lambda key: (
            key.startswith("optimizer.state.")
            or (key.startswith("model.") and key.removeprefix("model.") in parameters)
        )


def build_replicas(parameters: Callable[[], Collection[str]], states: Mapping[str, object]) -> Replicas:
    """Return the `Replicas` of a run. `states` may name entries in `may_differ_between_ranks`."""
    may_differ = [f"{name}.{key}" for name, s in states.items() for key in getattr(s, "may_differ_between_ranks", ())]
    return Replicas(parameters, may_differ)


def _is_full(state: State) -> bool:
    """Return whether `state` is a full checkpoint's; a weights-only one has no state "model", only tensors."""
    return isinstance(state.get("model"), Mapping)


def _summary(digests: Mapping[str, str]) -> str:
    return text_digest(part for pair in digests.items() for part in (pair[0].encode(), b"\0", pair[1].encode()))


def _different(per_rank: Sequence[Mapping[str, str]]) -> list[dict[str, int]]:
    """Return, for the coordinator alone, the keys of which ranks sent other digests, each with the lowest sender."""
    holders: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for rank, digests in enumerate(per_rank):
        for key, digest in digests.items():
            holders[key].append((rank, digest))
    different = {key: held[0][0] for key, held in holders.items() if len({digest for _, digest in held}) > 1}
    return [different, *({} for _ in per_rank[1:])]


def _label(key: str, part: LocalShard) -> str:
    """Return a label that differs between the shards of a tensor, and is the same for its replicas."""
    return f"{key} at {list(part.offsets)}" if any(part.offsets) else key


def _digest(value: Any) -> str:
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
