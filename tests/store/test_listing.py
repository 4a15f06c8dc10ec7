"""What is in a folder of checkpoints, by its names."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_lite.store.layout import Listing


def listing(folder: Path, *names: str) -> Listing:
    for name in names:
        (folder / name).mkdir()
    return Listing(folder)


@pytest.mark.parametrize("prefix", [".trash", ".replaced"])
@pytest.mark.parametrize(
    ("taken", "following"), [((), 1), ((1,), 2), ((1, 2), 3), ((3,), 4), ((2, 10), 11), ((9, 10), 11)]
)
def test_the_next_number_is_above_all_taken_ones(
    tmp_path: Path, prefix: str, taken: tuple[int, ...], following: int
) -> None:
    of_other_steps = (f"{prefix}-step-50-70", f"{prefix}-step-15-80")
    found = listing(tmp_path, *(f"{prefix}-step-5-{number}" for number in taken), *of_other_steps)
    free = found.free_trash(5) if prefix == ".trash" else found.free_replaced(5)
    assert free == tmp_path / f"{prefix}-step-5-{following}"
