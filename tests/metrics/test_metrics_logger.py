import json
import math
from contextlib import closing
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_lite.config.job_config import Metrics
from torchtitan_lite.metrics.logger import MetricsLogger

LOSS = "loss_metrics/global_avg_loss"
FILES_ONLY = Metrics()
WITH_TENSORBOARD = Metrics(enable_tensorboard=True)


def run_steps(
    folder: Path, steps: range, *, loaded_step: int = 0, config: Metrics = FILES_ONLY, rank: int = 0, loss: float = 1.0
) -> None:
    with closing(MetricsLogger(folder, config, rank=rank)) as metrics:
        metrics.start(loaded_step)
        for step in steps:
            metrics.log(step, {LOSS: loss})


def logged_steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def tensorboard_scalars(folder: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(LOSS)]


def test_a_line_is_the_step_with_its_tags_in_full_precision(tmp_path: Path) -> None:
    with closing(MetricsLogger(tmp_path, FILES_ONLY, rank=0)) as metrics:
        metrics.start(0)
        metrics.log(1, {LOSS: 0.1 + 0.2, "n_tokens_seen": 4096})
        # Read before the logger is closed: nothing waits in a buffer.
        assert (tmp_path / "metrics.jsonl").read_text() == (
            '{"step": 1, "loss_metrics/global_avg_loss": 0.30000000000000004, "n_tokens_seen": 4096}\n'
        )


def test_a_resumed_run_drops_what_was_logged_after_the_loaded_step(tmp_path: Path) -> None:
    run_steps(tmp_path, range(1, 10))
    run_steps(tmp_path, range(7, 9), loaded_step=6)
    assert logged_steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", [b'{"step": 3, "loss', b"\xff\xfe", b'{"step": 3}', b"3\n"])
def test_a_resumed_run_drops_a_torn_line(tmp_path: Path, torn: bytes) -> None:
    run_steps(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    run_steps(tmp_path, range(3, 5), loaded_step=2)
    assert logged_steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]


def test_a_resumed_run_without_metrics_starts_the_file(tmp_path: Path) -> None:
    run_steps(tmp_path / "new", range(7, 9), loaded_step=6)
    assert logged_steps(tmp_path / "new" / "metrics.jsonl") == [7, 8]


def test_a_fresh_start_moves_older_metrics_aside_and_overwrites_none(tmp_path: Path) -> None:
    for loss in (1.0, 2.0, 3.0):
        run_steps(tmp_path, range(1, 2), loss=loss)
    losses = {path.name: json.loads(path.read_text())[LOSS] for path in tmp_path.iterdir()}
    assert losses == {"metrics.jsonl.1": 1.0, "metrics.jsonl.2": 2.0, "metrics.jsonl": 3.0}


def test_a_figure_that_is_not_finite_leaves_the_line_readable_by_every_json_reader(tmp_path: Path) -> None:
    with closing(MetricsLogger(tmp_path, FILES_ONLY, rank=0)) as metrics:
        metrics.start(0)
        metrics.log(1, {"grad_norm": math.inf})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "grad_norm": null}\n'


def test_only_rank_0_writes(tmp_path: Path) -> None:
    run_steps(tmp_path, range(1, 3), config=WITH_TENSORBOARD, rank=1)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    run_steps(tmp_path, range(1, 6), config=WITH_TENSORBOARD, loss=1.0)
    run_steps(tmp_path, range(4, 8), config=WITH_TENSORBOARD, loaded_step=3, loss=2.0)
    expected = [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0), (7, 2.0)]
    assert tensorboard_scalars(tmp_path / "tb") == expected


def test_tensorboard_shows_a_step_before_the_run_ends(tmp_path: Path) -> None:
    with closing(MetricsLogger(tmp_path, WITH_TENSORBOARD, rank=0)) as metrics:
        metrics.start(0)
        metrics.log(1, {LOSS: 0.5})
        assert tensorboard_scalars(tmp_path / "tb") == [(1, 0.5)]


def test_each_rank_has_a_tensorboard_folder_of_its_own_if_the_config_says_so(tmp_path: Path) -> None:
    config = Metrics(enable_tensorboard=True, rank_0_only=False)
    for rank in (0, 1):
        run_steps(tmp_path, range(1, 2), config=config, rank=rank, loss=float(rank))
    assert tensorboard_scalars(tmp_path / "tb" / "rank_0") == [(1, 0.0)]
    assert tensorboard_scalars(tmp_path / "tb" / "rank_1") == [(1, 1.0)]


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    metrics = MetricsLogger(tmp_path, WITH_TENSORBOARD, rank=0)
    metrics.close()
    metrics.start(0)
    metrics.log(1, {LOSS: 1.0})
    metrics.close()
    metrics.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
