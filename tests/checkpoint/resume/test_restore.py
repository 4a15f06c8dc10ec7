"""What a load restores, what it refuses, and what a partial or renamed load reads."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.small_run import SmallRun
from tests.store.filled import rewrite
from torchtitan_lite.checkpoint.state.per_rank import PerRank
from torchtitan_lite.errors import CheckpointMismatch, ConfigError, SaveFailed

StartRun = Callable[..., SmallRun]


@pytest.fixture(autouse=True)
def _facts_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="torchtitan_lite")


class Ema:
    """A state of the user, unknown to the manager."""

    def __init__(self) -> None:
        self.shadow, self.note = torch.zeros(3), "fresh"

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow.clone(), "about": {"note": self.note}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shadow, self.note = state_dict["shadow"], state_dict["about"]["note"]


def test_a_state_of_the_users_own_comes_back(start_run: StartRun) -> None:
    ema = Ema()
    _saved(start_run, states={"ema": ema}, before=lambda: (ema.shadow.fill_(7), setattr(ema, "note", "seen")))
    loaded = Ema()
    assert start_run(states={"ema": loaded}).manager.load()
    assert loaded.shadow.tolist() == [7, 7, 7] and loaded.note == "seen"


class Versioned(nn.Module):
    """Up to version 1 its scale was a logarithm."""

    _version = 2

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([scale]))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}scale"] = state[f"{prefix}scale"].exp()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Held:
    """A state with a module, and of a type of its own."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.loaded = module, dict[str, Any]()

    def state_dict(self) -> dict[str, Any]:
        return defaultdict(list, module=self.module.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict
        self.module.load_state_dict(state_dict["module"])


@pytest.mark.parametrize("wrap", [lambda module: module, PerRank, Held, lambda module: PerRank(Held(module))])
def test_a_module_among_the_states_is_loaded_with_its_version(
    start_run: StartRun, wrap: Callable[[nn.Module], Any]
) -> None:
    start_run(interval=1, states={"loss": wrap(Versioned(3.0))}).finished(1)
    module = Versioned(5.0)
    start_run(interval=1, states={"loss": wrap(module)}).resumed()
    assert module.scale.item() == 3.0


def test_the_state_of_a_rank_keeps_its_type(start_run: StartRun) -> None:
    start_run(interval=1, states={"held": PerRank(Held(nn.Linear(1, 1)))}).finished(1)
    held = Held(nn.Linear(1, 1))
    start_run(interval=1, states={"held": PerRank(held)}).resumed()
    assert type(held.loaded) is defaultdict


def test_the_random_generators_continue_bit_for_bit_on_the_same_topology(start_run: StartRun) -> None:
    random.seed(1)
    np.random.seed(2)
    _saved(start_run)
    expected = _draw()
    run = start_run()
    _draw()
    run.manager.load()
    assert _draw() == expected


def test_on_another_topology_new_generators_begin_the_same_at_every_resume(
    start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    _saved(start_run)
    drawn = []
    for _ in range(2):
        run = start_run(seams={"topology": "8 ranks"})
        torch.manual_seed(5)
        run.manager.load()
        drawn.append(_draw())
    assert drawn[0] == drawn[1]
    assert "The random generators of 1 rank do not fit 8 ranks" in caplog.text


def test_digests_prove_a_resume(start_run: StartRun, caplog: pytest.LogCaptureFixture) -> None:
    _saved(start_run, digest_tensors=("save",))
    start_run(digest_tensors=("load",)).manager.load()
    assert "tensors: they are what was saved" in caplog.text


def test_a_tensor_that_is_not_what_was_saved_is_named(start_run: StartRun) -> None:
    run = _saved(start_run, digest_tensors=("save",))
    wrong = {"model.second.weight": "0" * 32}
    rewrite(run.root / "step-1", lambda document: document["extra"]["tensor_digests"].update(wrong))
    with pytest.raises(CheckpointMismatch, match=r"model\.second\.weight is not, after loading, what was saved"):
        start_run(digest_tensors=("load",)).manager.load()


def test_without_digests_nothing_is_verified_and_a_warning_says_so(
    start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    _saved(start_run)
    start_run(digest_tensors=("load",)).manager.load()
    assert "has no tensor digests" in caplog.text


@pytest.mark.parametrize(
    "rules", [{"load_rename": ("^first[.]=first.",)}, {"load_cast": True}, {"load_strictness": "warn"}]
)
def test_after_a_load_that_may_change_tensors_nothing_is_verified_and_a_warning_says_so(
    rules: dict[str, Any], start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    saved = _saved(start_run, digest_tensors=("save",))
    run = start_run(digest_tensors=("load",), **rules)
    if "load_cast" in rules:
        run.model.bfloat16()
    run.manager.load()
    assert "nothing is compared after this load: with renames, casts or a lower load_strictness" in caplog.text
    assert "they are what was saved" not in caplog.text
    assert torch.equal(run.model.first.weight.float(), saved.model.first.weight.to(run.model.first.weight).float())
    assert _moment(run, run.model.first.weight).dtype == run.model.first.weight.dtype, "cast with its parameter"


def test_excluded_tensors_and_their_optimizer_state_stay_as_they_are(start_run: StartRun) -> None:
    saved = _saved(start_run)
    run = start_run(seed=1, load_exclude=("second.*",))
    fresh = run.model.second.weight.clone()
    run.manager.load()
    assert torch.equal(run.model.second.weight, fresh)
    assert torch.equal(run.model.first.weight, saved.model.first.weight)
    assert not run.optimizer.state.get(run.model.second.weight)
    assert torch.equal(_moment(run, run.model.first.weight), _moment(saved, saved.model.first.weight))


def test_include_loads_only_what_it_names(start_run: StartRun) -> None:
    saved = _saved(start_run)
    run = start_run(seed=1, load_include=("first.weight",))
    fresh = run.model.second.weight.clone()
    run.manager.load()
    assert torch.equal(run.model.first.weight, saved.model.first.weight)
    assert torch.equal(run.model.second.weight, fresh)


def test_a_glob_that_matches_nothing_is_a_warning(start_run: StartRun, caplog: pytest.LogCaptureFixture) -> None:
    _saved(start_run)
    start_run(load_exclude=("scond.*",)).manager.load()
    assert "'scond.*' matches no tensor of the model" in caplog.text


def test_renamed_tensors_are_found_with_their_optimizer_state(start_run: StartRun) -> None:
    saved = _saved(start_run)
    run = start_run(seed=1, load_rename=("^first=third",), load_strictness="warn")
    run.model.third = run.model.first
    del run.model.first
    run.manager.load()
    assert torch.equal(run.model.third.weight, saved.model.first.weight)
    assert torch.equal(_moment(run, run.model.third.weight), _moment(saved, saved.model.first.weight))


@pytest.mark.parametrize("rename", ["no separator", "=empty", "(=broken"])
def test_an_invalid_rename_is_refused(rename: str, start_run: StartRun) -> None:
    _saved(start_run)
    with pytest.raises(ConfigError, match=r"checkpoint\.load_rename"):
        start_run(load_rename=(rename,)).manager.load()


def test_a_dtype_is_never_cast_silently(start_run: StartRun) -> None:
    saved = _saved(start_run)
    run = start_run(exclude_from_loading=("optimizer", "lr_scheduler"))
    run.model.double()
    with pytest.raises(CheckpointMismatch, match=r"first\.weight: dtype torch\.float32 in the checkpoint"):
        run.manager.load()
    cast = start_run(exclude_from_loading=("optimizer", "lr_scheduler"), load_cast=True)
    cast.model.double()
    cast.manager.load()
    assert torch.equal(cast.model.first.weight, saved.model.first.weight.double())


@pytest.mark.parametrize("strictness", ["warn", "ignore"])
def test_a_lower_strictness_loads_what_fits(
    strictness: str, start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    saved = _saved(start_run)
    run = start_run(load_strictness=strictness, exclude_from_loading=("optimizer", "lr_scheduler"))
    run.model.second = torch.nn.Linear(8, 2)
    run.manager.load()
    assert torch.equal(run.model.first.weight, saved.model.first.weight)
    assert ("shape [1, 8] in the checkpoint, [2, 8] expected" in caplog.text) == (strictness == "warn")


def test_a_dry_run_reports_and_changes_nothing(start_run: StartRun) -> None:
    run = _saved(start_run)
    names = sorted(path.name for path in run.root.iterdir())
    other = start_run(seed=1, exclude_from_loading=("optimizer", "lr_scheduler"), seams={"topology": "2 ranks"})
    other.model.second = torch.nn.Linear(8, 2)
    before = other.model.first.weight.clone()
    report = other.manager.dry_run()
    assert report is not None and report.refusals
    assert "Resume from" in str(report) and "model" not in str(report).splitlines()[0]
    assert "second.weight: shape [1, 8] in the checkpoint, [2, 8] expected" in str(report)
    assert "topology: 1 rank -> 2 ranks" in str(report)
    assert torch.equal(other.model.first.weight, before) and other.train_state.step == 0
    assert sorted(path.name for path in run.root.iterdir()) == names


def test_a_dry_run_of_a_resume_that_fits_has_no_refusals(start_run: StartRun) -> None:
    _saved(start_run)
    report = start_run().manager.dry_run()
    assert report is not None and not report.refusals and str(report).endswith("It would continue.")
    assert start_run(folder=start_run().root / "elsewhere").manager.dry_run() is None


def _saved(
    start_run: StartRun, *, before: Callable[[], object] | None = None, states: Any = None, **options: Any
) -> SmallRun:
    run = start_run(interval=1, states=states, **options)
    if before is not None:
        before()
    run.step()
    run.manager.close()
    return run


def _draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(1)),
    ]


def _moment(run: SmallRun, parameter: Tensor) -> Tensor:
    moment: Tensor = run.optimizer.state[parameter]["exp_avg"]
    return moment


@pytest.mark.promise("A state that could not be loaded again fails its save, and the error names it.", section="state")
def test_a_state_that_could_not_be_loaded_again_fails_the_save_and_is_named(start_run: StartRun) -> None:
    class Queue(Ema):
        def state_dict(self) -> dict[str, Any]:
            return {"waiting": (frozenset([1]),)}

    run = start_run(interval=1, states={"queue": Queue()}, max_failed_saves=1)
    run.step()
    with pytest.raises(SaveFailed, match=r"queue\.waiting holds an object that could not be loaded again"):
        run.step()


def test_a_load_waits_for_the_save_in_flight(start_run: StartRun) -> None:
    run = start_run(interval=1, async_mode="async")
    run.step()
    assert run.manager.load(1)
