"""`export --format hf` of a seed: a step that an import made, before any training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.checkpoint.importing.sources import ARGS, in_their_names, weights, write_folder
from tests.cli.command import command
from torchtitan_lite.models.llama.hugging_face import args_of
from torchtitan_lite.store.manifest import Manifest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a folder of checkpoints with imported weights as step 0, as initial_load_in_hf leaves it."""
    write_folder(tmp_path / "hf", weights())
    assert command("import-weights", tmp_path / "hf", tmp_path / "run" / "step-0").code == 0
    return tmp_path / "run"


def with_extra(step: Path, **changes: Any) -> None:
    manifest = Manifest.of_folder(step)
    assert manifest is not None
    changed = dataclasses.replace(manifest, extra=manifest.extra | changes)
    (step / "manifest.json").write_bytes(changed.to_json())


def test_a_seed_needs_no_config(run: Path, tmp_path: Path) -> None:
    ended = command("export", f"{run}:0", tmp_path / "out", "--format", "hf")
    assert ended.code == 0 and ended.err.startswith("note: the checkpoint names no tokenizer")
    theirs = in_their_names(weights())
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == theirs.keys() and all(torch.equal(found[name], theirs[name]) for name in theirs)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert args_of(config) == args_of(json.loads((tmp_path / "hf" / "config.json").read_text()))
    assert config["num_hidden_layers"] == ARGS.n_layers


@pytest.mark.parametrize(
    "changes", [{"dim": "64"}, {"n_layers": 10**12}, {"rope_factor": "8"}, {"max_seq_len": None}, {"n_heads": 0}]
)
def test_sizes_that_no_import_records_are_not_used(run: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    recorded = Manifest.of_folder(run / "step-0")
    assert recorded is not None
    with_extra(run / "step-0", model=recorded.extra["model"] | changes)
    ended = command("export", f"{run}:0", tmp_path / "out", "--format", "hf")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "step-0 does not say which model is in it: give --config CONFIG_JSON, and" in ended.err
    assert ended.err.endswith(f"(the weights are those of {tmp_path}/hf)\n")


def test_a_seed_of_another_model_says_where_its_config_is(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    assert command("import-weights", tmp_path / "w.pt", tmp_path / "run" / "step-0", "--names", "same").code == 0
    ended = command("export", f"{tmp_path}/run:0", tmp_path / "out", "--format", "hf")
    assert ended.code == 2
    assert ended.err == (
        f"error: {tmp_path}/run/step-0 does not say which model is in it: give --config CONFIG_JSON, and --names same "
        f"or --name-map if its names are not those of train.py's model (the weights are those of {tmp_path}/w.pt)\n"
    )
