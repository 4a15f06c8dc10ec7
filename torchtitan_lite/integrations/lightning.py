"""The manager in Lightning's Trainer, as one of its callbacks.

    checkpoints = Checkpoints("outputs/checkpoint", interval=500)
    trainer = lightning.Trainer(..., enable_checkpointing=False, callbacks=[checkpoints])
    trainer.fit(module, loader)

A step is saved right before the batch after it is read: all hooks of the step, and the validation that follows it, are
over then, and nothing of the next step has begun. No hook of a callback is at that moment, so the callback puts its own
loaders in place of the Trainer's (`PositionedLoader`), which call it.
"""

from __future__ import annotations

import atexit
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.checkpoint.state.rng import RngState
from torchtitan_lite.config.address import is_in_object_store
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.config.own_loop import loop_config
from torchtitan_lite.errors import ConfigError, ExtraMissing
from torchtitan_lite.integrations.lightning_state import DataState, LoopState, PartsState
from torchtitan_lite.integrations.loop_exit import leave, warn_of_another_version
from torchtitan_lite.log import logger

__all__ = ["Checkpoints"]

TRIED = "2.6"
"""The versions of Lightning with which this was tried."""
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""The two names of the package."""
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
"""The strategies with which this was tried."""
_GIVEN = ("model", "optimizer", "lr_scheduler", "dataloader")
"""What the Trainer has."""
_STATE = "lightning"
"""The name of what is saved of Lightning, next to the model and the optimizers."""


def _lightning() -> Any:
    """Return the package under the name that the script has imported, or else under the one that there is."""
    own, other = _PACKAGES
    if sys.modules.get(other) and own not in sys.modules:
        return sys.modules[other]
    try:
        return import_module(own)
    except ModuleNotFoundError as error:
        if error.name not in (own, own.partition(".")[0]) or find_spec(other) is None:
            raise
    return import_module(other)


try:
    _package = _lightning()
except ImportError as error:
    raise ExtraMissing.of(error, "lightning") from None


class LightningCheckpoints(_package.Callback):  # type: ignore[misc, name-defined]  # Lightning need not be installed
    """Save and resume a run of Lightning's Trainer in `folder`, with the keys of `CheckpointManager.for_loop`.

    The model, the optimizers, the schedulers, the loops, the position in the training data, all random generators, and
    the states of the precision plugin, the datamodule and the other callbacks are saved; `states` adds others. The step
    of a checkpoint is `trainer.global_step`.

    On SIGTERM, SIGUSR1 or SIGINT all ranks save the same step, close the process group and leave with 128 + signal;
    with `exit_on_signal=False` they set `trainer.should_stop`, and `fit` returns. With `fast_dev_run`, or
    `enable_checkpoint=False`, nothing is done.

    Raises ConfigError for a key or value of the manager at construction, and for what was not tried when `fit` begins.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] = Checkpoint.folder,
        *,
        exit_on_signal: bool = True,
        states: Mapping[str, Any] | None = None,
        **checkpoint: Any,
    ) -> None:
        own = set(inspect.signature(CheckpointManager.for_loop).parameters)
        self._config = loop_config(folder, {key: value for key, value in checkpoint.items() if key not in own})
        _refuse_given(checkpoint, states or {})
        self._folder, self._exit_on_signal = folder, exit_on_signal
        self._states, self._checkpoint = dict(states or {}), checkpoint
        self._fit: _Fit | None = None
        self._first = _First(self)

    @property
    def manager(self) -> CheckpointManager | None:
        """The manager of the present or last `fit`; None before it."""
        return None if self._fit is None else self._fit.manager

    @property
    def preempted_by(self) -> int:
        """The signal that the ranks saved and stopped for; 0 for none."""
        return 0 if self._fit is None else self._fit.manager.preempted_by

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit" or self._is_off(trainer):
            return
        _refuse_untried(trainer)
        warn_of_another_version(_package.__name__.partition(".")[0], TRIED)
        others = [each for each in trainer.callbacks if each is not self and each is not self._first]
        # What other callbacks do in a hook is saved with the step.
        trainer.callbacks = [self._first, *others, self]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self._is_off(trainer):
            return
        _refuse_ckpt_path(trainer)
        _refuse_other_savers(trainer, self._folder)
        self._fit = None
        fit = _Fit(trainer, self._config.checkpoint, exit_on_signal=self._exit_on_signal)
        fit.make_manager(self._folder, self._states, self._checkpoint)
        self._fit = fit
        fit.load()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for each in self.fits():
            each.start()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for each in self.fits():
            each.manager.maybe_wait_for_staging()  # Optimizers without step hooks do not wait by themselves.

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for each in self.fits():
            each.after_batch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for each in self.fits():
            each.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        for each in self.fits():
            each.manager.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for each in self.fits():
            each.manager.close()

    def _is_off(self, trainer: Any) -> bool:
        return bool(trainer.fast_dev_run) or not self._config.checkpoint.enable_checkpoint

    def fits(self) -> Iterator[_Fit]:
        """Yield the present fit, if there is one and it saves."""
        if self._fit is not None:
            yield self._fit


