"""One epoch over 2, then 4, then 1 processes takes every sample once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.jobs import Job, run, start
from tests.processes import read_lines

SEQ_LEN, GLOBAL_BATCH, STEPS, INTERVAL = 16, 8, 80, 20
SAMPLES = STEPS * GLOBAL_BATCH


@pytest.fixture
def arguments(tmp_path: Path) -> tuple[str, ...]:
    """Arguments of a job of one epoch, over a corpus of `STEPS` complete steps and some samples that fill no step."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    num_tokens = (SAMPLES + GLOBAL_BATCH // 2) * (SEQ_LEN + 1)
    for half in (1, 2):
        # A file is one document, between two marks.
        (corpus / f"{half}.txt").write_text(f"part {half} " * num_tokens, encoding="ascii")
        with (corpus / f"{half}.txt").open("r+b") as file:
            file.truncate(num_tokens // 2 - 2)
    return (
        "--training.dataset=text",
        f"--training.dataset_path={corpus}/*.txt",
        "--training.max_epochs=1",
        "--training.trace_samples",
        f"--training.seq_len={SEQ_LEN}",
        f"--training.global_batch_size={GLOBAL_BATCH}",
        f"--training.steps={2 * STEPS}",
        f"--checkpoint.interval={INTERVAL}",
    )


@pytest.mark.slow
def test_an_epoch_over_2_then_4_then_1_processes_takes_every_sample_once(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for ranks, kill_after in ((2, INTERVAL + 5), (4, 2 * INTERVAL + 5)):
        with start(folder, *arguments, ranks=ranks) as job:
            job.wait_until(lambda job, step=kill_after: step in job.losses())
            job.kill()
        assert max(_consumed(job)) > _latest(job), "the kill must lose steps, or the test shows nothing"
    job = run(folder, *arguments)
    assert [event["step"] for event in job.events("resumed")] == [INTERVAL, 2 * INTERVAL]
    assert f"The data ends after step {STEPS}" in job.log
    consumed = _consumed(job)
    assert sorted(consumed) == list(range(1, STEPS + 1))
    assert Counter(index for step in consumed.values() for index in step) == Counter(range(SAMPLES))


def _consumed(job: Job) -> dict[int, list[int]]:
    """Return the samples that all ranks took, by step."""
    taken: dict[int, list[int]] = {}
    for path in (job.dump_folder / "samples").glob("rank*.jsonl"):
        for line in read_lines(path):
            taken.setdefault(line["step"], []).extend(line["indices"])
    return taken


def _latest(job: Job) -> int:
    return max(int(name.removeprefix("step-")) for name in job.checkpoints if name.removeprefix("step-").isdigit())
