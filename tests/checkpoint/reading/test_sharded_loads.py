"""Checkpoints of two ranks with a sharded model: which runs load them, and what is refused before anything changes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.one_file import as_one_file
from tests.checkpoint.sharded_run import sharded_run
from tests.checkpoint.small_run import same
from tests.ranks import Ranks, on_two_ranks
from torchtitan_lite.errors import CheckpointMismatch, CheckpointNotFound, CorpusChanged


class Loader:
    """A position in a corpus; if it `refuses`, it raises as for a position in another corpus."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {"position": 5}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.refuses:
            raise CorpusChanged(["files: 3 -> 4"])


def train_and_save(rank: int, folder: Path) -> dict[str, Any]:
    """Run three steps, save the last two, and return the contents of the last save."""
    with (run := sharded_run(folder, interval=2)).manager:
        run.train(3)
    return run.contents()


def resume(rank: int, folder: Path) -> dict[str, Any]:
    """Load the latest checkpoint of `folder` and return the contents of the run."""
    with (run := sharded_run(folder)).manager:
        assert run.manager.load()
        return run.contents()


def export(rank: int, folder: Path) -> dict[str, Any]:
    with (run := sharded_run(folder, interval=100, model_weights_only=True, export_dtype="bfloat16")).manager:
        run.train(2)
    return run.contents()


def test_two_ranks_save_and_one_plain_process_loads(two_ranks: Ranks, tmp_path: Path) -> None:
    saved, _ = two_ranks.run(train_and_save, folder=tmp_path)
    assert same(resume(0, tmp_path), saved)


def test_one_plain_process_saves_and_two_ranks_load(two_ranks: Ranks, tmp_path: Path) -> None:
    saved = train_and_save(0, tmp_path)
    for loaded in two_ranks.run(resume, folder=tmp_path):
        assert same(loaded, saved)


def test_weights_only_holds_whole_tensors_under_their_own_names(two_ranks: Ranks, tmp_path: Path) -> None:
    trained, _ = two_ranks.run(export, folder=tmp_path)
    weights = as_one_file(tmp_path / "checkpoint" / "step-2")
    assert all(not key.startswith(("model", "_")) and value.dtype == torch.bfloat16 for key, value in weights.items())
    assert same(weights, {key: value.bfloat16() for key, value in trained["model"].items()})


@on_two_ranks
def test_a_corpus_that_changed_on_one_rank_is_refused_on_both(rank: int, tmp_path: Path) -> None:
    with (run := sharded_run(tmp_path, interval=1, loader=Loader())).manager:
        run.train(1, last=False)
    other = sharded_run(tmp_path, loader=Loader(refuses=rank == 1))
    before = other.contents()
    with other.manager:
        with pytest.raises(CorpusChanged, match="3 -> 4") as raised:
            other.manager.load()
        assert raised.value.reported_elsewhere == (rank == 1)
        assert same(other.contents(), before)


@pytest.mark.promise("A load that is refused has changed nothing in the model, on any rank.", section="loaded")
@on_two_ranks
def test_a_model_of_another_shape_is_refused_on_both(rank: int, tmp_path: Path) -> None:
    train_and_save(rank, tmp_path)
    with (other := sharded_run(tmp_path, width=8)).manager:
        before = other.contents()
        with pytest.raises(CheckpointMismatch, match=r"0\.weight: shape \[7, 5\] in the checkpoint, \[8, 5\] expected"):
            other.manager.load()
        assert same(other.contents(), before)


@on_two_ranks
def test_a_step_that_is_not_there_is_refused_on_both(rank: int, tmp_path: Path) -> None:
    train_and_save(rank, tmp_path)
    with (other := sharded_run(tmp_path, load_step=7)).manager:
        with pytest.raises(CheckpointNotFound, match="it has 2, 3") as raised:
            other.manager.load()
        assert raised.value.available == (2, 3)
        assert raised.value.reported_elsewhere == (rank == 1)


@on_two_ranks
def test_an_empty_folder_is_a_fresh_start_on_both(rank: int, tmp_path: Path) -> None:
    with (run := sharded_run(tmp_path)).manager:
        assert run.manager.latest_step() == -1
        assert not run.manager.load()
