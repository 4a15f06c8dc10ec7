"""Every file of a checkpoint, damaged in every way: a load finds and names it, and resumes from an older one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.small_run import SmallRun
from tests.checkpoint.with_manifest import tensors_at
from torchtitan_lite.disk.digest import BLOCK_BYTES
from torchtitan_lite.store import layout

FLIPS = 50
Damage = Callable[[bytes, bytes], bytes | None]
"""Returns the damaged bytes of a file, from its bytes and those of another step; None: the file is deleted."""


class Big:
    """A state that takes several blocks of a file."""

    def __init__(self) -> None:
        self.tensors = {name: torch.rand(BLOCK_BYTES // 4) for name in ("one", "two")}

    def state_dict(self) -> dict[str, Any]:
        return {**self.tensors, "note": {"n": 3}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def flips(size: int) -> Iterator[tuple[int, int]]:
    """Yield places and bits to flip: the first byte, the last, and others anywhere."""
    chance = random.Random(size)
    places = [0, size - 1, *(chance.randrange(size) for _ in range(FLIPS - 2))]
    return ((place, 1 << chance.randrange(8)) for place in places)


def flipped(data: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[place] ^= bit
    return bytes(changed)


OTHERS: dict[str, Damage] = {
    "cut in the middle": lambda data, other: data[: len(data) // 2],
    "cut by a byte": lambda data, other: data[:-1],
    "longer by a byte": lambda data, other: data + b"\0",
    "zeroed": lambda data, other: bytes(len(data)),
    "a zeroed page": lambda data, other: data[:100] + bytes(min(4096, len(data) - 100)) + data[100 + 4096 :],
    "emptied": lambda data, other: b"",
    "deleted": lambda data, other: None,
    "that of another step": lambda data, other: other,
}


@pytest.fixture
def trained(start_run: StartRun) -> SmallRun:
    run = start_run(interval=1, states={"big": Big()}).finished(2)
    return run


def probe(
    trained: SmallRun, start_run: StartRun, caplog: pytest.LogCaptureFixture, file: str, data: bytes | None
) -> tuple[str, set[str]]:
    """Return what a load finds, and in which tensors, if the `file` of step 2 is `data`. Restores the file."""
    path = trained.root / "step-2" / file
    before = path.read_bytes()
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    run = start_run(interval=100, states={"big": Big()})
    assert run.manager.load(), "there is an older one"
    assert (run.manager.loaded_step, run.train_state.step) == (1, 1), "the damaged one is not resumed"
    run.manager.close()
    finding = f"{path.parent} has no manifest"
    keys: set[str] = set()
    if data is None and file == layout.MANIFEST:
        assert finding in caplog.text, "it may be another tool's, so it stays as it is"
    else:
        assert run.events.steps("quarantined") == [2]
        figures = run.events.figures("fallback")
        finding, keys = figures["finding"], set(figures["keys"])
        (trained.root / "step-2.corrupt").rename(trained.root / "step-2")
    for document in (trained.root / "step-2").glob("*.json"):
        if document.name != "manifest.json":
            document.unlink()
    path.write_bytes(before)
    return finding, keys


@pytest.mark.promise(
    "Any change of any file of a checkpoint is found, and the report names the file and the tensors in it.",
    section="loaded",
)
@pytest.mark.slow
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_all_damage_is_found_and_named(
    file: str, trained: SmallRun, start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    folder = trained.root / "step-2"
    data, other = (folder / file).read_bytes(), (trained.root / "step-1" / file).read_bytes()
    found = 0
    for place, bit in flips(len(data)):
        finding, keys = probe(trained, start_run, caplog, file, flipped(data, place, bit))
        assert file in finding, finding
        assert tensors_at(folder, file, place) <= keys, finding
        found += 1
    for how, damage in OTHERS.items():
        damaged = damage(data, other)
        if damaged == data:
            continue  # Two steps have the same description if no object moved.
        finding, _ = probe(trained, start_run, caplog, file, damaged)
        is_gone = damaged is None and file == "manifest.json"  # Without a manifest it may be another tool's.
        assert file in finding or is_gone, (how, finding)
        found += 1
    print(f"{file}: {found} of {found} damages found and named")
    assert found >= FLIPS + len(OTHERS) - 1
    run = start_run(interval=100, states={"big": Big()}).resumed()
    assert run.manager.loaded_step == 2, "undamaged, it is resumed"
