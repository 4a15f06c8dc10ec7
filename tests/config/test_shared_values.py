"""Which values of a configuration all ranks of a job must have in common."""

from __future__ import annotations

from torchtitan_lite.config.drift import _OF_A_HOST, _PATHS, shared_values
from torchtitan_lite.config.job_config import Checkpoint, Job, JobConfig, Metrics, Model, Profiling, Training
from torchtitan_lite.config.keys import KEYS


def test_hosts_may_have_their_files_elsewhere_and_trace_what_they_like() -> None:
    here, there = (
        JobConfig(
            job=Job(dump_folder=place, config_file=f"{place}/a.toml", description=place),
            profiling=Profiling(enable_profiling=place == "/a"),
            metrics=Metrics(enable_progress_bar=place == "/a"),
            model=Model(tokenizer_path=f"{place}/tokenizer.json"),
            training=Training(dataset="text", dataset_path=f"{place}/*.txt", tokens_folder=place),
            checkpoint=Checkpoint(folder=f"{place}/checkpoint", export_folder=f"{place}/export"),
        )
        for place in ("/a", "/b")
    )
    assert shared_values(here) == shared_values(there)


def test_whether_there_is_a_path_counts_and_an_address_counts() -> None:
    folders = ("", "export", "s3://bucket/a", "s3://bucket/b")
    configs = [JobConfig(checkpoint=Checkpoint(export_folder=folder)) for folder in folders]
    assert [shared_values(config)["checkpoint.export_folder"] for config in configs] == [
        "(none)",
        "a path",
        *folders[2:],
    ]
    assert shared_values(JobConfig())["model.tokenizer_path"] == "bytes"


def test_every_other_key_counts() -> None:
    left_out = {key for key in KEYS if key not in shared_values(JobConfig())}
    assert left_out == _OF_A_HOST | {key for key in KEYS if key.startswith("profiling.")}
    assert KEYS.keys() >= _PATHS
