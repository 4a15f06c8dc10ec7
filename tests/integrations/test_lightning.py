"""Lightning's Trainer, on processors, with our manager in it: the line that its users write, and what they find."""

from __future__ import annotations

import json
import logging
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.e2e.jobs import free_port
from tests.integrations.killed import all_losses, run_until_it_ends, twice
from tests.integrations.served import ROOT, Ended, Served, continues, served, with_project
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.examining.opened import open_checkpoint

pytestmark = [
    pytest.mark.skipif(not find_spec("lightning"), reason="lightning is not installed"),
    pytest.mark.slow,  # the import of Lightning takes seconds
    pytest.mark.filterwarnings("ignore"),  # Lightning's own, at its import too
]

HOOKS = ("on_train_batch_start", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end")
NEVER = {"interval": 1000}


@pytest.fixture(scope="module")
def runs() -> Iterator[Served]:
    with served("lightning_run") as server:
        yield server


def drawn_by_hooks(*runs: Ended) -> list[str]:
    """Return what the hooks of an epoch and of a validation drew, each line once."""
    return sorted({line for run in runs for line in re.findall(r"(?m)^\d+ (?:epoch|validation) .+$", run.output)})


def steps_in(folder: Path) -> list[int]:
    """Return the committed steps."""
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*[0-9]"))


def case(
    ranks: int = 1, also_at: Sequence[int] = (), marks: Sequence[pytest.MarkDecorator] = (), **options: Any
) -> Any:
    """Return `options` on `ranks`, killed at a drawn batch and at those of `also_at`: a ParameterSet of pytest."""
    name = " ".join(f"{key} {value}" for key, value in options.items())
    return pytest.param(ranks, also_at, options, id=f"{name} x{ranks}", marks=marks)


MORE = [pytest.mark.exhaustive]
# 13 batches an epoch in one process, and 7 on two ranks. A kill at the beginning of a batch follows the last save:
# also after the last batch of an epoch, before it, and before the last one of the run.
CASES = [
    case(epochs=2, also_at=[14]),
    case(epochs=2, own_generator=True, also_at=[13, 14, 26], marks=MORE),
    case(steps=20, own_generator=True, marks=MORE),
    case(epochs=2, workers=2, also_at=[14], marks=MORE),
    case(epochs=2, loader="stateful", also_at=[13, 14, 26], marks=MORE),
    case(steps=30, loader="stateful", own_generator=True, also_at=[14, 27], marks=MORE),
    case(epochs=2, loader="stateful", workers=2, also_at=[14], marks=MORE),
    # The last step of an epoch has one batch in place of three.
    case(epochs=4, accumulate=3, schedule="epoch"),
    case(epochs=4, accumulate=3, schedule="epoch", loader="stateful", also_at=[13, 14, 40, 52], marks=MORE),
    # Validation after batches 6 and 12 of an epoch.
    case(epochs=2, validate=0.5, schedule="plateau", also_at=[7, 13, 14, 20], marks=MORE),
    case(steps=20, validate=1.0, loader="stateful", also_at=[14]),
    case(epochs=2, manual=True, also_at=[14], marks=MORE),
    case(steps=20, scaler=True, marks=MORE),
    case(2, epochs=3, strategy="ddp"),
    case(2, epochs=3, strategy="ddp", loader="stateful", also_at=[7, 8, 21], marks=MORE),
    case(2, steps=20, strategy="ddp", accumulate=2, validate=0.5, loader="stateful", also_at=[8, 11], marks=MORE),
    case(2, epochs=3, strategy="fsdp2"),
    case(2, epochs=3, strategy="fsdp2", validate=0.5, loader="stateful", also_at=[7, 8, 21], marks=MORE),
]


@pytest.mark.parametrize(("ranks", "also_at", "options"), CASES)
def test_a_killed_run_has_the_losses_and_weights_of_one_that_was_not(
    ranks: int, also_at: Sequence[int], options: dict[str, Any], runs: Served, tmp_path: Path, draw: random.Random
) -> None:
    straight = runs.run(tmp_path / "straight.log", ranks, folder=tmp_path / "straight", **options, **NEVER)
    assert straight.codes == [0] * ranks, straight.output
    assert len({step for _, step, _ in straight.losses}) >= 20
    num_batches = straight.losses.total() // ranks
    # Two steps are over then, so at least the first one of them is committed.
    batches = twice(draw, 2 * options.get("accumulate", 1) + 1, num_batches)
    drawn = [{"kill_at": batch, "kill_in": draw.choice(HOOKS)} for batch in batches]
    for kills in [drawn, *([{"kill_at": batch, "kill_waits": True}] for batch in also_at)]:
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        ended = run_until_it_ends(kills, runs.run, folder, ranks, **options)
        assert continues(ended[-1], straight), f"{kills}: {ended[-1].output}"
        assert all_losses(ended) == straight.losses, f"{kills}"
        assert drawn_by_hooks(*ended) == drawn_by_hooks(straight), f"{kills}: {ended[-1].output}"
        if "kill_waits" in kills[0]:
            again = set.intersection(*({step for _, step, _ in run.losses} for run in ended))
            assert len(again) <= 1, "only batches of a step that was not over"
        assert "WARNING" not in ended[-1].output


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"steps": 13}, {"steps": 20}),
        pytest.param({"steps": 8}, {"steps": 20}, marks=MORE),
        pytest.param({"epochs": 1}, {"epochs": 2}, marks=MORE),
    ],
    ids=str,
)
def test_a_run_that_has_ended_continues_with_more_steps_or_epochs(
    first: dict[str, int], second: dict[str, int], runs: Served, tmp_path: Path
) -> None:
    straight = runs.run(tmp_path / "straight.log", folder=tmp_path / "straight", **second, **NEVER)
    begun = runs.run(tmp_path / "begun.log", folder=tmp_path / "run", **first)
    continued = runs.run(tmp_path / "continued.log", folder=tmp_path / "run", **second)
    assert begun.codes == continued.codes == [0], continued.output
    assert begun.losses + continued.losses == straight.losses
    assert drawn_by_hooks(begun, continued) == drawn_by_hooks(straight)
    assert continued.end == straight.end


