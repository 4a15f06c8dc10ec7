"""A small set of cases that combines every two entries of any two kinds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

Row = tuple[str, ...]
Pair = tuple[int, str, int, str]


def covering(kinds: Mapping[str, Sequence[str]], fits: Callable[[Row], bool]) -> list[Row]:
    """Return rows, with an entry of each kind, that together have every pair which any fitting row has.

    The result is deterministic. An entry that no pair needs is the first one of its kind.
    """
    entries = list(kinds.values())
    missing = dict.fromkeys(
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(entries)), 2)
        for a, b in itertools.product(entries[i], entries[j])
    )
    rows = []
    while missing:
        pair = next(iter(missing))
        row = _row_with(pair, entries, missing, fits)
        missing.pop(pair)
        if row is not None:
            rows.append(row)
            for held in pairs_of(row):
                missing.pop(held, None)
    return rows


def with_each_entry(rows: Sequence[Row]) -> list[int]:
    """Return the places of rows that together have every entry which a row has, not the fewest."""
    seen: set[tuple[int, str]] = set()
    chosen = []
    for number, row in enumerate(rows):
        entries = set(enumerate(row))
        if not entries <= seen:
            chosen.append(number)
            seen |= entries
    return chosen


def pairs_of(row: Row) -> list[Pair]:
    """Return the pairs in `row`."""
    return [(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)]


def _row_with(
    pair: Pair, entries: Sequence[Sequence[str]], missing: Mapping[Pair, None], fits: Callable[[Row], bool]
) -> Row | None:
    """Return a row with `pair` and many of the `missing` pairs; None if no row fits."""
    i, a, j, b = pair
    row = [kind[0] for kind in entries]
    row[i], row[j] = a, b
    free = [at for at in range(len(entries)) if at not in (i, j)]
    if not fits(tuple(row)):
        options = itertools.product(*(entries[at] for at in free))
        for chosen in options:
            for at, entry in zip(free, chosen, strict=True):
                row[at] = entry
            if fits(tuple(row)):
                break
        else:
            return None
    for at in free:
        best = _num_missing(row, missing)
        for entry in entries[at]:
            tried = [*row[:at], entry, *row[at + 1 :]]
            if (count := _num_missing(tried, missing)) > best and fits(tuple(tried)):
                row, best = tried, count
    return tuple(row)


def _num_missing(row: Sequence[str], missing: Mapping[Pair, None]) -> int:
    return sum(pair in missing for pair in pairs_of(tuple(row)))
