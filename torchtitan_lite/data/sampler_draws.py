"""The order of a sampler that has no state: a resumed epoch, and all later ones, have the samples of a straight run.

torchdata resumes such a sampler by iterating it from its beginning and dropping what was delivered, some times over. A
sampler that draws its order, or counts its epochs, would give another one. So each iteration notes what its beginning
depends on: the values of the sampler's attributes, its own random generators among them, and the global generators it
draws from, as they were before. A resume puts these back before each beginning, and gives the attributes what they were
at the save at the end.

A sampler that continues drawing from a generator that others draw from, too, and one that keeps an iterator or a new
object from one epoch to the next, is refused with the state.

All of this module repairs torchdata: a loader that saves what its sampler depends on needs none of it.
"""

from __future__ import annotations

import inspect
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice, repeat
from types import CellType, ModuleType
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset, Sampler

from torchtitan_lite.data.generators import (
    KINDS,
    MOST_ITEMS,
    Generators,
    Part,
    States,
    assign,
    global_generators,
    global_objects,
    set_state,
    states_of,
    value_parts,
)
from torchtitan_lite.data.plain_values import Copy, NoValueError, copy_of, plain, restored
from torchtitan_lite.errors import ConfigError

_WAYS_OUT = "or give the sampler state_dict and load_state_dict, which torchdata then uses"
_LISTS: tuple[type, ...] = (type(iter(())), type(iter([])), type(iter(range(0))))
"""Iterators that change nothing and draw nothing."""
_MOST_NOTES = 2
"""Of one generator that others draw from, too: before the draws of `iter`, and before those of the first sample."""


