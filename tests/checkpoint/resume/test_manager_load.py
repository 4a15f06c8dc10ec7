"""What a run resumes from, and that it continues as if it had never stopped."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.only_once import load_and_close, save_and_close
from tests.checkpoint.reading.foreign_folders import save_plain, state_of
from tests.checkpoint.small_run import SmallRun, Tiny, job_config, same
from tests.disks import injected
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.state.stateful import ModelWrapper
from torchtitan_lite.errors import CheckpointMismatch, CheckpointNotFound, ConfigError, CorpusChanged
from torchtitan_lite.store.store import CheckpointStore


def saved_run(start_run: StartRun, steps: int = 3, **options: Any) -> SmallRun:
    """Return a run that saved every step and is closed."""
    run = start_run(interval=1, **options).finished(steps)
    return run


def test_a_named_fault_happens_after_the_choice_and_before_anything_changes(
    start_run: StartRun,
) -> None:
    saved_run(start_run, steps=1)
    run = start_run()
    before = run.contents()
    with injected("EIO@load:step=1"), pytest.raises(OSError, match="Input/output error"):
        run.manager.load()
    assert same(run.contents(), before)


def test_a_fresh_start_is_logged_and_changes_nothing(start_run: StartRun, caplog: pytest.LogCaptureFixture) -> None:
    run = start_run()
    before = run.contents()
    with caplog.at_level(logging.INFO, "torchtitan_lite"):
        assert not run.manager.load()
    assert "fresh start" in caplog.text
    assert same(run.contents(), before)
    assert run.manager.loaded_step is None


def test_what_was_saved_comes_back_whatever_happened_since(start_run: StartRun, mode: str) -> None:
    run = start_run(interval=1, async_mode=mode)
    run.step()
    saved = run.contents()
    run.manager.close()
    run.scramble()
    assert not same(run.contents()["model"], saved["model"])
    assert run.manager.load(1)
    assert same(run.contents(), saved)
    assert run.manager.loaded_step == 1


def test_it_comes_back_where_new_tensors_have_no_memory(start_run: StartRun, mode: str) -> None:
    run, fresh = start_run(async_mode=mode).loaded(), start_run(async_mode=mode, seed=1)
    run.train(2, last=False)
    with torch.device("meta"):
        run.manager.save(2, force=True)
        run.manager.close()
        assert fresh.manager.load()
    assert same(fresh.contents(), run.contents())


def test_another_process_gets_all_of_it(start_run: StartRun) -> None:
    run = saved_run(start_run)
    fresh = start_run(seed=1).resumed()
    assert same(fresh.contents(), run.contents())
    assert fresh.events.steps("loaded") == [3]
    assert fresh.events.figures("loaded")["bytes"] > 0


def test_a_load_is_logged_in_torchtitans_words(start_run: StartRun, caplog: pytest.LogCaptureFixture) -> None:
    saved_run(start_run)
    with caplog.at_level(logging.INFO, "torchtitan_lite"):
        run = start_run().loaded()
    assert f"Checkpointing active. Checkpoints will be loaded from and saved to {run.root}" in caplog.messages
    assert "Loading the checkpoint at step 3." in caplog.messages
    assert "Finished loading the checkpoint in 0.00 seconds." in caplog.messages


def test_a_run_that_was_ended_and_started_again_is_bitwise_the_run_that_was_not(
    start_run: StartRun, tmp_path: Path, mode: str
) -> None:
    options = {"interval": 3, "async_mode": mode}
    straight = start_run(tmp_path / "straight", **options)
    straight.train(12)
    for end in (5, 8, 12):
        run = start_run(tmp_path / "again", seed=0 if end == 5 else end, **options)
        assert run.manager.load() == (end != 5)
        assert run.train_state.step == {5: 0, 8: 3, 12: 6}[end]
        run.train(end, last=end == 12)
        run.manager.close()
    assert run.losses == straight.losses
    assert same(run.contents(), straight.contents())


def test_a_step_is_loaded_by_argument_and_by_config(start_run: StartRun) -> None:
    saved_run(start_run)
    for run, step in ((start_run(), 2), (start_run(load_step=2), -1)):
        assert run.manager.load(step)
        assert (run.train_state.step, run.manager.loaded_step) == (2, 2)


def test_a_step_that_a_caller_names_is_loaded_each_time(start_run: StartRun) -> None:
    run = saved_run(start_run, steps=4)
    run = start_run(interval=1)
    run.manager.load(2)
    run.train(3, last=False)
    assert run.manager.load(2)
    assert (run.train_state.step, run.manager.loaded_step) == (2, 2)
    run.train(4, last=False)
    assert [name for name in run.names() if "abandoned" not in name] == ["step-1", "step-2", "step-3", "step-4"]


def test_a_step_that_is_not_there_is_refused_and_nothing_changes(start_run: StartRun) -> None:
    saved_run(start_run)
    run = start_run()
    before = run.contents()
    with pytest.raises(CheckpointNotFound, match="it has 1, 2, 3"):
        run.manager.load(7)
    assert same(run.contents(), before)


def test_a_seed_checkpoint_gives_the_model_and_nothing_else(start_run: StartRun) -> None:
    seed = start_run(create_seed_checkpoint=True)
    seed.manager.save(0, force=True)
    run = start_run(seed=1, interval=1)
    before = run.contents()
    assert run.manager.load()
    assert same(run.contents(), before | {"model": seed.contents()["model"]})
    run.step()
    assert run.committed() == [0, 1]


@pytest.mark.parametrize("asked_for", [-1, 0])
def test_step_0_of_a_full_save_is_loaded_completely(start_run: StartRun, asked_for: int) -> None:
    run = start_run()
    run.step()
    run.manager.save(0, force=True)
    run.manager.close()
    fresh = start_run(seed=1)
    assert fresh.manager.load(asked_for)
    assert same(fresh.contents(), run.contents())
    assert fresh.manager.loaded_step == 0


def test_an_initial_path_gives_the_model_and_counts_on_the_first_start_only(
    start_run: StartRun, tmp_path: Path
) -> None:
    base = saved_run(start_run, folder=tmp_path / "base")
    options = {"folder": tmp_path / "tuned", "interval": 1, "initial_load_path": str(base.root / "step-3")}
    first = start_run(seed=1, **options)
    before = first.contents()
    assert first.manager.load()
    assert same(first.contents(), before | {"model": base.contents()["model"]})
    assert first.manager.loaded_step is None
    first.train(2)
    first.manager.close()
    again = start_run(seed=2, **options).resumed()
    assert same(again.contents(), first.contents())


def test_an_initial_path_gives_everything_if_the_config_says_so(start_run: StartRun, tmp_path: Path) -> None:
    base = saved_run(start_run, folder=tmp_path / "base")
    path = str(base.root / "step-2")
    run = start_run(tmp_path / "tuned", seed=1, initial_load_path=path, initial_load_model_only=False).resumed()
    assert run.train_state.step == 2
    assert run.losses == base.losses[:2]


def test_an_initial_path_that_is_not_there_is_refused(start_run: StartRun) -> None:
    with pytest.raises(CheckpointNotFound, match="nowhere holds no checkpoint"):
        start_run(initial_load_path="nowhere").manager.load()


def test_weights_in_bfloat16_begin_a_run_in_float32(start_run: StartRun, tmp_path: Path) -> None:
    base = start_run(tmp_path / "base", model_weights_only=True, export_dtype="bfloat16")
    base.train(2)
    run = start_run(tmp_path / "tuned", seed=1, initial_load_path=str(base.root / "step-2")).resumed()
    expected = {n: t.bfloat16().to(t.dtype) for n, t in base.model.state_dict().items() if t.is_floating_point()}
    assert same({name: run.model.state_dict()[name] for name in expected}, expected)
    assert torch.equal(run.model.counter, base.model.counter)


def test_a_weights_only_checkpoint_is_never_resumed(start_run: StartRun) -> None:
    start_run(model_weights_only=True, interval=9).train(2)
    run = start_run()
    assert not run.manager.load()
    assert run.manager.latest_step() == 2
    with pytest.raises(CheckpointMismatch, match="weights only"):
        run.manager.load(2)


@pytest.mark.parametrize(
    ("excluded", "kept"),
    [
        (("lr_scheduler",), {"schedule"}),
        (("optimizer", "lr_scheduler"), {"moments", "lr", "schedule"}),
        (("dataloader",), {"loader"}),
        (("train_state", "lr_scheduler", "dataloader"), {"step", "losses", "schedule", "loader"}),
    ],
)
def test_states_excluded_from_loading_do_not_change(
    start_run: StartRun, excluded: tuple[str, ...], kept: set[str]
) -> None:
    saved = saved_run(start_run).contents()
    run = start_run(seed=1, exclude_from_loading=excluded)
    before = run.contents()
    assert run.manager.load()
    loaded = run.contents()
    assert {name for name in loaded if same(loaded[name], before[name])} == kept
    assert {name for name in loaded if same(loaded[name], saved[name])} == saved.keys() - kept


class Note:
    """A state of the user, which may refuse."""

    def __init__(self, text: str, *, refuses: bool = False) -> None:
        self.text, self.refuses = text, refuses

    def state_dict(self) -> dict[str, Any]:
        return {"text": self.text, "nested": {"tensor": torch.ones(2), "empty": {}}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.refuses:
            raise CorpusChanged(["everything"])
        assert state_dict.keys() == {"text", "nested"}
        self.text = state_dict["text"]


def test_a_state_of_the_users_own_is_saved_loaded_and_excluded_by_its_name(start_run: StartRun) -> None:
    saved_run(start_run, states={"note": Note("saved")})
    loaded, left = Note("fresh"), Note("fresh")
    assert start_run(states={"note": loaded}).manager.load()
    assert start_run(states={"note": left}, exclude_from_loading=("note",)).manager.load()
    assert (loaded.text, left.text) == ("saved", "fresh")


def test_an_unknown_excluded_name_is_refused_with_the_known_ones(start_run: StartRun) -> None:
    with pytest.raises(ConfigError, match=r"no state 'nope'\. Expected some of dataloader, .*note"):
        start_run(states={"note": Note("")}, exclude_from_loading=("nope",))


def without_moments(run: SmallRun) -> dict[str, Any]:
    return {name: value for name, value in run.contents().items() if name != "moments"}


def test_a_state_that_is_not_in_the_checkpoint_is_refused_before_anything_changes(start_run: StartRun) -> None:
    saved_run(start_run)
    run = start_run(seed=1, states={"note": Note("")})
    before = without_moments(run)
    with pytest.raises(CheckpointMismatch, match=r"missing in the checkpoint \(1\):\n    note"):
        run.manager.load()
    assert same(without_moments(run), before)


@pytest.mark.promise("A load that is refused has changed nothing in the model, on any rank.", section="loaded")
def test_a_state_that_refuses_leaves_the_model_as_it_was(start_run: StartRun) -> None:
    saved_run(start_run, states={"note": Note("saved")})
    run = start_run(seed=1, states={"note": Note("", refuses=True)})
    before = run.contents()
    with pytest.raises(CorpusChanged):
        run.manager.load()
    assert same(run.contents()["model"], before["model"])


class Other(Tiny):
    """A model with one layer more, one less and one of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.third = nn.Linear(4, 9), nn.Linear(1, 1)
        del self.second


