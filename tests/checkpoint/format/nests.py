"""Nested states of everything that a checkpoint supports, for hypothesis."""

from __future__ import annotations

import collections
from typing import Any

import torch
from hypothesis import strategies as st

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2, 0]), 1j, (), [], set(), b""])
)
keys = st.one_of(
    st.text(max_size=3),
    st.sampled_from(["a", "1", "0", "True", "None", "()"]),
    st.integers(-3, 3) | st.integers(),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
    st.binary(max_size=2),
    st.tuples(st.integers(0, 2), st.text(max_size=1)),
)
tensors = st.sampled_from([torch.ones(2), torch.tensor(3), torch.zeros(0, 2, dtype=torch.bfloat16)])
leaves = scalars | tensors | st.lists(scalars, max_size=3) | st.tuples(scalars, tensors) | st.sets(st.integers())


def _has_names_of_its_own(mapping: dict[Any, Any]) -> bool:
    return len({str(key).partition(".")[0] for key in mapping}) == len(mapping)


def _mappings(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    plain = st.dictionaries(keys, values, max_size=4).filter(_has_names_of_its_own)
    return st.one_of(
        plain,
        plain.map(collections.OrderedDict),
        plain.map(lambda items: _filled(collections.Counter(), items)),
        plain.map(lambda items: collections.defaultdict(list, items)),
        plain.map(lambda items: collections.defaultdict(None, items)),
    )


def _filled(mapping: Any, items: dict[Any, Any]) -> Any:
    for key, value in items.items():
        mapping[key] = value
    return mapping


def nests() -> st.SearchStrategy[Any]:
    """Return mappings of mappings, lists and leaves, in which every entry has its own flat name."""
    values = st.recursive(leaves, lambda inner: _mappings(inner) | st.lists(inner, max_size=3), max_leaves=10)
    return _mappings(values)
