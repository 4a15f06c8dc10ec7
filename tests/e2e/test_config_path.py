"""A run whose model comes from a config.json: what the file said at the save is what counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import command
from tests.e2e.jobs import CONFIG, run, start

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STEPS = "--training.steps=2"


@pytest.mark.slow  # five starts of a job
def test_settings_that_no_tensor_shows_are_refused_if_they_changed_and_exported_as_they_were(
    tmp_path: Path,
) -> None:
    file = tmp_path / "config.json"
    given = (STEPS, f"--model.config_path={file}")
    file.write_text(json.dumps(CONFIG))
    run(tmp_path / "run", *given)
    scaled = {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 512}}
    for change, code, finding in (
        ({"rope_theta": 10000.0}, 2, "rope_theta 500000.0 -> 10000.0"),
        ({"tie_word_embeddings": True}, 1, "tie_word_embeddings None -> True"),  # Tensors differ, too.
        (scaled, 2, "rope_factor None -> 8.0, rope_low_freq_factor None -> 1.0"),
    ):
        file.write_text(json.dumps(CONFIG | change))
        with start(tmp_path / "run", "--training.steps=3", *given[1:]) as job:
            assert job.wait() == [code], job.log
        assert " model.config_path: the file describes another model than that of the checkpoint" in job.log
        assert finding in job.log
    assert command("export", tmp_path / "run", tmp_path / "out", "--format", "hf").code == 0
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported["rope_theta"] == 500000.0
    assert exported["rope_parameters"] == {"rope_theta": 500000.0, "rope_type": "default"}
    file.write_text(json.dumps(CONFIG))
    run(tmp_path / "run", "--training.steps=3", *given[1:])
