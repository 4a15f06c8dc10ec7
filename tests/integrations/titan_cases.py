"""Tests of the classes for torchtitan, each called in a process that has it loaded: a working directory is given."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_lite.errors import ConfigError


def a_dataloader_that_holds_code_is_refused_by_name(folder: Path) -> None:
    from torchtitan_lite.integrations.torchtitan import CheckedDataloader

    class Hostile:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {folder}/hostile",)

    given: list[Any] = []
    loader = SimpleNamespace(dp_world_size=2, load_state_dict=given.append, state_dict=dict)
    checked = CheckedDataloader(loader)
    plain = {"dp_rank_0": pickle.dumps({"n": [1, 2.5, "text", None, True], "m": {}}), "world_size": 2}
    checked.load_state_dict(plain)
    assert given == [plain]
    with pytest.raises(ConfigError, match=r"dataloader\.dp_rank_0: expected a pickle of lists.*exclude_from_loading"):
        checked.load_state_dict({"dp_rank_0": pickle.dumps(Hostile()), "world_size": 2})
    with pytest.raises(ConfigError, match="expected 4 data-parallel ranks, as saved, found 2"):
        checked.load_state_dict({**plain, "world_size": 4})
    assert given == [plain] and not list(folder.glob("hostile"))


def our_keys_are_in_the_help_next_to_torchtitans(folder: Path) -> None:
    from torchtitan.config import ConfigManager

    from torchtitan_lite.integrations import torchtitan as integration

    integration.registry, text = "llama3", io.StringIO()
    sys.argv = ["train", "--module", integration.__name__, "--config", "llama3_debugmodel", "--help"]
    with pytest.raises(SystemExit), contextlib.redirect_stdout(text):
        ConfigManager().parse_args()
    for key in ("interval", "keep_latest_k", "or_every_seconds", "exit_on_signal"):
        assert f"--checkpoint.{key}" in text.getvalue().replace("-", "_").replace("__checkpoint", "--checkpoint")


def another_module_configuration_or_manager_is_refused_by_name(folder: Path) -> None:
    from torchtitan_lite.integrations import torchtitan as integration

    with pytest.raises(ConfigError, match="--module: expected a module of torchtitan or of your own, found 'llama0'"):
        integration._function("llama0", "debug")
    with pytest.raises(ConfigError, match=r"--config: expected a function of .*llama3.*, found 'llama3_none'"):
        integration._function("llama3", "llama3_none")
    with pytest.raises(ConfigError, match="found one with int"):
        integration.of_torchtitan(3)
    integration.registry = "llama3"
    config = integration.llama3_debugmodel()
    assert type(config.checkpoint) is integration.CheckpointManager.Config
    assert (config.checkpoint.interval, config.checkpoint.last_save_model_only) == (10, False)


def one_checkpoint_may_be_kept_and_what_has_no_meaning_is_refused(folder: Path) -> None:
    from torchtitan_lite.integrations.torchtitan import CheckpointManager

    assert CheckpointManager.Config(keep_latest_k=1).keep_latest_k == 1
    with pytest.raises(ValueError, match="negative"):
        CheckpointManager.Config(keep_latest_k=-1)
    given: dict[str, Any] = dict.fromkeys(("dataloader", "optimizers", "lr_schedulers", "sd_adapter"))
    disabled = CheckpointManager.Config(last_save_in_hf=True).build(model_parts=[], states={}, **given)
    assert not disabled.load() and not disabled.save(1)
    disabled.close()
    config = CheckpointManager.Config(enable=True, last_save_in_hf=True, folder=str(folder))
    with pytest.raises(ConfigError, match=r"last_save_in_hf: expected a model with an adapter .* found no adapter"):
        config.build(model_parts=[torch.nn.Linear(1, 1)], states={}, **given | {"optimizers": [], "lr_schedulers": []})


CASES = [name for name, value in list(globals().items()) if isinstance(value, FunctionType)]
