"""Lightning's Trainer, on processors, with our manager in it: the line that its users write, and what they find."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.e2e.jobs import free_port
from torchtitan_lite.checkpoint.examining.opened import open_checkpoint
from torchtitan_lite.errors import ConfigError

pytestmark = [
    pytest.mark.skipif(not find_spec("lightning"), reason="lightning is not installed"),
    pytest.mark.filterwarnings("ignore"),
]

RUNS = Path(__file__).with_name("lightning_run.py")


class Ended(NamedTuple):
    """The end of a run: the exit code of each rank, what they printed by name, and all of their output."""

    codes: list[int]
    said: dict[str, str]
    log: str


def said_in(log: Path) -> dict[str, str]:
    return dict(re.findall(r"(?m)^(rank .+?): (.+)$", log.read_text()))


class Runs:
    """A process that has Lightning loaded, and forks runs in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._number = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, RUNS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=RUNS.parents[2]
        )

    def run(self, name: str, *options: object, ranks: int = 1) -> Ended:
        """Train in the folder `name` until the run ends."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._number += 1
        log = self.folder / f"{self._number}.log"
        arguments = [str(self.folder / name), *map(str, options)]
        run = {"log": str(log), "ranks": ranks, "port": free_port(), "folder": str(self.folder), "arguments": arguments}
        print(json.dumps(run), file=self._process.stdin, flush=True)
        codes = json.loads(self._process.stdout.readline())
        return Ended(codes, said_in(log), log.read_text())

    def by_torchrun(self, name: str, *options: object) -> Ended:
        """Train on two ranks that torchrun starts; the exit code is torchrun's."""
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
        command = [sys.executable, *torchrun, str(RUNS), name, *map(str, options)]
        paths = [str(RUNS.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        log = self.folder / f"{name}.log"
        with log.open("w") as output:
            code = subprocess.call(command, cwd=self.folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        return Ended([code], said_in(log), log.read_text())

    def steps(self, name: str) -> list[int]:
        """Return the committed steps."""
        return sorted(int(path.name.removeprefix("step-")) for path in (self.folder / name).glob("step-*[0-9]"))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("lightning"))
    yield runs
    runs.close()


def case(
    *options: object, kills: Sequence[int], ranks: int = 1, marks: Sequence[pytest.MarkDecorator] = ()
) -> Any:  # pytest's ParameterSet
    name = " ".join(map(str, options)).replace("--", "") + f" x{ranks}"
    return pytest.param(options, kills, ranks, id=name, marks=[pytest.mark.slow, *marks])


MORE = [pytest.mark.exhaustive]
IN_EPOCHS, STATEFUL = ("--epochs", 2), ("--loader", "stateful")
CASES = [
    # 13 batches an epoch: killed in the first one, at its end, in the second one, and right before the end.
    case(*IN_EPOCHS, kills=[6, 14]),
    case(*IN_EPOCHS, kills=[13, 15, 26], marks=MORE),
    case("--steps", 20, "--own-generator", kills=[5, 14], marks=MORE),
    case(*IN_EPOCHS, "--workers", 2, kills=[6, 14], marks=MORE),
    case(*IN_EPOCHS, *STATEFUL, kills=[6, 14], marks=MORE),
    case("--steps", 30, *STATEFUL, "--own-generator", kills=[6, 14, 27], marks=MORE),
    case(*IN_EPOCHS, *STATEFUL, "--workers", 2, kills=[6, 14], marks=MORE),
    # The last step of an epoch has one batch in place of three.
    case("--epochs", 3, "--accumulate", 3, "--schedule", "epoch", kills=[8, 14]),
    case("--epochs", 3, "--accumulate", 3, "--schedule", "epoch", kills=[13, 15, 27], marks=MORE),
    # Validation after batches 6 and 12 of an epoch.
    case(*IN_EPOCHS, "--validate", 0.5, "--schedule", "plateau", kills=[7, 14]),
    case(*IN_EPOCHS, "--validate", 0.5, "--schedule", "plateau", kills=[8, 13, 20], marks=MORE),
    case("--steps", 20, "--validate", 1.0, *STATEFUL, kills=[6, 14]),
    case(*IN_EPOCHS, "--manual", kills=[6, 14]),
    case("--steps", 20, "--scaler", kills=[6]),
    case(*IN_EPOCHS, "--strategy", "ddp", kills=[4, 8], ranks=2),
    case(
        *("--steps", 13, "--strategy", "ddp", "--accumulate", 2, "--validate", 0.5, *STATEFUL),
        kills=[6, 8, 11],
        ranks=2,
        marks=MORE,
    ),
    case(*IN_EPOCHS, "--strategy", "fsdp2", kills=[4, 8], ranks=2),
    case(*IN_EPOCHS, "--strategy", "fsdp2", "--validate", 0.5, *STATEFUL, kills=[4, 8], ranks=2, marks=MORE),
]


@pytest.mark.parametrize(("options", "kills", "ranks"), CASES)
def test_a_killed_run_has_the_losses_and_weights_of_one_that_was_not(
    options: Sequence[object], kills: Sequence[int], ranks: int, runs: Runs, request: pytest.FixtureRequest
) -> None:
    name = re.sub(r"\W+", "-", request.node.name)
    straight = runs.run(f"straight-{name}", *options, "--interval", 1000, ranks=ranks)
    assert straight.codes == [0] * ranks, straight.log
    for kill in kills:
        killed = runs.run(f"{name}-{kill}", *options, "--kill-at", kill, ranks=ranks)
        assert killed.codes == [-signal.SIGKILL] * ranks, killed.log
        resumed = runs.run(f"{name}-{kill}", *options, ranks=ranks)
        assert resumed.codes == [0] * ranks, resumed.log
        assert killed.said | resumed.said == straight.said
        again = [what for what in resumed.said if re.search(rf"batch ({'|'.join(map(str, range(kill - 3)))})$", what)]
        assert not again, "only batches of a step that was not over"
        assert "WARNING" not in resumed.log


@pytest.mark.slow
def test_a_run_that_has_ended_continues_with_more_steps_or_epochs(runs: Runs) -> None:
    for kind, first, second in (("--steps", 8, 20), ("--steps", 13, 20), ("--epochs", 1, 2)):
        name = f"continued{kind}-{first}"
        straight = runs.run(f"{name}-straight", kind, second, "--interval", 1000)
        begun, continued = runs.run(name, kind, first), runs.run(name, kind, second)
        assert begun.codes == continued.codes == [0]
        both = begun.said | continued.said
        assert both == {**straight.said, **{what: each for what, each in both.items() if "ended" in what}}
        assert {what: each for what, each in continued.said.items() if "ended" in what}.items() <= straight.said.items()


@pytest.mark.slow
def test_on_sigterm_to_one_rank_all_save_the_same_step_and_leave_with_143(runs: Runs) -> None:
    options = ("--epochs", 2, "--strategy", "ddp")
    straight = runs.run("unsignalled", *options, "--interval", 1000, ranks=2)
    ended = runs.by_torchrun("signalled", *options, "--interval", 1000, "--signal-at", 5)
    assert (ended.codes, ended.log.count("exitcode  : 143")) == ([1], 2), ended.log
    [step] = runs.steps("signalled")
    assert step in (5, 6) and open_checkpoint(runs.folder / f"signalled/step-{step}").manifest is not None
    resumed = runs.run("signalled", *options, "--interval", 1000, ranks=2)
    assert resumed.codes == [0, 0] and f"rank 0 batch {step + 1}" in resumed.said
    assert ended.said | resumed.said == straight.said


@pytest.mark.slow
def test_without_exit_on_signal_the_trainer_stops_and_fit_returns(runs: Runs) -> None:
    ended = runs.run("stopped", "--epochs", 2, "--interval", 1000, "--signal-at", 5, "--stop-on-signal")
    assert ended.codes == [0], ended.log
    [step] = runs.steps("stopped")
    assert f"rank 0 ended at {step}" in ended.said and ended.said["rank 0 preempted by"] == "15"
    resumed = runs.run("stopped", "--epochs", 2, "--interval", 1000)
    straight = runs.run("unstopped", "--epochs", 2, "--interval", 1000)
    assert resumed.said.items() <= straight.said.items() and f"rank 0 batch {step + 1}" in resumed.said


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


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_both_names_of_the_package_work(package: str, tmp_path: Path) -> None:
    if not find_spec(package):
        pytest.skip(f"{package} is not installed")
    ended = subprocess.run(
        [sys.executable, "-c", SHORT.format(package=package)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert re.findall("loaded.*", ended.stdout) == ["loaded None True", "loaded 2 True"], ended.stderr


def test_without_lightning_one_sentence_says_so() -> None:
    script = "import sys; sys.modules |= dict.fromkeys(('lightning', 'pytorch_lightning')); " + (
        "import torchtitan_lite.integrations.lightning"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith(
        "lightning is not installed. Install it with: pip install 'torchtitan-lite[lightning]'"
    )


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
    assert caplog.text.count("This was tried with lightning 1.9, and found") == 1