class ReplayedSampler:
    """Stands for `sampler` in a loader of `dataset`. Its other attributes are those of `sampler`.

    The loader takes `at_once` samples with nothing between them. `hides_state` is for a sampler with a wrong state.
    """

    def __init__(self, sampler: Iterable[Any], dataset: object, *, at_once: int, hides_state: bool) -> None:
        own = {"_sampler": sampler, "_attributes": Attributes(sampler, dataset), "_at_once": at_once}
        self.__dict__.update(
            own, _hides_state=hides_state, _iteration=None, _replayed={}, _has_moved=False, _is_begun=False
        )

    def __iter__(self) -> Iterator[Any]:
        taken: int = self._replayed.get("taken", 0)
        if self._replayed and self._is_begun and self._iteration.taken == taken:
            iteration: _Iteration = (
                self._iteration
            )  # torchdata begins more than once, and drops all but the last iterator.
        else:
            iteration = self._begun()
            # All draws are in the load, before the global generators are restored.
            deque(islice(iteration, taken), maxlen=0)
        if iteration.resumes_itself or iteration.is_list:
            return iteration.iterator
        return chain(repeat(None, taken), iteration) if taken else iteration  # torchdata drops those that were taken.

    def _begun(self) -> _Iteration:
        if self._replayed:
            self._attributes.put(self._replayed["began"])
        has_moved = self._has_moved or (self._iteration is not None and self._iteration.has_moved)
        iteration = _Iteration(
            self._sampler, self._attributes, self._at_once, replayed=self._replayed.get("drawn"), has_moved=has_moved
        )
        is_begun = bool(self._replayed) and not iteration.resumes_itself
        self.__dict__.update(_iteration=iteration, _has_moved=has_moved, _is_begun=is_begun)
        return iteration

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict") and self.__dict__["_hides_state"]:
            raise AttributeError(name)
        return getattr(self.__dict__["_sampler"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._sampler, name, value)

    def kept(self, *, is_finished: bool) -> dict[str, Any]:
        """Return what a replay of the present iteration needs, as plain values; empty if it needs nothing.

        Raises ConfigError if a replay would have other samples.
        """
        iteration = self._iteration
        if iteration is None or iteration.resumes_itself:
            return {}
        now, name = self._attributes.note(), type(self._sampler).__name__
        carried = iteration.carried | (self._attributes.strangers(now, has_moved=True) if is_finished else {})
        _refuse_strangers(name, carried)
        if iteration.shared:
            raise ConfigError(
                f"dataloader: {name} draws samples after the first from {_rng_text(iteration.shared)}, from which "
                "something else draws between them, so no checkpoint could be resumed with the same samples. Draw "
                "them from a generator of the sampler alone, in an attribute, or all when the iteration begins, "
                f"{_WAYS_OUT}."
            )
        began, made = iteration.began.values, self._attributes.made.values
        moved = {path for path, copy in now.values.items() if copy != began.get(path)}
        changed = {path for path, copy in began.items() if copy != made.get(path)} | moved
        generators = {path for path, copy in began.items() if isinstance(copy, tuple)}
        kept = {
            "began": _with_copies(name, {path: began[path] for path in began if path in changed | generators}),
            "now": _with_copies(name, {path: now.values[path] for path in now.values if path in moved}),
            "drawn": iteration.drawn,
        }
        is_needed = any(kept.values()) or self._attributes.has_iterators
        return kept | {"taken": iteration.taken} if is_needed else {}

    def begin_replay(self, kept: dict[str, Any], loader: dict[str, Any]) -> None:
        """Have all iterations begin as that of `kept`, until `end_replay`. `loader` is the state for torchdata's."""
        takes_samples = "_snapshot" not in loader  # Workers take samples ahead: with these, the load takes all of them.
        replayed = {**kept, "taken": kept["taken"] * takes_samples} if kept else {}
        self.__dict__.update(_replayed=replayed, _is_begun=False)

    def end_replay(self) -> None:
        """Give the attributes the values that they had at the save: others may have changed them, too."""
        replayed, self.__dict__["_replayed"] = self._replayed, {}
        if self._iteration is not None:
            self._iteration.end_replay()
        self._attributes.put(replayed.get("began", {}) | replayed.get("now", {}))


class _Iteration(Iterator[Any]):
    """One iteration of `sampler`, which notes what a replay of it begins with."""

    def __init__(
        self,
        sampler: Iterable[Any],
        attributes: Attributes,
        at_once: int,
        *,
        replayed: list[tuple[int, States]] | None,
        has_moved: bool,
    ) -> None:
        self._attributes, self._at_once, self._replayed = attributes, at_once, replayed
        self.taken, self.shared = 0, ""
        self.drawn: list[tuple[int, States]] = []
        """States of generators before draws for that many taken samples, -1 is `iter`, if others drew meanwhile."""
        self.carried: dict[str, object] = {}
        self.began: Noted = attributes.note()
        self._generators = global_generators() | self.began.generators
        self._strangers = attributes.strangers(self.began, has_moved=has_moved)
        self._last = states_of(self.began.generators)
        self._look(-1)
        self.iterator: Iterator[Any] = iter(sampler)
        self._note()
        self.is_list, self.resumes_itself = type(self.iterator) in _LISTS, hasattr(self.iterator, "state_dict")
        if self.is_list:
            self._find_carried()

    def end_replay(self) -> None:
        """Draw from the generators as they are, from now on."""
        self._replayed = None

    @property
    def has_moved(self) -> bool:
        """Return whether iterators in attributes may have other positions since."""
        return self.is_list or self.taken > 0

    def __next__(self) -> Any:
        if self.taken % self._at_once == 0:
            self._look(self.taken)
        try:
            sample = next(self.iterator)
        except StopIteration:
            self._note()
            raise
        if self.taken == 0:
            self._find_carried()
        self.taken += 1
        if self.taken % self._at_once == 0:
            self._note()
        return sample

    def _find_carried(self) -> None:
        """Find the strangers that the beginning has left where they were."""
        others = self._attributes.note().others if self._strangers else {}
        self.carried = {path: each for path, each in self._strangers.items() if others.get(path, (None,))[0] is each}

    def _look(self, taken: int) -> None:
        """Look at the generators before draws; in a replay, give them first the states of what is replayed."""
        now = states_of(self._generators)
        if self._replayed is not None:
            for name, state in (self._last | dict(self._replayed).get(taken, {})).items():
                if name in now and state != now[name]:  # What torchdata itself draws comes in between.
                    set_state(self._generators[name], state)
                    now[name] = state
        self._looked = taken, now

    def _note(self) -> None:
        """Note the generators that the sampler has drawn from since the last look."""
        (taken, before), after = self._looked, states_of(self._generators)
        drawn = {name for name, state in after.items() if state != before[name]}
        if noted := {name for name in drawn if before[name] != self._last.get(name)}:
            self.drawn.append((taken, {name: before[name] for name in sorted(noted)}))
        for name in drawn:
            self._last[name] = after[name]
            if sum(name in states for _, states in self.drawn) > _MOST_NOTES:
                self.shared = name
        self._looked = taken, after


def replayed_sampler(loader: Any) -> ReplayedSampler | None:
    """Put a `ReplayedSampler` into a StatefulDataLoader; None if it has no sampler, or one that resumes by itself."""
    at_once, owner, name = 1, loader, "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(owner, name)
    if type(sampler).__module__.startswith("torchdata.") and hasattr(sampler, "sampler"):
        # It cuts the order of this one into batches.
        at_once, owner, name, sampler = sampler.batch_size, sampler, "sampler", sampler.sampler
    # The state of this one has no epoch, and one of the end of an epoch leaves out the next.
    hides_state = type(sampler).__name__ == "StatefulDistributedSampler"
    is_exact = type(sampler).__module__.startswith("torchdata.") or hasattr(sampler, "state_dict")
    if (is_exact and not hides_state) or isinstance(loader.dataset, IterableDataset):
        return None
    replayed: ReplayedSampler = sampler
    if not isinstance(sampler, ReplayedSampler):
        replayed = ReplayedSampler(sampler, loader.dataset, at_once=at_once, hides_state=hides_state)
    object.__setattr__(owner, name, replayed)  # A loader refuses to change its sampler by setattr.
    return replayed


def _rng_text(generator: str) -> str:
    named = {"torch": "torch", "numpy": "NumPy", "python": "Python"}
    return f"the global generator of {named[generator]}" if generator in named else f"its {generator.lstrip('.')}"


def _refuse_strangers(name: str, found: dict[str, object]) -> None:
    for path, value in found.items():
        raise ConfigError(
            f"dataloader: {name} keeps {path.lstrip('.')}, a {type(value).__name__}, from one iteration to the next, "
            "and no checkpoint can have it, so the samples after a resume would be others. Make it in `__iter__`, "
            f"keep numbers, lists and random generators in its place, {_WAYS_OUT}."
        )


def _with_copies(name: str, copies: dict[str, Copy]) -> dict[str, Any]:
    written = {}
    for path, copy in copies.items():
        try:
            written[path] = plain(copy)
        except NoValueError as error:
            raise ConfigError(
                f"dataloader: {name} changes {path.lstrip('.')}, which has a {error} that no checkpoint can have. "
                f"Keep numbers, lists and random generators in its place, {_WAYS_OUT}."
            ) from error
    return written


# The attributes of an object as values: noted at one time, put back at another, also in another process.
#
# What counts are all values that the object refers to, through its attributes, those of other objects, short containers
# and closures, each once. Datasets, classes, modules of torch, and what the standard library needs for threads and
# files are not looked into. An object, or an iterator, that was not there when `Attributes` was made has no place in
# another process: `strangers` names it.


_MOST_OBJECTS = 1000
_OF_THE_PROCESS = frozenset({"logging", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "_io"})
_CONTAINERS = (list, tuple, dict, deque, CellType)
_Others = dict[str, tuple[object, int]]
"""What is no value, by path, with the length of a container that is not looked into."""


@dataclass(frozen=True)
class Noted:
    """What one look at all attributes found."""

    values: dict[str, Copy]
    """By the path of the attribute: `.sampler.epoch`."""
    others: _Others
    generators: Generators
    """Those among the values, each once."""


class Attributes:
    """The attributes of `root`; `left_out` is an object that has a state of its own."""

    def __init__(self, root: object, left_out: object) -> None:
        self._root, self._left_out = root, left_out
        self._known: _Others | None = None
        self.made = self.note()
        """What was found when this was made."""
        self._known = self.made.others

    def note(self) -> Noted:
        """Return copies of all values, and what is none."""
        values: dict[str, Copy] = {}
        others: _Others = {}
        generators: Generators = {}
        for path, _, (_, _, value), copy in self._walk():
            if copy is not None:
                values[path] = copy
                if isinstance(value, KINDS) and all(value is not each for each in generators.values()):
                    generators[path] = value
            elif not isinstance(value, _CONTAINERS):
                others[path] = (value, 0)
            elif not isinstance(value, CellType) and len(value) > MOST_ITEMS:
                others[path] = (value, len(value))
        return Noted(values, others, generators)

    def put(self, values: Mapping[str, Any]) -> None:
        """Give the attributes what `plain_values.plain` returned for each."""
        live = {path: (owner, key, value) for path, owner, (_, key, value), _ in self._walk()}
        owners = {path: value for path, (_, _, value) in live.items()} | {"": self._root}
        for path, value in values.items():
            parent, _, name = path.rpartition(".")
            owner, key, before = live.get(path, (owners.get(parent), name, None))
            if name.isidentifier() or path in live:
                after = restored(value, before)
                if after is not before and owner is not None:
                    assign(owner, key, after)

    @property
    def has_iterators(self) -> bool:
        """Return whether there were iterators, whose positions are in no value, when this was made."""
        return any(_is_bare_iterator(value) for value, _ in self.made.others.values())

    def strangers(self, noted: Noted, *, has_moved: bool) -> dict[str, object]:
        """Return what has no place in another process, by path; also the iterators of the beginning if `has_moved`."""
        found = {}
        for path, (value, length) in noted.others.items():
            before, length_before = self.made.others.get(path, (None, 0))
            is_known = before is value and length_before == length
            if _is_bare_iterator(value):
                if (has_moved or not is_known) and not _is_at_an_end(value):
                    found[path] = value
            elif not is_known:
                found[path] = value
        return found

    def _walk(self) -> Iterator[tuple[str, object, Part, Copy | None]]:
        """Return path, owner and part of each attribute, with a copy if it is a value."""
        seen = {id(each) for each in (self._left_out, self._root, *global_objects())}
        waiting: list[tuple[str, object]] = [("", self._root)]
        for prefix, owner in waiting:  # It grows meanwhile.
            for part in value_parts(prefix, owner):
                path, _, value = part
                if id(value) in seen:
                    continue
                copy = _copy_or_none(value)
                yield path, owner, part, copy
                if copy is None and len(seen) < _MOST_OBJECTS and self._is_looked_into(path, value):
                    seen.add(id(value))
                    waiting.append((path, value))

    def _is_looked_into(self, path: str, value: object) -> bool:
        if isinstance(value, _CONTAINERS):
            return True
        if self._known is not None and self._known.get(path, (None, 0))[0] is not value:
            return False  # Its values have no place.
        is_dataset = hasattr(type(value), "__getitem__") and not _holds_sampler(value)
        is_other = isinstance(value, nn.Module | ModuleType | type)
        return not (is_dataset or is_other or type(value).__module__.partition(".")[0] in _OF_THE_PROCESS)


def _holds_sampler(value: object) -> bool:
    """Return whether `value` is a dataset of indices, as Lightning makes one of a sampler to share it among ranks."""
    return any(isinstance(each, Sampler) for each in getattr(value, "__dict__", {}).values())


def _copy_or_none(value: object) -> Copy | None:
    try:
        return copy_of(value)
    except NoValueError:
        return None


def _is_bare_iterator(value: object) -> bool:
    """Return whether `value` is an iterator whose position is in no attribute."""
    return isinstance(value, Iterator) and not hasattr(value, "__dict__")


def _is_at_an_end(iterator: Any) -> bool:
    """Return whether `iterator` has not begun, and will be the same in another process, or has no more items."""
    if inspect.isgenerator(iterator):
        return inspect.getgeneratorstate(iterator) in (inspect.GEN_CREATED, inspect.GEN_CLOSED)
    return operator.length_hint(iterator, 1) == 0