def test_a_model_that_does_not_fit_is_refused_in_one_report_before_anything_changes(
    start_run: StartRun, tmp_path: Path
) -> None:
    saved_run(start_run)
    model = Other()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    manager = CheckpointManager(None, [model], [optimizer], [], {}, job_config(tmp_path))
    with manager, pytest.raises(CheckpointMismatch) as refusal:
        manager.load()
    report = refusal.value.report
    assert "third.weight" in report
    assert "second.weight" in report
    assert "first.weight: shape [8, 4] in the checkpoint, [9, 4] expected" in report
    assert same(dict(model.state_dict()), before)


def test_a_parameter_without_a_gradient_does_not_prevent_a_resume(tmp_path: Path) -> None:
    def manager() -> tuple[nn.ModuleDict, torch.optim.AdamW, CheckpointManager]:
        model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, CheckpointManager(None, [model], [optimizer], [], {}, job_config(tmp_path))

    model, optimizer, saving = manager()
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_and_close(saving)
    model, optimizer, loading = manager()
    load_and_close(loading)
    steps = {name: optimizer.state.get(parameter, {}).get("step") for name, parameter in model.named_parameters()}
    assert steps == {"used.weight": 1, "used.bias": 1, "unused.weight": None, "unused.bias": None}


def test_existing_gradients_do_not_prevent_a_load(start_run: StartRun) -> None:
    saved = saved_run(start_run).contents()
    run = start_run(seed=1)
    run.model(torch.ones(2, 4)).sum().backward()
    assert run.manager.load()
    assert same(run.contents(), saved)


