"""A training on a corpus with one poisoned batch finishes by itself, as if it had never been given that batch."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.jobs import run, start
from torchtitan_lite.data.loader import shuffled

WINDOW = 65
WINDOWS = 400
SEED = 3
BATCH = 4
BAD = 23
"""The step whose batch is poisoned."""
STEPS = 30
KEYS = [
    "--training.dataset=text",
    f"--training.seed={SEED}",
    f"--training.global_batch_size={BATCH}",
    f"--training.steps={STEPS}",
    "--training.trace_samples",
    "--optimizer.lr=1e-2",
    "--lr_scheduler.warmup_steps=2",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=5",
    "--checkpoint.no_model_weights_only",
]
ROLLBACK = ["--training.on_divergence=rollback", "--training.spike_factor=2", "--training.spike_window=10"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One text that repeats itself, but for the windows of one batch, which are noise."""
    noise = random.Random(1)
    windows = ["abcdefgh " * 8] * WINDOWS
    windows = [window[:WINDOW] for window in windows]
    for position in range((BAD - 1) * BATCH, BAD * BATCH):
        window = shuffled(position, size=WINDOWS - 1, seed=SEED, epoch=0)
        # Within the window, which begins a token before its text, with the mark before the document.
        windows[window] = "".join(chr(noise.randrange(33, 127)) for _ in range(WINDOW - 2)) + "  "
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(windows)[:-WINDOW])
    return path


WITHOUT = f"""
import sys
from torchtitan_lite import trainer, train

class Without(trainer.Trainer):
    def _next_batch(self):
        if self.train_state.step + 1 == {BAD}:
            next(self.loader)
        return super()._next_batch()

trainer.Trainer = Without
sys.exit(train.main())
"""


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[int, float]]:
    """Return the losses of a run on N ranks that takes the same samples in their order without that batch."""
    folder = tmp_path_factory.mktemp("straight")
    script = folder / "without.py"
    script.write_text(WITHOUT)

    @functools.cache
    def losses(ranks: int) -> dict[int, float]:
        arguments = [*KEYS, f"--training.dataset_path={corpus}"]
        found = run(folder / str(ranks), *arguments, ranks=ranks, script=script).losses()
        assert len(found) == STEPS
        return found

    return losses


def samples(folder: Path) -> list[int]:
    lines = [json.loads(line) for path in folder.glob("samples/rank*.jsonl") for line in path.read_text().splitlines()]
    return [index for _, indices in sorted((line["step"], line["indices"]) for line in lines) for index in indices]


def without_the_batch() -> list[int]:
    taken = range(BATCH * (STEPS + 1))
    return [position for position in taken if not (BAD - 1) * BATCH <= position < BAD * BATCH]


@pytest.mark.promise(
    "A run that rolls back by itself has, bit for bit, the losses of a run without the batches that it skips.",
    section="loaded",
)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_the_run_rolls_back_leaves_the_batch_out_and_finishes(
    tmp_path: Path, corpus: Path, straight: Callable[[int], dict[int, float]], ranks: int
) -> None:
    job = run(tmp_path / "run", *KEYS, *ROLLBACK, f"--training.dataset_path={corpus}", ranks=ranks)
    assert f"Step {BAD}: loss is" in job.log
    assert [(each["step"], each["skipped_batch"]) for each in job.events("diverged")] == [(BAD, BAD)]
    assert [each["step"] for each in job.events("loaded")] == [20]
    assert samples(job.dump_folder) == without_the_batch()
    assert list(job.losses()) == list(range(1, STEPS + 1))
    assert job.losses() == straight(ranks)
    assert [each["redone_steps"] for each in job.events("finished")] == [BAD - 1 - 20]


@pytest.mark.slow
def test_without_the_key_a_spike_stops_the_run_only_if_the_rule_is_set(tmp_path: Path, corpus: Path) -> None:
    path = f"--training.dataset_path={corpus}"
    with start(tmp_path / "stops", *KEYS, *ROLLBACK[1:], path) as job:
        assert job.wait() == [1]
    assert f"TrainingDiverged: step {BAD}: loss is" in job.log
    assert [each["step"] for each in job.events("diverged")] == [BAD]
    assert "diverged" not in run(tmp_path / "trains-on", *KEYS, path).log


@pytest.mark.slow
def test_a_run_that_always_diverges_stops_with_a_list_of_what_was_tried(tmp_path: Path, corpus: Path) -> None:
    path = f"--training.dataset_path={corpus}"
    always = ["--optimizer.lr=3", "--training.on_divergence=rollback", "--training.spike_factor=1.01"]
    with start(tmp_path / "run", *KEYS, *always, "--training.spike_window=4", "--checkpoint.interval=2", path) as job:
        assert job.wait() == [1]
    error = next(line for line in job.log.splitlines() if "TrainingDiverged" in line)
    assert "at most 3 in 1,000 steps are allowed. It rolled back 3 times: from step" in error
    assert error.count("without batch") == 3
    # The next start finds the same, and does not begin to count again.
    with start(tmp_path / "run", *KEYS, *always, "--training.spike_window=4", "--checkpoint.interval=2", path) as job:
        assert job.wait() == [1]
    assert job.log.count("It rolled back 3 times") == 1


@pytest.mark.promise(
    "A start after a kill during a rollback finishes the rollback, also from the folder of uploads.",
    section="loaded",
)
@pytest.mark.slow
@pytest.mark.parametrize("point", ["roll_back", "load", "rolled_back", "commit:step=25", "committed:step=25"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)], ids=["one process", "two ranks"])
def test_killed_on_the_way_back_the_next_start_gets_there(
    tmp_path: Path, corpus: Path, straight: Callable[[int], dict[int, float]], point: str, ranks: int
) -> None:
    arguments = [*KEYS, *ROLLBACK, f"--training.dataset_path={corpus}"]
    name, _, condition = point.partition(":")
    with start(
        tmp_path / "run",
        *arguments,
        ranks=ranks,
        environment={"TORCHTITAN_LITE_FAULT": f"kill@{name}:rank=0" + (f",{condition}" if condition else "")},
    ) as job:
        job.wait()
    assert f"kill@{name}" in job.log
    job = run(tmp_path / "run", *arguments, ranks=ranks)
    assert samples(job.dump_folder) == without_the_batch()
    assert job.losses() == straight(ranks)
