"""The line that a step prints, and the figures in it.

Pure: numbers come in, text and numbers go out. The line keeps torchtitan's shape; scripts read it.
"""

from __future__ import annotations

# Dense bf16 FLOP/s, from the makers' data sheets (where those state it with sparsity, half of it).
# The longer name stands first: "H200" begins like "H20", and "H100 NVL" is not the H100 of a server board.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "MI250X": 191.5e12,  # of one die, which is one device
    "MI300X": 1307e12,
    "MI325X": 1307e12,
    "MI355X": 2500e12,
}


def peak_flops(device_name: str) -> float | None:
    """bf16 FLOP/s that a device of this name reaches at most; None for one that is not known, such as a CPU."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name.lower() in device_name.lower()), None)


def throughput_tags(tps: float, flops_per_token: float, peak: float | None) -> dict[str, float]:
    """Tokens a second and device, what that is in TFLOP/s and, where the peak is known, in percent of it."""
    flops = tps * flops_per_token
    tags = {"throughput(tps)": tps, "tflops": flops / 1e12}
    return tags | ({"mfu(%)": 100 * flops / peak} if peak else {})


def time_tags(end_to_end_seconds: float, parts: dict[str, float]) -> dict[str, float]:
    """The seconds of a step and of its parts (`StepTimer.pop`); data is torchtitan's data_loading."""
    names = {part: "data_loading" if part == "data" else part for part in parts}
    tags = {f"time_metrics/{names[part]}(s)": seconds for part, seconds in parts.items()}
    share = 100 * parts.get("data", 0.0) / end_to_end_seconds if end_to_end_seconds > 0 else 0.0
    return {"time_metrics/end_to_end(s)": end_to_end_seconds, "time_metrics/data_loading(%)": share} | tags


def step_line(
    step: int, loss: float, grad_norm: float, memory_gib: float, tps: float, tflops: float, mfu: float | None
) -> str:
    """A step for a person, in torchtitan's shape; without mfu where the device's peak is not known."""
    line = (
        f"step: {step:2}  loss: {loss:7.4f}  grad_norm: {grad_norm:7.4f}  memory: {memory_gib:5.2f}GiB  "
        f"tps: {round(tps):,}  tflops: {tflops:,.2f}"
    )
    return line if mfu is None else f"{line}  mfu: {mfu:.2f}%"
