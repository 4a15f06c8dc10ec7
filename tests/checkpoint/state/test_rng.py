"""The random generators of a rank, with those of the accelerators that it sees."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torchtitan_lite.checkpoint.state import rng
from torchtitan_lite.checkpoint.state.rng import RngState
from torchtitan_lite.checkpoint.state.run_state import LateSeedWatch


class Devices:
    """Accelerators with a generator each, of which `current` is the one that this rank uses."""

    def __init__(self, count: int, current: int = 0) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in range(count)]
        self.current = current

    def device_count(self) -> int:
        return len(self.generators)

    def get_rng_state(self, *device: int) -> torch.Tensor:
        return self.generators[device[0] if device else self.current].get_state()

    def set_rng_state(self, new_state: torch.Tensor, *device: int) -> None:
        self.generators[device[0] if device else self.current].set_state(new_state)

    def draw(self) -> list[float]:
        return [float(torch.rand(1, generator=generator)) for generator in self.generators]


@pytest.mark.parametrize("batch_size", [2, 8])
def test_a_look_for_late_seeds_never_raises(batch_size: int) -> None:
    """Neither where new tensors have no memory, nor at a loader without batches."""
    loader = DataLoader(TensorDataset(torch.ones(3)), batch_size=batch_size, drop_last=True)
    watch = LateSeedWatch()
    with torch.device("meta"):
        watch.after_load(3)
    iterator = iter(loader)
    torch.rand(1)
    for step in (4, 5):
        watch.at_step(step)
    assert len(iterator) == (batch_size == 2)


def state_of(monkeypatch: pytest.MonkeyPatch, kind: str, devices: Devices | None) -> dict[str, torch.Tensor]:
    """Return the state of the generators of this process and of `devices`."""
    monkeypatch.setattr(rng, "accelerators", lambda: {} if devices is None else {kind: devices})
    return RngState().state_dict()


def load(monkeypatch: pytest.MonkeyPatch, kind: str, devices: Devices, state: dict[str, torch.Tensor]) -> None:
    monkeypatch.setattr(rng, "accelerators", lambda: {kind: devices})
    RngState().load_state_dict(state)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_the_generators_of_all_devices_of_a_rank_continue(
    kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, again = Devices(count, count - 1), Devices(count, count - 1)
    devices.draw()
    state = state_of(monkeypatch, kind, devices)
    load(monkeypatch, kind, again, state)
    assert again.draw() == devices.draw()
    assert (f"{kind}_devices" in state) == (count > 1)


def test_a_rank_on_another_device_continues_its_own_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, fewer = Devices(3, current=2), Devices(2, current=1)
    state = state_of(monkeypatch, "cuda", devices)
    before = fewer.generators[0].get_state()
    load(monkeypatch, "cuda", fewer, state)
    assert torch.equal(fewer.generators[1].get_state(), devices.generators[2].get_state())
    assert torch.equal(fewer.generators[0].get_state(), before)


def test_a_state_of_a_host_without_accelerators_loads_on_one_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(2)
    load(monkeypatch, "cuda", devices, state_of(monkeypatch, "cuda", None))
    assert devices.draw() == Devices(2).draw()


def test_the_accelerators_of_this_host_are_found() -> None:
    found = torch.accelerator.current_accelerator(check_available=True)
    assert (found is None) or found.type in RngState().state_dict()
