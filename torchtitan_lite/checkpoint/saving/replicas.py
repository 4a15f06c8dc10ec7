"""What several ranks hold under one name: whose is saved, and whether they hold the same.

Parameters and the state of their optimizers are the same on all ranks that hold them, so any of these
ranks may write them, and the bytes are spread evenly. Nothing says that of the rest (buffers, states of
the caller's, settings), so it comes from the lowest rank that has it, all of it: what is loaded is then
what one rank had, and never a mixture. At the first save of a run the ranks compare what they hold of
the rest, and one warning names what differs. It cannot know what is meant to differ but by the name:
what is another on each rank has a name of its own on each (`PerRank`, the random generators).
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from torchtitan_lite.checkpoint.format.shards import Part, parts_of
from torchtitan_lite.disk.digest import text_digest
from torchtitan_lite.distributed.consensus import Peers
from torchtitan_lite.log import logger

SHOWN = 4
"""Keys that a warning names; the rest is a count."""

State = dict[str, Any]
_OPTIMIZER = "optimizer"
_WEIGHTS = ""
"""The one section of a checkpoint of weights alone, whose keys have no state's name before them."""


def _none() -> Collection[str]:
    return ()


class Replicas:
    """Knows the model's `parameters`, by FQN, and the keys of entries that `may_differ` between ranks."""

    def __init__(self, parameters: Callable[[], Collection[str]] = _none, may_differ: Collection[str] = ()) -> None:
        self._parameters = parameters
        self._may_differ = frozenset(may_differ)

    def of_lowest_rank(self, state: State, items: Sequence[WriteItem]) -> frozenset[int]:
        """Return the numbers of those tensors of `items` that only the lowest rank which has them may write."""
        is_same = self._sameness(state)
        return frozenset(n for n, item in enumerate(items) if item.tensor_data and not is_same(item.index.fqn))

    def compare(self, state: State, flat: State, peers: Peers) -> None:
        """Warn, on the coordinator, of what ranks hold differently under one name. **Collective**.

        A digest of each state travels; a digest of each key only of states that differ.
        """
        if peers.world_size == 1:
            return
        sections = self._sections(state, flat)
        summaries = peers.gather({name: _summary(digests) for name, digests in sections.items()})
        suspicious = {name for of_rank in summaries for name in of_rank if _may_differ(name, summaries)}
        if not suspicious:
            return
        mine = {key: digest for name in sorted(suspicious) for key, digest in sections.get(name, {}).items()}
        peers.scatter_answers(mine, _warn_of_differences)

    def _sections(self, state: State, flat: State) -> dict[str, dict[str, str]]:
        """The digests of what is to be the same on all ranks that have it, by state and key."""
        is_same, is_full = self._sameness(state), _is_full(state)
        sections: dict[str, dict[str, str]] = defaultdict(dict)
        for key, value in flat.items():
            if not is_same(key) and key not in self._may_differ:
                section = sections[key.partition(".")[0] if is_full else _WEIGHTS]
                if isinstance(value, torch.Tensor):
                    section |= {_label(key, part): _digest(part.memory) for part in parts_of(key, value)}
                else:
                    section[key] = _digest(value)
        return sections

    def _sameness(self, state: State) -> Callable[[str], bool]:
        """Whether a key is of a parameter, or of its optimizer's state."""
        parameters = frozenset(self._parameters())
        if not _is_full(state):
            return lambda key: key in parameters
        return lambda key: (
            key.startswith("optimizer.state.")
            or (key.startswith("model.") and key.removeprefix("model.") in parameters)
        )


def build_replicas(parameters: Callable[[], Collection[str]], states: Mapping[str, object]) -> Replicas:
    """Return what is known of a run with these `states`, which may name entries that differ between ranks."""
    may_differ = [f"{name}.{key}" for name, s in states.items() for key in getattr(s, "may_differ_between_ranks", ())]
    return Replicas(parameters, may_differ)


def _is_full(state: State) -> bool:
    """Whether the model is one state of several; else its tensors are all that there is."""
    return isinstance(state.get("model"), Mapping)


def _summary(digests: Mapping[str, str]) -> tuple[str, str]:
    """A digest of the keys, and one of what they hold."""
    return text_digest(key.encode() + b"\0" for key in digests), text_digest(d.encode() for d in digests.values())


def _may_differ(name: str, summaries: Sequence[Mapping[str, tuple[str, str]]]) -> bool:
    """Whether ranks that have the state `name` may hold a key of it differently."""
    held = {summary[name] for summary in summaries if name in summary}
    names = {keys for keys, _ in held}
    # The optimizers of pipeline stages have other parameters, and so no settings in common.
    return len(held) > len(names) if name == _OPTIMIZER else len(held) > 1


def _warn_of_differences(per_rank: Sequence[Mapping[str, str]]) -> list[None]:
    holders: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for rank, digests in enumerate(per_rank):
        for key, digest in digests.items():
            holders[key].append((rank, digest))
    different = [(key, held[0][0]) for key, held in holders.items() if len({digest for _, digest in held}) > 1]
    if different:
        named = ", ".join(f"{key} (rank {rank}'s is saved)" for key, rank in different[:SHOWN])
        more = f" and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
        logger.warning(
            "Ranks hold different values of %s%s. A checkpoint has one of each, and every rank gets that one when it "
            "is loaded. If each rank needs its own, wrap the state in PerRank; buffers under DDP follow rank 0 anyway.",
            named,
            more,
        )
    return [None] * len(per_rank)


def _label(key: str, part: Part) -> str:
    """Another one for each shard of a tensor, and the same for its replicas."""
    return f"{key} at {list(part.offsets)}" if any(part.offsets) else key


def _digest(value: Any) -> str:
    """A text that equal values have on every rank. Of what can be neither read nor pickled: its type's."""
    if type(value) in (bool, int, float, type(None)):
        return repr(value)  # There are thousands, of every parameter's settings.
    try:
        return text_digest(_canonical(value))
    except Exception:
        return text_digest([type(value).__qualname__.encode()])


def _canonical(value: Any) -> Iterator[bytes | memoryview]:
    """Bytes that say `value`, whatever the order of its sets and mappings, and which of its parts are one object."""
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