def test_on_sigterm_to_one_rank_all_save_the_same_step_and_leave_with_143(
    runs: Served, tmp_path: Path, draw: random.Random
) -> None:
    options: dict[str, Any] = {"epochs": 3, "strategy": "ddp", **NEVER}
    straight = runs.run(tmp_path / "straight.log", 2, folder=tmp_path / "straight", **options)
    at = draw.randint(2, 19)
    left = runs.run(tmp_path / "left.log", 2, folder=tmp_path / "run", signal_at=at, **options)
    assert left.codes == [143, 143], left.output
    _continues_after_a_signal(left, at, straight, runs, tmp_path, options)


@pytest.mark.exhaustive
def test_torchrun_says_that_its_ranks_left_with_143(runs: Served, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 3, "strategy": "ddp", **NEVER}
    straight = runs.run(tmp_path / "straight.log", 2, folder=tmp_path / "straight", **options)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    given = json.dumps({"folder": str(tmp_path / "run"), "signal_at": 5, **options})
    log = tmp_path / "left.log"
    with log.open("w") as output:
        code = subprocess.call(
            [sys.executable, *torchrun, str(ROOT / "tests" / "integrations" / "lightning_run.py"), given],
            cwd=tmp_path,
            env=with_project(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    left = Ended(log.read_text(), [code])
    assert (left.codes, left.output.count("exitcode  : 143")) == ([1], 2), left.output
    _continues_after_a_signal(left, 5, straight, runs, tmp_path, options)


def _continues_after_a_signal(
    left: Ended, at: int, straight: Ended, runs: Served, tmp_path: Path, options: dict[str, Any]
) -> None:
    [step] = steps_in(tmp_path / "run")
    assert step in (at, at + 1) and open_checkpoint(tmp_path / f"run/step-{step}").manifest is not None
    resumed = runs.run(tmp_path / "resumed.log", 2, folder=tmp_path / "run", **options)
    assert resumed.codes == [0, 0] and resumed.first_step == step + 1, resumed.output
    assert left.losses + resumed.losses == straight.losses
    assert resumed.end == straight.end


def test_without_exit_on_signal_the_trainer_stops_and_fit_returns(runs: Served, tmp_path: Path) -> None:
    options = {"epochs": 2, **NEVER}
    ended = runs.run(tmp_path / "stopped.log", folder=tmp_path / "run", signal_at=5, exit_on_signal=False, **options)
    assert ended.codes == [0], ended.output
    [step] = steps_in(tmp_path / "run")
    assert (ended.end[0]["step"], ended.end[0]["preempted_by"]) == (step, signal.SIGTERM)
    resumed = runs.run(tmp_path / "resumed.log", folder=tmp_path / "run", **options)
    straight = runs.run(tmp_path / "straight.log", folder=tmp_path / "straight", **options)
    assert ended.losses + resumed.losses == straight.losses and continues(resumed, straight)


SHORT = """
import warnings; warnings.simplefilter("ignore")
import {package} as lightning
import torch
from torchtitan_lite.integrations.lightning import Checkpoints

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 1)), batch_size=2)
off = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)
for steps in (2, 4):
    checkpoints = Checkpoints("checkpoint", interval=1)
    trainer = lightning.Trainer(max_steps=steps, accelerator="cpu", devices=1, callbacks=[checkpoints], **off)
    trainer.fit(Module(), loader)
    print("loaded", checkpoints.manager.loaded_step, isinstance(checkpoints, lightning.Callback))
"""


@pytest.mark.parametrize("package", ["pytorch_lightning", pytest.param("lightning.pytorch", marks=MORE)])
def test_both_names_of_the_package_work(package: str, tmp_path: Path) -> None:
    if not find_spec(package):
        pytest.skip(f"{package} is not installed")
    ended = subprocess.run(
        [sys.executable, "-c", SHORT.format(package=package)],
        cwd=tmp_path,
        env=with_project(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.findall("loaded.*", ended.stdout) == ["loaded None True", "loaded 2 True"], ended.stderr


def fit(loader: object = None, *, folder: Path, step: Any = None, ckpt_path: Any = None, **settings: Any) -> Any:
    """Fit two steps of a small module with Checkpoints and `settings` of the Trainer; return the module."""
    import lightning

    from torchtitan_lite.integrations.lightning import Checkpoints

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    if step is not None:
        Module.training_step = step
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger", "enable_checkpointing"), False)
    callbacks = [Checkpoints(folder, async_mode="disabled"), *settings.pop("callbacks", [])]
    settings = {"max_steps": 2, "accelerator": "cpu", "devices": 1, **quiet, "callbacks": callbacks, **settings}
    loader = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2) if loader is None else loader
    module = Module()
    lightning.Trainer(**settings).fit(module, loader, ckpt_path=ckpt_path)
    return module


def test_an_unknown_key_or_what_the_trainer_has_is_refused_at_construction() -> None:
    from torchtitan_lite.integrations.lightning import Checkpoints

    with pytest.raises(ConfigError, match="interval"):
        Checkpoints("outputs", intervall=3)
    with pytest.raises(ConfigError, match="model: expected none, because the Trainer has it"):
        Checkpoints("outputs", model=nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="states: expected names other than 'lightning'"):
        Checkpoints("outputs", states={"lightning": {}})


def test_a_strategy_that_was_not_tried_is_refused_by_name(tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    from torchtitan_lite.integrations.lightning import Checkpoints

    class Sharded(DDPStrategy):
        pass

    with pytest.raises(ConfigError, match=r"expected one of SingleDeviceStrategy.*, found Sharded.*fully_shard"):
        Checkpoints(tmp_path).setup(lightning.Trainer(strategy=Sharded(), accelerator="cpu"), None, "fit")
    spawning = lightning.Trainer(strategy="ddp_spawn", accelerator="cpu", devices=2)
    with pytest.raises(ConfigError, match=r"found ones that it spawns or forks.*strategy='ddp'"):
        Checkpoints(tmp_path).setup(spawning, None, "fit")


def test_lightnings_own_saver_in_the_folder_and_its_checkpoint_are_refused(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    for own in (tmp_path / "run", tmp_path / "run" / "best"):
        with pytest.raises(ConfigError, match=r"ModelCheckpoint: expected another folder.*enable_checkpointing=False"):
            fit(folder=tmp_path / "run", callbacks=[ModelCheckpoint(own)], enable_checkpointing=True)
    with pytest.raises(ConfigError, match=r"fit\(ckpt_path=...\): expected none.*found .*a\.ckpt"):
        fit(folder=tmp_path / "run", ckpt_path=_checkpoint_of_lightning(tmp_path))
    fit(folder=tmp_path / "run", callbacks=[ModelCheckpoint(tmp_path / "other")], enable_checkpointing=True)
    assert list((tmp_path / "other").iterdir()) and (tmp_path / "run" / "step-2").is_dir()


def _checkpoint_of_lightning(folder: Path) -> Path:
    import lightning

    trainer = fit(folder=folder / "first").trainer
    assert isinstance(trainer, lightning.Trainer)
    trainer.save_checkpoint(folder / "a.ckpt")
    return folder / "a.ckpt"


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(2, 1),)] * 8)


class Own:
    """A loader with a state of its own kind."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(2, 1),)] * 8)

    def __len__(self) -> int:
        return 8

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def test_data_that_cannot_be_resumed_exactly_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_dataloader: expected a length, found none.*limit_train_batches"):
        fit(DataLoader(Stream(), batch_size=None), folder=tmp_path)
    fit(DataLoader(Stream(), batch_size=None), folder=tmp_path / "limited", limit_train_batches=4)
    with pytest.raises(ConfigError, match="found a Own with a state of its own"):
        fit(Own(), folder=tmp_path)
    with pytest.raises(ConfigError, match=r"reload_dataloaders_every_n_epochs=...\): expected 0, found 1"):
        fit(folder=tmp_path, reload_dataloaders_every_n_epochs=1)

    def of_iterator(self: Any, dataloader_iter: Any) -> Any:
        return self.net(next(dataloader_iter)[0][0]).square().mean()

    with pytest.raises(ConfigError, match=r"training_step: expected \(batch, batch_idx\), found dataloader_iter"):
        fit(folder=tmp_path, step=of_iterator)


def test_what_hooks_add_is_saved_and_a_hook_that_needs_more_is_refused(tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.callbacks import EMAWeightAveraging

    class Adds(lightning.Callback):
        value, loaded = 1, 0

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["adds"] = self.value

        def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            self.loaded = checkpoint["adds"]

    first, second = Adds(), Adds()
    first.value = 7
    fit(folder=tmp_path / "adds", callbacks=[first])
    fit(folder=tmp_path / "adds", callbacks=[second], max_steps=3)
    assert (first.loaded, second.loaded) == (0, 7)
    with pytest.raises(ConfigError, match=r"EMAWeightAveraging\.on_save_checkpoint.*'state_dict'"):
        fit(folder=tmp_path / "ema", callbacks=[EMAWeightAveraging()])


def test_a_fast_dev_run_saves_nothing_and_a_signal_after_fit_is_as_before_it(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    fit(folder=tmp_path / "dev", fast_dev_run=True)
    assert not (tmp_path / "dev").exists()
    fit(folder=tmp_path / "run")
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_version_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torchtitan_lite.integrations import lightning as integration

    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(integration, "TRIED", "1.9")
    fit(folder=tmp_path)
    assert caplog.text.count("Tested with lightning 1.9 only, and") == 1
