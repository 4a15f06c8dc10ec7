import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_lite.metrics.ledger import Ledger, RunClock
from torchtitan_lite.metrics.run_metrics import (
    StepTimer,
    epoch_tags,
    memory_tags,
    peak_flops,
    step_line,
    throughput_tags,
    time_tags,
)


def clock_that_shows(*times: float) -> Callable[[], float]:
    return iter(times).__next__


def run_parts(timer: StepTimer, parts: Iterable[str]) -> None:
    for part in parts:
        with timer(part):
            pass


def line_of(
    step: int, loss: float, grad_norm: float, memory: float, tps: float, tflops: float, mfu: float | None, **of: Any
) -> str:
    tags = {"loss_metrics/global_avg_loss": loss, "grad_norm": grad_norm, "memory/max_reserved(GiB)": memory}
    tags |= {"throughput(tps)": tps, "tflops": tflops} | ({} if mfu is None else {"mfu(%)": mfu})
    return step_line(step, tags, **of)


def test_the_step_line_has_the_format_that_scripts_read() -> None:
    line = line_of(1, 5.59034, 1.25, 3.5, 12345.6, 7.891, 1.234)
    assert line == (
        "step:  1  loss:  5.5903  grad_norm:  1.2500  memory:  3.50GiB  tps: 12,346  tflops: 7.89  mfu: 1.23%  epoch: 0"
    )


def test_the_step_line_has_no_mfu_if_the_peak_is_unknown() -> None:
    assert line_of(1000, 2.5, 0.5, 0.75, 99, 0.001, None).endswith("tps: 99  tflops: 0.00  epoch: 0")


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA B200", 2250e12),
        ("AMD Instinct MI300X", 1307e12),
        ("x86_64", None),
    ],
)
def test_a_device_is_found_by_the_longest_name_that_fits(name: str, flops: float | None) -> None:
    assert peak_flops(name) == flops


def test_throughput_has_a_percentage_of_the_peak_only_if_the_peak_is_known() -> None:
    assert throughput_tags(1000.0, 6e9, 312e12) == {
        "throughput(tps)": 1000.0,
        "tflops": 6.0,
        "mfu(%)": pytest.approx(100 * 6 / 312),
    }
    assert throughput_tags(1000.0, 6e9, None) == {"throughput(tps)": 1000.0, "tflops": 6.0}


def test_loading_data_has_the_tags_of_torchtitan() -> None:
    assert time_tags(2.0, {"data": 0.5, "forward": 1.0}) == {
        "time_metrics/end_to_end(s)": 2.0,
        "time_metrics/data_loading(s)": 0.5,
        "time_metrics/data_loading(%)": 25.0,
        "time_metrics/forward(s)": 1.0,
    }


def test_the_timer_returns_means_over_steps_and_resets_them() -> None:
    times = [
        0,
        1,
        1,
        3,
        3,
        7,
        7,
        8,
        8,
        9,
        9,
        10,
        20,
        21,
    ]  # data 1, forward 2, forward 4, optimizer 1; data 1, optimizer 1
    timer = StepTimer(clock_that_shows(*times))
    run_parts(timer, ["data", "forward", "forward", "optimizer", "data", "optimizer"])
    assert timer.pop(2) == {"data": 1.0, "forward": 3.0, "optimizer": 1.0}
    run_parts(timer, ["data"])
    assert timer.pop(1) == {"data": 1.0}
    assert timer.pop(1) == {}


def test_goodput_is_the_share_of_productive_seconds(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, RunClock(clock_that_shows(100.0, 100.0, 101.0, 105.5, 110.0, 110.0)), writes=False)
    with ledger.clock.part("productive"):
        pass
    assert ledger.tags() == {"goodput(%)": 45.0}


def test_without_an_accelerator_the_memory_is_that_of_the_process() -> None:
    tags = memory_tags(torch.device("cpu"))
    assert set(tags) == {"memory/max_active(GiB)", "memory/max_reserved(GiB)"}
    assert 0.01 < tags["memory/max_reserved(GiB)"] < math.inf


@pytest.mark.cuda
def test_the_memory_of_the_allocator_is_its_peak_since_the_last_call() -> None:
    device = torch.device("cuda", 0)
    memory_tags(device)
    block = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    del block
    peak, later = memory_tags(device), memory_tags(device)
    assert peak["memory/max_active(GiB)"] >= 0.25 > later["memory/max_active(GiB)"]
    assert 0 < peak["memory/max_reserved(%)"] < 100


def test_the_step_line_ends_with_the_epoch_and_how_much_of_it_is_taken() -> None:
    line = line_of(1, 5.59034, 1.25, 3.5, 12345.6, 7.891, 1.234, epoch=2, fraction=0.9999)
    assert line.endswith("tflops: 7.89  mfu: 1.23%  epoch: 2 (99.9%)")
    assert line_of(1, 5.6, 1.2, 3.5, 1.0, 7.9, None, epoch=0, fraction=1.0).endswith("epoch: 0 (100.0%)")


def test_a_stream_has_an_epoch_whose_length_is_not_known() -> None:
    assert line_of(1, 5.6, 1.2, 3.5, 1.0, 7.9, None, epoch=3).endswith("tflops: 7.90  epoch: 3")
    assert epoch_tags(3, None) == {"data/epoch": 3}
    assert epoch_tags(3, 0.25) == {"data/epoch": 3, "data/epoch_progress(%)": 25.0}
