"""The trainer with its folder in an object store, by its TOML alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.bucket.server import Server
from tests.e2e.jobs import Job, run, start
from torchtitan_lite.bucket.bucket_store import open_bucket
from torchtitan_lite.store.manifest import CheckpointKind

STEPS = 16
TOML = """
[job]
dump_folder = "{dump}"

[metrics]
log_freq = 1
enable_tensorboard = false

[lr_scheduler]
warmup_steps = 2

[training]
seed = 42
batch_size = {batch}
global_batch_size = 4
seq_len = 64
steps = {steps}

[checkpoint]
enable_checkpoint = true
folder = "{folder}"
interval = 3
async_mode = "{mode}"
export_folder = "{exports}"
export_dtype = "bfloat16"
keep_latest_k = 4
"""


class Jobs:
    """The starts of one run."""

    def __init__(self, tmp_path: Path, folder: str, exports: str, mode: str) -> None:
        self._dump = tmp_path / "run"
        self._settings = {"dump": str(self._dump), "folder": folder, "exports": exports, "mode": mode}
        self._toml = tmp_path / "job.toml"

    def arguments(self, ranks: int, *more: str) -> Sequence[str]:
        self._toml.write_text(TOML.format(**self._settings, steps=STEPS, batch=4 // ranks))
        return (f"--job.config_file={self._toml}", f"--training.batch_size={4 // ranks}", *more)

    def killed(self, ranks: int, when: Callable[[Job], bool], *more: str) -> None:
        with start(self._dump, *self.arguments(ranks, *more), ranks=ranks) as job:
            job.wait_until(when)
            job.kill()

    def ended(self, ranks: int, *more: str) -> Job:
        return run(self._dump, *self.arguments(ranks, *more), ranks=ranks)


@pytest.mark.promise(
    "A run that is killed around any of its requests loses no reported save and trains as if it was not killed.",
    section="bucket",
)
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("async_with_pinned_mem", marks=pytest.mark.slow),
        *(pytest.param(mode, marks=pytest.mark.exhaustive) for mode in ("disabled", "async")),
    ],
)
def test_a_job_killed_three_times_rolled_back_and_resharded_is_the_job_on_a_disk(
    mode: str, folder: str, s3: Server, tmp_path: Path
) -> None:
    on_disk = Jobs(tmp_path / "disk", "checkpoint", "export", mode)
    in_store = Jobs(tmp_path / "store", folder, f"{folder}-exports", mode)
    for each in (tmp_path / "disk", tmp_path / "store"):
        each.mkdir()
    assert os.environ["AWS_ENDPOINT_URL"] == s3.endpoint
    straight = on_disk.ended(2).losses()
    for step in (4, 8, 12):
        in_store.killed(2, lambda job, step=step: step in job.losses())  # type: ignore[misc]  # mypy and defaults
    job = in_store.ended(2)
    assert job.losses() == straight
    steps = [info.step for info in open_bucket(folder).committed()]
    assert steps == [9, 12, 15, 16]
    (export,) = open_bucket(f"{folder}-exports").committed()
    assert (export.step, export.kind) == (STEPS, CheckpointKind.WEIGHTS_ONLY)

    rolled_back = in_store.ended(1, "--checkpoint.load_step=9")
    assert {step: loss for step, loss in rolled_back.losses().items() if step <= 9} == {
        step: loss for step, loss in straight.items() if step <= 9
    }
    assert rolled_back.losses().keys() == straight.keys()
    assert [loss for step, loss in sorted(rolled_back.losses().items()) if step > 9] == pytest.approx(
        [loss for step, loss in sorted(straight.items()) if step > 9], rel=1e-4
    )
    again = in_store.ended(2, "--checkpoint.load_step=9", "--checkpoint.new_branch")
    assert again.losses() == straight
