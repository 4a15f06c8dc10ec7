import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e import jobs
from torchtitan_lite.config.job_config import Profiling
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.metrics.profiling import Profiler


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logging.getLogger("torchtitan_lite").addHandler(caplog.handler)
    yield caplog
    logging.getLogger("torchtitan_lite").removeHandler(caplog.handler)


def run_steps(folder: Path, config: Profiling, num_steps: int, *, loaded_step: int = 0, rank: int = 0) -> None:
    with Profiler(folder, config, rank=rank, loaded_step=loaded_step) as profiler:
        for _ in range(num_steps):
            torch.mm(torch.ones(4, 4), torch.ones(4, 4))
            profiler.step()


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_trace_has_the_path_of_torchtitan_and_shows_the_step(tmp_path: Path) -> None:
    run_steps(tmp_path, Profiling(enable_profiling=True, profile_freq=5), 11, rank=3)
    assert files_in(tmp_path) == [
        "profile_traces/iteration_10/rank3_trace.json",
        "profile_traces/iteration_5/rank3_trace.json",
    ]
    trace = json.loads((tmp_path / "profile_traces/iteration_10/rank3_trace.json").read_text())
    assert sum(event["name"] == "aten::mm" for event in trace["traceEvents"]) == 1


@pytest.mark.parametrize("loaded_step", [7, 8, 9])
def test_a_resumed_run_continues_to_count_from_the_loaded_step(tmp_path: Path, loaded_step: int) -> None:
    run_steps(tmp_path, Profiling(enable_profiling=True, profile_freq=5), 4, loaded_step=loaded_step)
    assert files_in(tmp_path) == ["profile_traces/iteration_10/rank0_trace.json"]


def test_a_frequency_of_one_traces_every_step(tmp_path: Path) -> None:
    run_steps(tmp_path, Profiling(enable_profiling=True, profile_freq=1), 2)
    paths = [tmp_path / f"profile_traces/iteration_{step}/rank0_trace.json" for step in (1, 2)]
    assert files_in(tmp_path) == [str(path.relative_to(tmp_path)) for path in paths]
    assert all("aten::mm" in path.read_text() for path in paths)


@pytest.mark.parametrize(("active", "warmup"), [(1, 0), (2, 1), (3, 3), (5, 3)])
def test_a_trace_has_as_many_steps_as_the_config_says_and_they_are_the_last_ones(
    tmp_path: Path, active: int, warmup: int
) -> None:
    config = Profiling(enable_profiling=True, profile_freq=5, profiler_active=active, profiler_warmup=warmup)
    with Profiler(tmp_path, config, rank=0) as profiler:
        for size in range(1, 6):
            torch.mm(torch.ones(size, size), torch.ones(size, size))
            profiler.step()
    trace = json.loads((tmp_path / "profile_traces/iteration_5/rank0_trace.json").read_text())
    sizes = [event["args"]["Input Dims"][0] for event in trace["traceEvents"] if event["name"] == "aten::mm"]
    assert sorted(sizes) == [[size, size] for size in range(6 - active, 6)]


def test_a_trace_of_more_steps_than_lie_between_two_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"profiling\.profiler_active: expected at most .* 5 steps, found 6"):
        Profiling(profile_freq=5, profiler_active=6)


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile_traces").write_text("a file in the place of the folder")
    run_steps(tmp_path, Profiling(enable_profiling=True, profile_freq=2), 5)
    assert "Could not write the trace of step 4 to" in log.text


def test_nothing_is_written_while_both_are_off(tmp_path: Path) -> None:
    run_steps(tmp_path, Profiling(profile_freq=1), 3)
    assert files_in(tmp_path) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_memory_snapshot_without_cuda_is_a_warning(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    run_steps(tmp_path, Profiling(enable_memory_snapshot=True, profile_freq=1), 2)
    assert files_in(tmp_path) == []
    assert "enable_memory_snapshot has no effect: there is no CUDA device" in log.text
    log.clear()
    run_steps(tmp_path, Profiling(enable_memory_snapshot=True, profile_freq=1), 2, rank=1)
    assert not log.text, "each fact is logged once, by rank 0"


@pytest.mark.cuda
def test_a_memory_snapshot_is_written_at_the_frequency_and_when_memory_runs_out(tmp_path: Path) -> None:
    config = Profiling(enable_memory_snapshot=True, profile_freq=2)
    with pytest.raises(torch.OutOfMemoryError), Profiler(tmp_path, config, rank=0) as profiler:
        for _ in range(3):
            profiler.step()
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert files_in(tmp_path) == [
        "memory_snapshot/iteration_2/rank0_memory_snapshot.pickle",
        "memory_snapshot/iteration_3_exit/rank0_memory_snapshot.pickle",
    ]


@pytest.mark.slow  # a job of its own
def test_a_trace_of_training_shows_the_parts_of_a_step(tmp_path: Path) -> None:
    arguments = ["--training.steps=4", "--profiling.enable_profiling", "--profiling.profile_freq=2"]
    jobs.run(tmp_path / "job", *arguments, "--profiling.enable_memory_snapshot")
    traces = sorted((tmp_path / "job" / "profile_traces").glob("iteration_*/rank0_trace.json"))
    assert [path.parent.name for path in traces] == ["iteration_2", "iteration_4"]
    for path in traces:
        names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
        assert any("scaled_dot_product" in name for name in names), "forward"
        assert any(name.startswith("autograd::engine::evaluate_function") for name in names), "backward"
        assert any("Optimizer.step" in name for name in names)
    if not torch.cuda.is_available():
        assert "enable_memory_snapshot has no effect" in (tmp_path / "job.log").read_text()
