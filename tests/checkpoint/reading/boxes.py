"""Strategies of hypothesis for the boxes that a tensor can be cut into."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import strategies as st

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes)"""


@st.composite
def shapes(draw: st.DrawFn, max_dims: int = 4, max_size: int = 7) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, max_size), max_size=max_dims)))


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Draw boxes that cover a tensor of `shape` exactly once, made by successive cuts, in any order."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dim]))
        boxes.append((offsets, (*sizes[:dim], at, *sizes[dim + 1 :])))
        moved = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        boxes.append((moved, (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])))
    return draw(st.permutations(boxes))


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Draw boxes that cover a tensor of `shape` as a mesh of ranks does."""
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    cells = product(*(list(pairwise(cut)) or [(0, 0)] for cut in cuts))
    return [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]


@st.composite
def inside(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Draw any box inside a tensor of `shape`."""
    bounds = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)
