"""The policies that the pages show for a loop of your own do what the pages say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan_lite.checkpoint import CheckpointManager

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_save_policy_of_the_page_saves_at_powers_of_two() -> None:
    made, _ = _made_by(ROOT / "docs" / "intervals.md")
    manager = made["manager"]
    with manager:
        manager.load()
        manager.reset()
        assert [step for step in range(1, 11) if manager.save(step)] == [1, 2, 4, 8]
    assert _steps() == {1, 2, 4, 8}


def test_the_past_of_the_page_is_taken_by_a_loop() -> None:
    _, made = _made_by(ROOT / "docs" / "intervals.md")
    assert isinstance(made["manager"], CheckpointManager)
    made["manager"].close()


def test_the_rule_of_the_page_keeps_what_is_good_next_to_the_latest() -> None:
    (made,) = _made_by(ROOT / "docs" / "retention.md")
    manager = made["manager"]
    with manager:
        manager.load()
        for step, loss in enumerate((3.0, 1.0, 3.0, 1.0, 3.0, 3.0), start=1):
            manager.save(step, now=True, metrics={"loss": loss})
    assert _steps() == {2, 4, 5, 6}


def _made_by(page: Path) -> list[dict[str, Any]]:
    """Return what each program on `page` has made, of a small model."""
    found = []
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        model = nn.Linear(2, 2)
        names: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        exec(compile(block, page.name, "exec"), names)
        found.append(names)
    return found


def _steps() -> set[int]:
    return {int(path.name.removeprefix("step-")) for path in Path("outputs/checkpoint").glob("step-*")}