Checkpoints = LightningCheckpoints  # The name to import.


class _First(_package.Callback):  # type: ignore[misc, name-defined]  # nor here
    """Comes before all other callbacks, where `owner` comes after them."""

    def __init__(self, owner: Checkpoints) -> None:
        self._owner = owner

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        for each in self._owner.fits():
            each.begin_epoch()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        for each in self._owner.fits():
            each.end_epoch()


class _Fit:
    """One `fit` of `trainer`, with its manager."""

    manager: CheckpointManager

    def __init__(self, trainer: Any, config: Checkpoint, *, exit_on_signal: bool) -> None:
        self._trainer, self._config, self._exit_on_signal = trainer, config, exit_on_signal
        self._interval = _build_interval(config)
        self._loops = LoopState(trainer)
        self._data = DataState(trainer, config, self._before_batch)
        self._generators: dict[str, Any] | None = None
        """What `load` restored, until training continues."""
        self._handlers: dict[int, Any] = {}
        self._step = self._step_before = 0
        self._is_pending = self._has_stopped = False
        """Whether `_step` is over and was not passed to the manager; whether no further batch is to be read."""
        self._num_open = 0
        """Batches since `_step`, whose gradients are in no checkpoint."""

    def make_manager(self, folder: str | os.PathLike[str], states: dict[str, Any], checkpoint: dict[str, Any]) -> None:
        """Make the manager of what the Trainer has. Raises ConfigError for what cannot be saved."""
        trainer = self._trainer
        state = PartsState(trainer, self._loops)
        state.state_dict()  # Refuses what cannot be saved now, not at the first save.
        self.manager = CheckpointManager.for_loop(
            model=trainer.lightning_module,
            optimizer=trainer.optimizers,
            lr_scheduler=[each.scheduler for each in trainer.lr_scheduler_configs],
            dataloader=self._data,
            states={_STATE: state, **states},
            folder=folder,
            **checkpoint,
        )

    def load(self) -> None:
        """Load the latest step. **Collective**."""
        if self.manager.load():
            self._generators = RngState().state_dict()
        self._step = self._step_before = self._trainer.global_step
        watched = [signal.Signals[name] for name in self._config.preemption_signals]
        handlers = {number: signal.getsignal(number) for number in watched}
        self._handlers = {number: each for number, each in handlers.items() if each is not None}

    def start(self) -> None:
        """Begin to train. **Collective**."""
        _refuse_ckpt_path(self._trainer)
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._handlers.items():
                signal.signal(number, handler)  # Lightning's would end the run before the ranks have saved.
        self._data.restore_metrics()
        self.manager.reset()
        self._leave_if_agreed()

    def begin_epoch(self) -> None:
        """Continue with the generators of the load, if that is of the end of an epoch: hooks may draw."""
        if self._loops.begins == "end":
            self._restore_generators()

    def after_batch(self) -> None:
        """Note whether the batch was the last one of a step."""
        self._num_open += 1
        if self._trainer.global_step != self._step:
            self._step_before, self._step = self._step, self._trainer.global_step
            self._is_pending, self._num_open = True, 0

    def end_epoch(self) -> None:
        """Save the last step if the epoch ends before its last batch, as if no hook of its end had run."""
        if self._loops.is_in_epoch:
            self._loops.note("step", ended=True)
            self._save_pending(force=self._ends_now())

    def end(self) -> None:
        """Save the last step of the run. **Collective**."""
        if self._has_stopped or not self._step:
            return
        if self._loops.begins != "step":
            self._loops.note("end")
            self._data.leave()
        elif self._num_open:
            logger.warning(
                "The run ended %d batches after step %d, and no checkpoint has these batches",
                self._num_open,
                self._step,
            )
            return
        self._save_pending(force=True)
        self.manager.finish(self._step)

    def _ends_now(self) -> bool:
        trainer = self._trainer
        return bool(trainer.should_stop) or 0 <= trainer.max_steps <= trainer.global_step

    def _before_batch(self) -> bool:
        """Save the step that is over, before a batch is read. Return whether the ranks have stopped: the epoch ends."""
        self._restore_generators()
        self._loops.forget()
        self._save_pending()
        return self._has_stopped

    def _save_pending(self, *, force: bool = False) -> None:
        if not self._is_pending:
            return
        self._is_pending = False
        before, step, interval = self._step_before, self._step, self._interval
        # Several optimizers of one batch make several steps: an interval may end at one between, which no batch has.
        now = interval > 0 and step - before > 1 and step // interval > before // interval
        self.manager.save(step, force=force, now=now)
        self._leave_if_agreed()

    def _leave_if_agreed(self) -> None:
        number = self.manager.preempted_by
        if not number:
            return
        if self._exit_on_signal:
            for each in self._handlers:
                # A launcher sends one as soon as the first rank has left. Lightning undoes what `close` has set.
                atexit.register(signal.signal, each, signal.SIG_IGN)
            leave(self.manager, number)
        self._has_stopped = self._trainer.should_stop = True
        # The ranks have agreed to leave, whatever number of epochs or steps was wanted.
        loop = self._trainer.fit_loop
        loop.min_epochs = loop.epoch_loop.min_steps = None

    def _restore_generators(self) -> None:
        generators, self._generators = self._generators, None
        if generators is not None:
            RngState().load_state_dict(generators)


