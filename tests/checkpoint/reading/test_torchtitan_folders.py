"""A run resumes from a full folder of torchtitan: model, optimizer, learning rate and step."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.reading.foreign_folders import TOKENS_OF_RANK, of_0_3, of_2024, save_plain
from tests.checkpoint.small_run import SmallRun, same
from torchtitan_lite.checkpoint.untrusted.safe_load import UnsafeItem, load_item
from torchtitan_lite.errors import CheckpointMismatch, CheckpointUnsafe, CorpusChanged

MakeFolder = Callable[[SmallRun, Path], Path]
LAYOUTS = pytest.mark.parametrize("make", [of_2024, of_0_3])


class Refusing(dict[str, Any]):
    """A loader that refuses every position that is not its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"corpus": "ours"}

    def check_state(self, state_dict: dict[str, Any]) -> None:
        if "corpus" not in state_dict:
            raise CorpusChanged(["everything"])

    load_state_dict = check_state


@pytest.fixture
def trained(start_run: StartRun, tmp_path: Path) -> SmallRun:
    """Return a run of four steps that saved nothing."""
    run = start_run(tmp_path / "elsewhere")
    run.train(4, last=False)
    return run


def taken_over(start_run: StartRun, path: Path, **options: Any) -> SmallRun:
    return start_run(
        path.parent / "ours", seed=1, initial_load_path=str(path), initial_load_model_only=False, **options
    )


@LAYOUTS
def test_model_optimizer_learning_rate_and_step_are_loaded_from_it(
    start_run: StartRun, trained: SmallRun, tmp_path: Path, make: MakeFolder
) -> None:
    run = taken_over(start_run, make(trained, tmp_path / "step-4")).resumed()
    expected, found = trained.contents(), run.contents()
    for part in ("model", "moments", "lr", "schedule", "step"):
        assert same(found[part], expected[part]), part
    assert run.manager.loaded_step == 4
    assert run.scheduler.get_last_lr() == trained.scheduler.get_last_lr()
    # The next step, on the same batch, is the step that torchtitan's run would have made.
    run.loader.state = {"position": 4, "seen": [0, 1, 2, 3]}
    for each in (trained, run):
        each.train(5, last=False)
    assert run.losses[-1] == trained.losses[-1]
    assert same(run.contents()["model"], trained.contents()["model"])
    assert run.scheduler.get_last_lr() == trained.scheduler.get_last_lr()


@LAYOUTS
def test_the_dataloaders_state_is_skipped_with_one_line_and_no_other_warning(
    start_run: StartRun, trained: SmallRun, tmp_path: Path, make: MakeFolder, caplog: pytest.LogCaptureFixture
) -> None:
    run = taken_over(start_run, make(trained, tmp_path / "step-4")).resumed()
    assert run.loader.state == {"position": 0, "seen": []}
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "dataloader: its state is torchtitan's, and not read: the data begin from their start"
    ]


@LAYOUTS
def test_a_dry_run_says_what_the_run_does(
    start_run: StartRun, trained: SmallRun, tmp_path: Path, make: MakeFolder
) -> None:
    path = make(trained, tmp_path / "step-4")
    run = taken_over(start_run, path, dry_run=True)
    report = run.manager.dry_run()
    assert report is not None and report.refusals == []
    assert "dataloader: its state is torchtitan's" in str(report)
    assert f"Resume from {path}, step 4:" in str(report)


def test_losses_of_2024_and_tokens_of_0_3_are_loaded_too(
    start_run: StartRun, trained: SmallRun, tmp_path: Path
) -> None:
    run = taken_over(start_run, of_2024(trained, tmp_path / "step-4")).loaded()
    assert (run.losses, run.train_state.log_steps) == (trained.losses, [1, 2, 3, 4])
    run = start_run(
        tmp_path / "second", initial_load_path=str(of_0_3(trained, tmp_path / "b")), initial_load_model_only=False
    )
    run.manager.load()
    assert run.train_state.n_tokens_seen == 2 * TOKENS_OF_RANK


def test_a_loader_of_another_corpus_does_not_see_torchtitans_position(
    start_run: StartRun, trained: SmallRun, tmp_path: Path
) -> None:
    run = taken_over(start_run, of_0_3(trained, tmp_path / "step-4"))
    run.manager._run.small["dataloader"] = Refusing()
    assert run.manager.load()


def test_parameters_with_bare_names_and_their_optimizer_state_are_renamed(
    start_run: StartRun, trained: SmallRun, tmp_path: Path
) -> None:
    path = of_0_3(trained, tmp_path / "step-4", prefix="net.")
    with pytest.raises(CheckpointMismatch, match=r"load_rename='\^net\[\.\]='"):
        taken_over(start_run, path).manager.load()
    run = taken_over(start_run, path, load_rename=("^net[.]=",)).resumed()
    assert same(run.contents()["model"], trained.contents()["model"])
    assert same(run.contents()["moments"], trained.contents()["moments"])


def test_a_step_of_torchtitan_in_the_runs_own_folder_is_resumed_with_load_step(
    start_run: StartRun, trained: SmallRun, tmp_path: Path
) -> None:
    of_0_3(trained, tmp_path / "checkpoint" / "step-4")
    run = start_run(seed=1, load_step=4).resumed()
    assert run.train_state.step == 4


def test_a_list_in_a_bytesio_that_holds_code_is_refused(start_run: StartRun, trained: SmallRun, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return print, ("run",)

    inner = io.BytesIO()
    torch.save([Evil()], inner)
    outer = io.BytesIO()
    torch.save(inner, outer)
    held = load_item(outer.getvalue())
    assert isinstance(held, io.BytesIO) and held.getvalue() == inner.getvalue()
    with pytest.raises(UnsafeItem):
        load_item(held.getvalue())
    state = {"train_state": {"step": torch.tensor(4), "log_steps": inner}, "model": trained.model.state_dict()}
    path = save_plain(state, tmp_path / "step-4")
    run = taken_over(start_run, path, exclude_from_loading=("optimizer", "lr_scheduler", "dataloader"))
    with pytest.raises(CheckpointUnsafe, match="log_steps"):
        run.manager.load()


def test_an_item_is_loaded_as_a_bytesio_only_if_it_is_nothing_else() -> None:
    buffer = io.BytesIO()
    torch.save({"inside": io.BytesIO(b"x")}, buffer)
    with pytest.raises(UnsafeItem):
        load_item(buffer.getvalue())
    assert pickle.dumps(io.BytesIO(b"x"))  # torch.save pickles a BytesIO like any other object.
