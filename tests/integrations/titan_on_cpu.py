"""torchtitan's trainer on processors: five things of it that need a GPU are replaced, and nothing else.

    torchrun ... titan_on_cpu.py --module titan_config --config small ...

A change of one of the five in torchtitan fails here by its name.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def replace(owner: Any, name: str, value: Any) -> Any:
    """Replace the attribute `name` of `owner`; return what it was."""
    assert hasattr(owner, name), f"torchtitan or torch has no {name} in {owner} any more"
    before = getattr(owner, name)
    setattr(owner, name, value)
    return before


class NoDeviceMemory:
    """The peaks of a device that has no memory of its own."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return SimpleNamespace(
            max_active_gib=0.0,
            max_active_pct=0.0,
            max_reserved_gib=0.0,
            max_reserved_pct=0.0,
            num_alloc_retries=0,
            num_ooms=0,
        )

    def reset_peak_stats(self) -> None: ...


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, enable_gqa: bool, scale: Any, **_: Any) -> Any:
    """Return what flex attention with a causal mask returns: it has no backward on processors."""
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    return out, SimpleNamespace(lse=torch.zeros(q.shape[:-1]))


def replace_all() -> None:
    """Replace what needs a GPU. Before torchtitan's trainer is imported."""
    replace(torch._utils, "_get_available_device_type", lambda: "cpu")
    from torchtitan.components import metrics
    from torchtitan.distributed import utils
    from torchtitan.models.common.attention import FlexAttention

    replace(metrics, "build_device_memory_monitor", NoDeviceMemory)
    replace(FlexAttention, "_compiled_flex_attn", staticmethod(causal))
    replace(utils, "set_pg_timeouts", lambda *_, **__: None)

    def with_sums(module: FSDPModule, factor: float) -> None:
        module.set_force_sum_reduction_for_comms(True)  # gloo has no product before the sum.
        set_factor(module, factor)

    set_factor = replace(FSDPModule, "set_gradient_divide_factor", with_sums)


if __name__ == "__main__":
    replace_all()
    if "--own" in sys.argv:
        sys.argv.remove("--own")
        from torchtitan.train import main
    else:
        from torchtitan_lite.integrations.torchtitan import main
    main()
