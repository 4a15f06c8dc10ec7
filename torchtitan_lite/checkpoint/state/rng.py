"""The random generators of one rank.

Python's, NumPy's and torch's, on the CPU and on the accelerators that this rank sees (CUDA, ROCm, XPU, MPS): dropout
and user code draw from these. On the topology that saved them they continue bit for bit. On another topology each rank
begins new ones, derived from (seed, step, rank), so that every resume from that step draws the same numbers. In a
checkpoint they are tensors.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

RNG = "rng"
"""The name of the generators' state in a checkpoint, with a key for each rank below it."""

_MASK_63 = 2**63 - 1


class RngState:
    """The generators of this rank as a `Stateful`, saved under a key with the rank in it."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        version, internal, gauss = random.getstate()
        assert version == 3, "the only version since Python 3.2"
        state = {
            "python": torch.tensor(internal, dtype=torch.int64, device="cpu"),
            "python_gauss": _optional(gauss),
            **_numpy_state(),
            "torch": torch.get_rng_state(),
        }
        for kind, devices in accelerators().items():
            state[kind] = devices.get_rng_state()
            # A model may be spread over them.
            if (count := devices.device_count()) > 1:
                state[f"{kind}_devices"] = torch.stack([devices.get_rng_state(index) for index in range(count)])
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        gauss = state_dict["python_gauss"].tolist()
        random.setstate((3, tuple(state_dict["python"].tolist()), gauss[0] if gauss else None))
        _set_numpy_state(state_dict)
        torch.set_rng_state(state_dict["torch"].cpu())
        for kind, devices in accelerators().items():
            every = state_dict.get(f"{kind}_devices", ())
            if len(every) == devices.device_count():
                for index, state in enumerate(every):
                    devices.set_rng_state(state.cpu().clone(), index)  # set_state of torch 2.13 crashes on a view.
            # Last, because this rank may have another one of the devices now.
            if kind in state_dict:
                devices.set_rng_state(state_dict[kind].cpu())

    def derive(self, seed: int, step: int, rank: int) -> None:
        """Seed all generators from (seed, step, rank): the same numbers for the same three, others for others."""
        digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
        seed_all(int.from_bytes(digest, "little") & _MASK_63)


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy, which takes 32 bits, and torch."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def accelerators() -> dict[str, Any]:
    """Return the module of the accelerators of this host, such as `torch.cuda`, by its name; empty without any.

    Without an index, its functions mean the device that this rank uses.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return {} if found is None else {found.type: torch.get_device_module(found)}


def _numpy_state() -> dict[str, torch.Tensor]:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    return {
        "numpy": torch.from_numpy(state["state"]["key"].astype(np.int64)),
        "numpy_position": torch.tensor(state["state"]["pos"], dtype=torch.int64, device="cpu"),
        "numpy_gauss": _optional(state["gauss"] if state["has_gauss"] else None),
    }


def _set_numpy_state(state: dict[str, torch.Tensor]) -> None:
    gauss = state["numpy_gauss"].tolist()
    key = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, int(state["numpy_position"]), int(bool(gauss)), gauss[0] if gauss else 0.0))


def _optional(value: float | None) -> torch.Tensor:
    return torch.tensor([] if value is None else [value], dtype=torch.float64, device="cpu")
