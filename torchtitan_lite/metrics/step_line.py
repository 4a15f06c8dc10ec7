"""The log line of a step, and the figures in it.

All functions are pure, but `memory_tags`, which reads the device or the system. The line keeps torchtitan's format,
because scripts read it.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping

import torch

_GIB = 1024**3

# Dense bf16 FLOP/s, from the manufacturers' data sheets (half of it where they give it with sparsity).
# Longer names come first: "H200" starts with "H20", and "H100 NVL" is another device than the H100 of a server board.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "MI250X": 191.5e12,  # one die of the two: torch sees each as a device
    "MI300X": 1307e12,
    "MI325X": 1307e12,
    "MI355X": 2500e12,
}


def peak_flops(device_name: str) -> float | None:
    """Return the peak bf16 FLOP/s of a device of this name; None if it is unknown, such as a CPU's."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name.lower() in device_name.lower()), None)


def throughput_tags(tps: float, flops_per_token: float, peak: float | None) -> dict[str, float]:
    """Return tokens per second and device, the same in TFLOP/s and, if the peak is known, in percent of the peak."""
    flops = tps * flops_per_token
    tags = {"throughput(tps)": tps, "tflops": flops / 1e12}
    return tags | ({"mfu(%)": 100 * flops / peak} if peak else {})


def time_tags(end_to_end_seconds: float, parts: dict[str, float]) -> dict[str, float]:
    """Return the seconds of a step and of its `parts`, from `StepTimer.pop`; data is torchtitan's data_loading."""
    names = {part: "data_loading" if part == "data" else part for part in parts}
    tags = {f"time_metrics/{names[part]}(s)": seconds for part, seconds in parts.items()}
    share = 100 * parts.get("data", 0.0) / end_to_end_seconds if end_to_end_seconds > 0 else 0.0
    return {"time_metrics/end_to_end(s)": end_to_end_seconds, "time_metrics/data_loading(%)": share} | tags


def epoch_tags(epoch: int, fraction: float | None) -> dict[str, float]:
    """Return the epoch, and the percentage of it that is taken if that is known."""
    return {"data/epoch": epoch} | ({} if fraction is None else {"data/epoch_progress(%)": 100 * fraction})


def step_line(step: int, tags: Mapping[str, float], epoch: int = 0, fraction: float | None = None) -> str:
    """Return the log line of a step with the figures in `tags`, and then the epoch and the part of it that is taken.

    It is torchtitan's, without mfu if the device's peak is unknown.
    """
    line = (
        f"step: {step:2}  loss: {tags['loss_metrics/global_avg_loss']:7.4f}  grad_norm: {tags['grad_norm']:7.4f}  "
        f"memory: {tags['memory/max_reserved(GiB)']:5.2f}GiB  tps: {round(tags['throughput(tps)']):,}  "
        f"tflops: {tags['tflops']:,.2f}"
    )
    line += f"  mfu: {tags['mfu(%)']:.2f}%" if "mfu(%)" in tags else ""
    # Rounded down: 100 % is the end of the epoch.
    return f"{line}  epoch: {epoch}" + ("" if fraction is None else f" ({int(1000 * fraction) / 10:.1f}%)")


def memory_tags(device: torch.device) -> dict[str, float]:
    """Return the peaks of memory, by TensorBoard tag. The step line shows `memory/max_reserved(GiB)`.

    On CUDA these are the allocator's since the last call, under torchtitan's tags. On the CPU, where there is no such
    allocator, it is the peak of the process since its start.
    """
    if device.type != "cuda":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {"memory/max_active(GiB)": peak / _GIB, "memory/max_reserved(GiB)": peak / _GIB}
    capacity, stats = torch.cuda.get_device_properties(device).total_memory, torch.cuda.memory_stats(device)
    active, reserved = stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "memory/max_active(GiB)": active / _GIB,
        "memory/max_active(%)": 100 * active / capacity,
        "memory/max_reserved(GiB)": reserved / _GIB,
        "memory/max_reserved(%)": 100 * reserved / capacity,
        "memory/num_alloc_retries": stats["num_alloc_retries"],
        "memory/num_ooms": stats["num_ooms"],
    }
