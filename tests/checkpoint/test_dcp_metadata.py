"""DCP's `.metadata` on demand: written with a save or later, and used by DCP's own readers only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from tests.checkpoint.only_once import load_and_close
from tests.checkpoint.planning.simulated import Has, planned
from tests.checkpoint.small_run import job_config
from torchtitan_lite.checkpoint.format.description import Description
from torchtitan_lite.checkpoint.format.flattening import flatten
from torchtitan_lite.checkpoint.format.metadata_file import MOST_ENTRIES
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.checkpoint.state.stateful import DictState
from torchtitan_lite.cli.app import main
from torchtitan_lite.examining.derived_metadata import metadata_of
from torchtitan_lite.store.manifest import Manifest


class Job:
    """A layer, AdamW and a state with a list that grows."""

    def __init__(self, folder: Path, **options: object) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.history: dict[str, object] = {"losses": [1.0, 2.0], "large": "x" * 100}
        states = {"history": DictState(self.history)}
        config = job_config(folder, **options)
        self.manager = CheckpointManager(None, self.model, self.optimizer, None, states, config)


def saved(folder: Path, policy: str = "never", **options: object) -> Path:
    job = Job(folder, dcp_metadata=policy, **options)
    with job.manager as manager:
        job.model(torch.ones(1, 3)).sum().backward()
        job.optimizer.step()
        manager.save(1, force=True)
    return folder / "checkpoint" / "step-1"


def weight_by_dcp(step: Path) -> torch.Tensor:
    state = {"model": {"weight": torch.zeros(2, 3)}}
    dcp_load(state, checkpoint_id=step)
    return state["model"]["weight"]


def test_a_small_state_has_it(tmp_path: Path) -> None:
    step = saved(tmp_path, "auto")
    assert (step / ".metadata").exists()
    assert weight_by_dcp(step).any()


def test_without_it_a_run_resumes_and_the_manifest_says_that_it_was_left_out(tmp_path: Path) -> None:
    step = saved(tmp_path)
    manifest = Manifest.of_folder(step)
    assert manifest is not None
    assert not (step / ".metadata").exists()
    assert manifest.extra["dcp_metadata"] == "left out"
    job = Job(tmp_path)
    job.history.clear()
    with job.manager as manager:
        assert manager.load()
    assert job.history["losses"] == [1.0, 2.0]


def test_added_later_it_is_what_the_save_would_have_written(tmp_path: Path) -> None:
    without = saved(tmp_path / "without")
    before = (without / "manifest.json").read_bytes()
    assert main(["add-metadata", str(without)]) == 0
    assert (without / ".metadata").read_bytes() == (saved(tmp_path / "with", "always") / ".metadata").read_bytes()
    assert (without / "manifest.json").read_bytes() == before
    assert weight_by_dcp(without).any()
    assert main(["add-metadata", str(without)]) == 0


def test_a_cut_of_the_verb_leaves_the_checkpoint_as_it_was_and_the_next_one_finishes(tmp_path: Path) -> None:
    step = saved(tmp_path)
    (step / "..metadata.tmp").write_bytes(b"half")
    assert main(["verify", str(step)]) == 0
    assert main(["add-metadata", str(step)]) == 0
    assert weight_by_dcp(step).any()
    assert [path.name for path in step.iterdir() if path.name.endswith(".tmp")] == []


def test_what_has_it_already_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = saved(tmp_path, "always")
    before = (step / ".metadata").stat().st_mtime_ns
    assert main(["add-metadata", str(step)]) == 0
    assert "was saved with .metadata" in capsys.readouterr().out
    assert (step / ".metadata").stat().st_mtime_ns == before


def test_a_wrong_one_is_a_finding_and_nothing_of_ours_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = saved(tmp_path)
    assert main(["add-metadata", str(step)]) == 0
    assert main(["verify", str(step)]) == 0
    (step / ".metadata").write_bytes((step / ".metadata").read_bytes()[:-7] + b"garbage")
    capsys.readouterr()
    assert main(["verify", str(step)]) == 3
    assert ".metadata: it does not describe this checkpoint" in capsys.readouterr().out
    load_and_close(Job(tmp_path).manager)
    assert main(["add-metadata", str(step)]) == 0
    assert main(["verify", str(step)]) == 0


def test_tools_work_without_it(tmp_path: Path) -> None:
    step = saved(tmp_path)
    assert main(["inspect", str(step)]) == 0
    assert main(["ls", str(step.parent)]) == 0
    assert main(["export", str(step), str(tmp_path / "weights.safetensors")]) == 0
    assert main(["convert", str(step), str(tmp_path / "dcp"), "--layout", "dcp"]) == 0
    assert weight_by_dcp(tmp_path / "dcp").any()
    assert main(["reshard", str(step), str(tmp_path / "made" / "step-1"), "--files", "2"]) == 0
    assert main(["diff", str(step), str(tmp_path / "made" / "step-1")]) == 0


def test_a_new_run_starts_from_it(tmp_path: Path) -> None:
    step = saved(tmp_path)
    job = Job(tmp_path / "new", initial_load_path=str(step))
    with job.manager as manager:
        assert manager.load()


@pytest.mark.parametrize(("num_ranks", "has"), [(4, True), (MOST_ENTRIES, False)])
def test_a_state_of_more_shards_than_a_second_is_enough_for_has_none(num_ranks: int, has: bool) -> None:
    run = [num_ranks, [0, 1], 384, 0, [0], [1]]
    tensors = {
        "model.a": {"dtype": "float32", "shape": [num_ranks], "runs": [run]},
        "model.b": {"dtype": "float32", "shape": [1], "chunks": [["__0_0.distcp", 0, [0], [1]]]},
    }
    described = Description(tensors, [], flatten({"model": {"a": 0, "b": 0}})[1])
    assert described.has_metadata("auto") is has
    assert described.has_metadata("always")
    assert not described.has_metadata("never")


def test_the_parts_of_a_plan_of_several_ranks_are_those_of_its_manifest(tmp_path: Path) -> None:
    """Of chunks in runs and of lists of them."""
    step = saved(tmp_path)
    assert metadata_of(CheckpointFolder(step))[:2] == b"\x80\x02"
    ranks = [[Has("model.w", (3,))] for _ in range(3)]
    assert planned(ranks).metadata[-1:] == b"."
