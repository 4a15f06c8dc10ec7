"""Folders in the configuration: where an address is none, and that a run overwrites no file of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.config.job_config import Checkpoint, Job, JobConfig, Model
from torchtitan_lite.config.manager import parse_config
from torchtitan_lite.config.own_loop import loop_config
from torchtitan_lite.errors import ConfigError

ON_DISK = [(Job, "dump_folder"), (Checkpoint, "hf_folder")]
ANYWHERE = [(Checkpoint, "folder"), (Checkpoint, "export_folder"), (Checkpoint, "initial_load_path")]
PLACES = ON_DISK + ANYWHERE
IN_STORES = ["s3://bucket/x", "gs://bucket/x", "az://container/x"]
ELSEWHERE = ["hf://org/name", "file:///tmp/x", "S3://bucket/x"]


@pytest.mark.parametrize("address", IN_STORES)
@pytest.mark.parametrize(("section", "name"), ANYWHERE)
def test_checkpoints_may_be_in_an_object_store(section: Any, name: str, address: str) -> None:
    assert getattr(section(**{name: address}), name) == address


@pytest.mark.parametrize(
    ("section", "name", "address"),
    [
        *((*place, address) for place in ON_DISK for address in IN_STORES + ELSEWHERE),
        *((*place, address) for place in ANYWHERE for address in ELSEWHERE),
    ],
)
def test_an_address_is_one_sentence_that_names_the_key(section: Any, name: str, address: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        section(**{name: address})
    message = str(refusal.value)
    assert f".{name}: expected a folder of a file system, found the address '{address}'" in message
    assert "\n" not in message


@pytest.mark.parametrize("scheme", ["s3://", "S3://", "https://", "s3:/", "gs://"])
@pytest.mark.parametrize(("section", "name"), PLACES)
def test_a_login_in_an_address_is_refused_and_not_shown(section: Any, name: str, scheme: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        section(**{name: f"{scheme}AKIA17:hunter2@bucket/run"})
    assert not any(secret in str(refusal.value) for secret in ("AKIA17", "hunter2"))


@pytest.mark.parametrize(("key", "value"), [("memory_interval", 5), ("min_free_disk_gb", 10.0)])
def test_what_needs_a_disk_is_refused_with_a_folder_in_an_object_store(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"checkpoint\.{key}: found {value} with a folder in an object store"):
        Checkpoint(folder="s3://bucket/run", async_mode="async", **{key: value})


@pytest.mark.parametrize("folder", ["~", "~/runs/1"])
@pytest.mark.parametrize(("section", "name"), PLACES)
def test_a_home_that_no_shell_expanded_is_refused_by_name(section: Any, name: str, folder: str) -> None:
    with pytest.raises(ConfigError, match=rf"[.]{name}: '{folder}' starts with ~, which only a shell expands"):
        section(**{name: folder})


@pytest.mark.parametrize("folder", ["hf://org/name", "~/runs/1", Path("~/runs/1")])
def test_the_folder_of_an_own_loop_is_named_as_it_was_given(folder: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^folder: .*'{folder}'"):
        loop_config(folder, {})


def test_the_folder_of_an_own_loop_may_be_in_an_object_store() -> None:
    assert loop_config("s3://bucket/runs/x", {}).checkpoint.folder == "s3://bucket/runs/x"


def test_an_address_on_the_command_line_is_wrong_usage() -> None:
    with pytest.raises(ConfigError, match=r"job\.dump_folder: .*'s3://bucket/x'"):
        parse_config(["--job.dump_folder=s3://bucket/x"])


def test_an_address_that_went_through_a_path_is_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"job\.dump_folder: "):
        Job(dump_folder=Path("s3://bucket/x"))  # type: ignore[arg-type]  # accepted, for a training loop of your own


@pytest.mark.parametrize("folder", ["outputs", "/data/run", "a:b/c", "../x", "~x", "x/~", "C:/x", "./s3:/x"])
def test_other_names_are_folders(folder: str) -> None:
    assert Job(dump_folder=folder).dump_folder == folder


@pytest.mark.parametrize("name", ["outputs", "./outputs/", "outputs/config.json"])
def test_the_file_of_the_model_may_not_be_where_the_run_writes_its_own_configuration(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model.config_path: .* is where the run writes its own config.json"):
        JobConfig(job=Job(dump_folder="outputs"), model=Model(config_path=name))


@pytest.mark.parametrize("name", ["outputs/llama", "outputs/llama/config.json", "other/config.json", "config.json"])
def test_elsewhere_it_may_be(name: str) -> None:
    assert JobConfig(job=Job(dump_folder="outputs"), model=Model(config_path=name)).model.config_path == name
