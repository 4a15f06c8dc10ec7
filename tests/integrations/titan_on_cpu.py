"""torchtitan's trainer on processors: seven things of it or of torch are replaced, and nothing else.

    torchrun ... titan_on_cpu.py --module llama3 --config llama3_debugmodel ...

A change of one of the seven fails here by its name. Forked from a server that has torchtitan loaded, `run` is a rank.
"""
# ruff: noqa: E402

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules

from tests.e2e.jobs import free_port
from tests.integrations import titan_cases
from tests.titan_packages import leave_kernels_out


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
    """Replace what needs a GPU, or a newer torch. Before torchtitan's trainer is imported."""
    replace(torch._utils, "_get_available_device_type", lambda: "cpu")
    leave_kernels_out()
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

    def in_parts(schedule: Any, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, **rest: Any) -> Any:
        """Take the batch in parts, as a newer torch does."""
        args = arg_mbs or [()] * len(kwarg_mbs)
        schedule._split_inputs = lambda *_: (args, kwarg_mbs)
        return step(schedule, target=None if target_mbs is None else torch.cat(target_mbs), **rest)

    step = replace(schedules.PipelineScheduleSingle, "step", in_parts)


replace_all()

from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.train import main as train
from torchtitan.trainer import Trainer

from torchtitan_lite.integrations import torchtitan as integration


def run(place: str, arguments: list[str], kill_at: int = 0, own: bool = False) -> None:
    """Train in the working directory `place`; print each loss in full, and be killed after the step `kill_at`.

    With `own`, the manager is torchtitan's own one.
    """
    os.chdir(place)
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_PORT", str(free_port()))

    def log(processor: Any, step: int, loss: float, *rest: Any, **keywords: Any) -> None:
        os.write(1, f"{os.environ['RANK']} step {step}: loss {loss!r}\n".encode())
        logged(processor, step, loss, *rest, **keywords)

    def train_step(trainer: Trainer, *given: Any) -> None:
        if trainer.step == kill_at + 1 > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        trained(trainer, *given)

    # To see what it does, in this process only.
    logged, trained = replace(MetricsProcessor, "log", log), replace(Trainer, "train_step", train_step)
    sys.argv = ["train", *arguments]
    main = train if own else integration.main
    main()


def timed(place: str, arguments: list[str], own: bool = False) -> None:
    """As `run`; print the seconds of each call of the manager: "rank RANK CALL SECONDS"."""
    for name in ("load", "save", "maybe_wait_for_staging"):
        replace(BaseCheckpointManager, name, _timed(name, getattr(BaseCheckpointManager, name)))
    run(place, arguments, own=own)


def _timed(name: str, method: Any) -> Any:
    def call(*given: Any, **keywords: Any) -> Any:
        began = time.monotonic()
        result = method(*given, **keywords)
        os.write(1, f"rank {os.environ['RANK']} {name} {time.monotonic() - began:.4f}\n".encode())
        return result

    return call


def check(case: str, folder: str) -> None:
    """Call the function `case` of titan_cases.py with the folder `folder`."""
    getattr(titan_cases, case)(Path(folder))


if __name__ == "__main__":
    integration.main()