def _build_interval(config: Checkpoint) -> int:
    """Return the steps from one save to the next; 0 if they are not counted in steps."""
    return config.interval if config.interval_type == "steps" else 0


def _refuse_given(checkpoint: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Raise ConfigError for what the Trainer has, and for our own name."""
    for name in _GIVEN:
        if name in checkpoint:
            raise ConfigError(f"{name}: expected none, because the Trainer has it, found one. Leave it out.")
    if _STATE in states:
        raise ConfigError(
            f"states: expected names other than {_STATE!r}, which is Lightning's own state, found it. Give yours "
            "another name."
        )


def _refuse_untried(trainer: Any) -> None:
    """Raise ConfigError for what was not tried, or cannot be resumed."""
    kind, launcher = type(trainer.strategy), type(trainer.strategy.launcher).__name__
    if kind.__name__ not in _STRATEGIES or not kind.__module__.startswith(_PACKAGES):
        raise ConfigError(
            f"Trainer(strategy=...): expected one of {', '.join(_STRATEGIES)}, found {kind.__name__}, which was not "
            "tried. Use ModelParallelStrategy with fully_shard (FSDP2) for sharded parameters, or DDPStrategy."
        )
    if launcher == "_MultiProcessingLauncher":
        raise ConfigError(
            "Trainer(strategy=...): expected ranks that torchrun or Lightning starts as scripts, found ones that it "
            "spawns or forks, which was not tried. Use strategy='ddp'."
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise ConfigError(
            f"Trainer(reload_dataloaders_every_n_epochs=...): expected 0, found "
            f"{trainer.reload_dataloaders_every_n_epochs}: a resume would reload within an epoch. Leave it out, and "
            "let the dataset or the sampler change with set_epoch."
        )


def _refuse_ckpt_path(trainer: Any) -> None:
    """Raise ConfigError for a checkpoint that Lightning loads itself: some strategies do so after us."""
    if trainer.ckpt_path:
        raise ConfigError(
            f"fit(ckpt_path=...): expected none, because Checkpoints resumes the run, found {trainer.ckpt_path}. Leave "
            "it out; to begin with the weights of that file, load them into the module before fit."
        )


def _refuse_other_savers(trainer: Any, folder: str | os.PathLike[str]) -> None:
    """Raise ConfigError for Lightning's own saver in `folder`."""
    if is_in_object_store(os.fspath(folder)):
        return
    own = Path(folder).resolve()
    for each in trainer.checkpoint_callbacks:
        other = getattr(each, "dirpath", None)
        if other and own in (Path(other).resolve(), *Path(other).resolve().parents):
            raise ConfigError(
                f"{type(each).__name__}: expected another folder than that of Checkpoints, found {other}. Leave it out "
                "with Trainer(enable_checkpointing=False), or give it another dirpath."
            )
