"""The environment variables that the package reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_lite.distributed.environment import launched, logged_environment, memory_is_off, runtime_folder
from torchtitan_lite.errors import ConfigError


@pytest.mark.parametrize(("value", "is_off"), [("off", True), ("on", False), ("", False)])
def test_the_memory_tier_is_on_unless_the_variable_says_off(
    monkeypatch: pytest.MonkeyPatch, value: str, is_off: bool
) -> None:
    monkeypatch.setenv("TORCHTITAN_LITE_MEMORY", value)
    assert memory_is_off() is is_off


def test_a_misspelt_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHTITAN_LITE_MEMORY", "Off")
    with pytest.raises(ConfigError, match="expected on or off"):
        memory_is_off()


def test_the_folder_for_sockets_is_unknown_if_the_variable_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert runtime_folder() == Path("/run/user/1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    assert runtime_folder() is None


@pytest.mark.parametrize(("has_new_store", "attempt"), [("0", 3), ("1", 0)])
def test_workers_with_a_new_store_meet_under_one_name_however_often_their_agents_restarted(
    monkeypatch: pytest.MonkeyPatch, has_new_store: str, attempt: int
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", has_new_store)
    assert launched().attempt == attempt


def test_the_logged_environment_has_neither_secrets_nor_what_only_torchrun_reads() -> None:
    helpful = {"RANK": "0", "NCCL_DEBUG": "WARN", "TORCHELASTIC_RESTART_COUNT": "1", "SLURM_JOB_ID": "7"}
    torchruns = {
        "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_x/error.json",
        "TORCHELASTIC_RUN_ID": "2e8275e8",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    secrets = dict.fromkeys(["CUDA_API_TOKEN", "SLURM_KEY", "SLURM_JWT", "TORCH_pass", "NCCL_AUTH", "SLURM_Cred"], "x")
    assert logged_environment({**helpful, **torchruns, **secrets, "HOME": "/root"}) == helpful