def test_a_plain_dcp_checkpoint_is_skipped_and_loads_if_it_is_named(
    start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run()
    run.train(2, last=False)
    run.train_state.step = 7
    save_plain(state_of(run), run.root / "step-7")
    CheckpointStore(run.root).folder_id(make=True)  # With no sign of a run of ours, the folder is refused.
    assert not start_run(seed=1).manager.load()
    assert "step-7 has no manifest and is skipped" in caplog.text
    asking = start_run(seed=1, load_step=7).resumed()
    assert same(asking.contents(), run.contents())


def test_a_save_that_was_cut_is_cleared_before_the_load(start_run: StartRun) -> None:
    saved_run(start_run, steps=2)
    run = start_run()
    (run.root / "step-3.staging").mkdir()
    (run.root / "step-3.staging" / "__0_0.distcp").write_bytes(b"half")
    assert run.manager.load()
    assert run.names() == ["step-1", "step-2"]


@pytest.mark.promise(
    "A run with `checkpoint.load_only` changes nothing in the folder of checkpoints, and adds nothing but the "
    "traces that you ask for to the dump folder.",
    section="writer",
)
def test_a_run_that_only_loads_removes_nothing(start_run: StartRun) -> None:
    saved_run(start_run, steps=2)
    run = start_run(load_only=True)
    (run.root / "step-3.staging").mkdir()
    assert run.manager.load()
    assert run.names() == ["step-1", "step-2", "step-3.staging"]


def test_without_loader_schedule_and_states_there_is_still_a_run(tmp_path: Path) -> None:
    def start() -> tuple[nn.Linear, CheckpointManager]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        return model, CheckpointManager(None, [model], [optimizer], [], {}, job_config(tmp_path))

    saved, manager = start()
    save_and_close(manager)
    loaded, manager = start()
    load_and_close(manager)
    assert torch.equal(saved.weight, loaded.weight)


def test_a_run_that_changed_to_float16_begins_with_a_fresh_scaler(
    start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    saved_run(start_run)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    run = start_run(seed=1, states={"grad_scaler": scaler})
    report = run.manager.dry_run()
    assert report is not None and report.refusals == [] and "grad_scaler: not in the checkpoint" in str(report)
    assert run.manager.load()
    assert scaler.get_scale() == 128.0
    assert "grad_scaler: not in the checkpoint, which was saved without a gradient scaler: a fresh one" in caplog.text


def test_a_missing_state_is_refused_with_the_way_out(start_run: StartRun) -> None:
    saved_run(start_run)
    with pytest.raises(CheckpointMismatch, match=r"begin a state fresh: --checkpoint\.exclude_from_loading=note$"):
        start_run(seed=1, states={"note": Note("")}).manager.load()


def test_names_that_differ_by_a_prefix_are_refused_with_the_rename_that_fits(
    start_run: StartRun, tmp_path: Path
) -> None:
    run = start_run()
    path = save_plain({"app": {"model": ModelWrapper(run.model).state_dict()}}, tmp_path / "base")
    options = {"folder": tmp_path / "tuned", "seed": 1, "initial_load_path": str(path)}
    with pytest.raises(CheckpointMismatch, match=r"--checkpoint\.load_rename='\^app\[\.\]model\[\.\]='"):
        start_run(**options).manager.load()
    tuned = start_run(**options, load_rename=("^app[.]model[.]=",)).resumed()
    assert same(tuned.contents()["model"], run.contents()["model"])


def test_a_tied_tensor_that_is_not_there_is_refused_with_what_leaves_it_out(tmp_path: Path) -> None:
    def tied() -> nn.ModuleDict:
        model = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
        model["head"].weight = model["embedding"].weight
        return model

    base = tied()
    path = save_plain({"embedding.weight": base["embedding"].weight.detach()}, tmp_path / "base")
    options = {"initial_load_path": str(path)}
    for exclude in ((), ("head.weight",)):
        model = tied()
        optimizer = torch.optim.AdamW(model.parameters())
        config = job_config(tmp_path / "tuned", **options, load_exclude=exclude)
        with CheckpointManager(None, [model], [optimizer], [], {}, config) as manager:
            if exclude:
                assert manager.load()
                assert torch.equal(model["head"].weight, base["head"].weight)
            else:
                with pytest.raises(CheckpointMismatch, match=r"same tensor as embedding.*load_exclude=head\.weight"):
                    manager.load()


class Stateless:
    """A loader with the methods but no state, such as a wrapper around a plain DataLoader."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("there is nothing to load")


def test_a_loader_whose_state_is_empty_is_warned_of_at_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for load in (False, True):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        with CheckpointManager(Stateless(), [model], [optimizer], [], {}, job_config(tmp_path)) as manager:
            if load:
                assert manager.load()
            else:
                manager.save(1, force=True)
    assert "dataloader: it has no state, here and in the checkpoint: the data begin from their start" in caplog.text


def test_the_log_names_the_step_of_the_checkpoint_that_a_run_begins_with(
    start_run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = start_run(tmp_path / "base", interval=2)
    base.train(2)
    run = start_run(tmp_path / "tuned", initial_load_path=str(base.root / "step-2"))
    with caplog.at_level("INFO", "torchtitan_lite"):
        assert run.manager.load()
    assert "Loading the checkpoint at step 2." in caplog.messages
    assert run.manager.loaded_step is None


def test_a_load_and_a_save_of_one_process_warn_of_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SmallRun(tmp_path).finished(1)
        with SmallRun(tmp_path).resumed() as run:
            run.step(last=True)
            assert run.committed() == [1, 2]
