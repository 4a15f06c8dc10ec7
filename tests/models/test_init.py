"""Initial parameters as a function of seed, FQN and index."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import nn

from torchtitan_lite.models import init
from torchtitan_lite.models.init import Normal, init_parameters

MASK = (1 << 64) - 1


def reference(seed: int, fqn: str, index: int) -> float:
    """Return the definition in Python's integers: the sum of the twelve 16-bit fields of three splitmix64 outputs."""
    state = int.from_bytes(hashlib.blake2b(f"{seed}:{fqn}".encode(), digest_size=8).digest(), "little")
    state += 3 * index * 0x9E3779B97F4A7C15
    total = 0
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        bits = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
        bits ^= bits >> 31
        total += sum((bits >> shift) & 0xFFFF for shift in (0, 16, 32, 48))
    return (total - 12 * 65535 // 2) / 65536


def filled(seed: int = 0, normal: Normal = Normal(std=1.0), shape: tuple[int, int] = (50, 40)) -> torch.Tensor:  # noqa: B008 - frozen
    model = nn.Linear(shape[1], shape[0], bias=False)
    init_parameters(model, seed, lambda fqn: normal)
    return model.weight.detach()


def test_values_are_those_of_the_definition() -> None:
    values = filled(seed=5).flatten()
    for index in (0, 1, 39, 40, 1999):
        assert values[index].item() == reference(5, "weight", index)


def test_the_values_of_a_seed_never_change_between_versions() -> None:
    assert filled(seed=5).flatten()[:3].tolist() == [-0.423614501953125, -1.0566253662109375, -3.2267303466796875]


def test_values_are_normal() -> None:
    values = filled(shape=(400, 500))
    assert values.mean().item() == pytest.approx(0.0, abs=0.01)
    assert values.std().item() == pytest.approx(1.0, abs=0.01)
    within = [(values.abs() < bound).float().mean().item() for bound in (1.0, 2.0, 3.0)]
    assert within == pytest.approx([0.6827, 0.9545, 0.9973], abs=0.005)


def test_neighbours_rows_and_columns_are_uncorrelated() -> None:
    values = filled(shape=(400, 500))
    for other in (values.roll(1, 0), values.roll(1, 1)):
        assert (values * other).mean().item() == pytest.approx(0.0, abs=0.01)


def test_mean_std_and_cutoff_are_applied() -> None:
    values = filled(normal=Normal(std=0.5, mean=10.0, cutoff=1.0))
    assert values.min().item() == 9.5
    assert values.max().item() == 10.5
    assert torch.equal(filled(normal=Normal(std=0.0, mean=1.0)), torch.ones(50, 40))


def test_another_seed_or_another_fqn_is_another_parameter() -> None:
    model = nn.ModuleDict({"a": nn.Linear(9, 9, bias=False), "b": nn.Linear(9, 9, bias=False)})
    init_parameters(model, 1, lambda fqn: Normal(std=1.0))
    first, second = (parameter.detach().clone() for parameter in model.parameters())
    init_parameters(model, 2, lambda fqn: Normal(std=1.0))
    assert not torch.equal(first, second)
    assert not torch.equal(first, model.get_parameter("a.weight"))


def test_the_values_do_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = filled()
    monkeypatch.setattr(init, "_CHUNK", 7)
    assert torch.equal(filled(), whole)


def test_the_random_state_of_torch_is_neither_used_nor_changed() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = filled()
    torch.rand(3)
    assert torch.equal(filled(), first)
    torch.set_rng_state(before)
