"""The manager in the Trainer of transformers, as a callback.

    Checkpoints("outputs/checkpoint", interval=500).train(trainer)

in place of `trainer.train()`. The Trainer finds its place in the data by `resume_from_checkpoint`, so it gets a folder
in its own form that has its `TrainerState` and no weights; everything else is loaded into the prepared objects
when training begins. A step is saved once the Trainer has logged and evaluated it, right before the next one.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torchtitan_lite.checkpoint import CheckpointManager, CheckpointReader
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.checkpoint.reading.regions import RankReads
from torchtitan_lite.checkpoint.reading.source import LoadSource, Wanted
from torchtitan_lite.checkpoint.resume.fallback import Candidates
from torchtitan_lite.checkpoint.state.rng import RngState
from torchtitan_lite.config.own_loop import loop_config
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import ConfigError, ExtraMissing
from torchtitan_lite.events import ignore
from torchtitan_lite.integrations.accelerate import for_accelerator, refuse_untried
from torchtitan_lite.integrations.loop_exit import leave, warn_of_another_version
from torchtitan_lite.stores import open_store

try:
    from safetensors.torch import save_file
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import TrainOutput
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
except ImportError as error:
    raise ExtraMissing.of(error, "transformers") from None

__all__ = ["Checkpoints"]

TRIED = "5.23"
"""The versions of transformers with which this was tried."""
_STATE = "trainer"
"""The name of the Trainer's state in a checkpoint."""
_REFUSED = {
    "auto_find_batch_size": "Name the batch size: a second try would begin in the middle of the run",
    "enable_jit_checkpoint": "The manager saves on a signal, too",
    "load_best_model_at_end": "Set keep_best_k and keep_best_metric here, and load that step with load_model",
}
"""Arguments of the Trainer that do what the manager does, each with what to do instead."""


class TrainerCheckpoints(TrainerCallback):  # type: ignore[misc]  # transformers need not be installed
    """Saves into `folder` and resumes from it; `keys` are those of `[checkpoint]`.

    On SIGTERM, SIGUSR1 or SIGINT all ranks save the same step and leave with 128 + signal, unless `exit_on_signal` is
    false: then training stops. Raises ConfigError for an unknown key or a wrong value.
    """

    def __init__(
        self, folder: str | os.PathLike[str] = "outputs/checkpoint", *, exit_on_signal: bool = True, **keys: Any
    ) -> None:
        if in_memory := [name for name in keys if name.startswith("memory_")]:
            raise ConfigError(
                f"{in_memory[0]}: expected no copies in memory: the Trainer's place in the data is read from a folder. "
                "Leave it out."
            )
        self._config = loop_config(folder, keys)
        self._folder, self._keys, self._exit_on_signal = os.fspath(folder), keys, exit_on_signal
        self._trainer: Trainer | None = None
        self._manager: CheckpointManager | None = None
        self._begun_at = 0
        """The step that training continues from."""
        self._due = 0
        """The step that is done and not yet given to the manager; 0: none."""
        self._generators: Mapping[str, Any] | None = None
        """Those of the checkpoint, for the first step: the iterator of the data is made before and draws from them."""

    def train(
        self, trainer: Trainer, *, resume_from_checkpoint: str | bool | None = None, **arguments: Any
    ) -> TrainOutput:
        """Call `trainer.train(**arguments)`, from the latest checkpoint on if there is one, and return its result.

        Without one the run begins with `resume_from_checkpoint`, a checkpoint of the Trainer's own, if that is given.
        A run that has done all its steps trains none. Raises ConfigError for arguments of the Trainer, or a kind of
        parallelism, that were not tried, and what `CheckpointManager.load` and `save` raise. **Collective**.
        """
        _refuse_arguments(trainer, self._folder)
        warn_of_another_version("transformers", TRIED)
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        try:
            with TemporaryDirectory() as mark:
                begin = self._resume_from(Path(mark)) or resume_from_checkpoint
                return trainer.train(resume_from_checkpoint=begin, **arguments)
        except _HasEnded:
            return TrainOutput(self._begun_at, 0.0, {})
        finally:
            self._trainer = None
            if self._manager is not None:
                self._manager.close()

    def _resume_from(self, mark: Path) -> str | None:
        """Make `mark` a checkpoint in the Trainer's own form of the latest step, without weights; None without one."""
        config, state = self._config.checkpoint, ""
        self._begun_at = 0
        if not config.enable_checkpoint:
            return None
        with closing(Peers(timedelta(seconds=config.timeout_seconds))) as peers:
            candidates = Candidates(open_store(self._folder), Wanted(config.load_step, config), peers, ignore)
            for source in candidates:
                with candidates.trying(source):
                    state = "" if source.model_only else peers.on_coordinator(partial(_state_in, source))
        if candidates.taken is None or not state:
            return None
        self._begun_at = candidates.taken.step
        assert self._trainer is not None
        (mark / TRAINER_STATE_NAME).write_text(state)
        _write_no_weights(self._trainer.model, mark)
        return str(mark)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self._trainer
        if trainer is None:
            raise ConfigError(
                "callbacks: expected a run that Checkpoints began, found trainer.train(). Call "
                "Checkpoints(...).train(trainer) in its place."
            )
        self._manager = for_accelerator(
            trainer.accelerator,
            model=trainer.model_wrapped,
            optimizer=trainer.optimizer,
            lr_scheduler=trainer.lr_scheduler,
            states={_STATE: _SavedState(trainer)},
            folder=self._folder,
            **self._keys,
        )
        self._manager.load()
        if (found := self._manager.loaded_step or 0) != self._begun_at:
            # Between the two another job has saved, or the step has proved damaged and is set aside.
            raise ConfigError(
                f"{self._folder}: expected step {self._begun_at}, whose place in the data is known, found step "
                f"{found}. Start again."
            )
        self._begun_at = state.global_step  # Also of a checkpoint of the Trainer's own.
        # At the end of an epoch the next iterator draws from the generators as in an uninterrupted run.
        is_within_epoch = found > 0 and not float(state.epoch or 0).is_integer()
        self._generators = RngState().state_dict() if is_within_epoch else None
        self._manager.reset()
        self._heed_signal(control)

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._save_due(control)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step == self._begun_at >= state.max_steps > 0:
            raise _HasEnded
        self._save_due(control)
        generators, self._generators = self._generators, None
        if generators is not None:
            RngState().load_state_dict(dict(generators))

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert self._manager is not None
        self._manager.maybe_wait_for_staging()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._due = state.global_step

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._save_due(control, is_last=True)

    def _save_due(self, control: TrainerControl, is_last: bool = False) -> None:
        assert self._manager is not None
        step, self._due = self._due, 0
        if step and not self._manager.preempted_by:
            self._manager.save(step, force=is_last)
            self._heed_signal(control)

    def _heed_signal(self, control: TrainerControl) -> None:
        assert self._manager is not None
        if not self._manager.preempted_by:
            return
        if self._exit_on_signal:
            leave(self._manager, self._manager.preempted_by)
        control.should_training_stop = True


Checkpoints = TrainerCheckpoints  # The name to import.


class _HasEnded(Exception):
    """All steps of the run are done: raised in place of one more."""


class _SavedState:
    """The `TrainerState` as transformers writes it, with the states of its callbacks, from rank 0.

    It is read before the Trainer begins, so nothing is left to load.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, str]:
        trainer = self._trainer
        if trainer.args.process_index:
            return {}
        state = dataclasses.asdict(trainer.state) | {"stateful_callbacks": _states_of(trainer)}
        return {"json": json.dumps(state)}

    def load_state_dict(self, state_dict: Mapping[str, str]) -> None:
        """Do nothing."""


def _states_of(trainer: Trainer) -> dict[str, Any]:
    """Return the states of the callbacks, by class: a list where a class has several."""
    found: dict[str, list[Any]] = {}
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            found.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: states[0] if len(states) == 1 else states for name, states in found.items()}


def _write_no_weights(model: Any, mark: Path) -> None:
    """Write into `mark` what the Trainer takes for the weights of `model`, and which changes none of them."""
    if type(model).__module__.partition(".")[0] == "peft":
        model.save_pretrained(mark)  # The adapters, as they are.
        return
    # An index that has all names, whose file has no tensor: what is missing there would be warned of.
    save_file({}, mark / "none.safetensors")
    names = dict.fromkeys(model.state_dict(), "none.safetensors")
    (mark / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def _state_in(source: LoadSource) -> str:
    """Return the Trainer's state in `source`, verified. Raises what a load raises."""
    read: list[str] = []
    CheckpointReader(CheckpointFolder(source.path)).read(RankReads(objects=[(f"{_STATE}.json", read.append)]))
    return read[0]


def _refuse_arguments(trainer: Trainer, folder: str) -> None:
    refuse_untried(trainer.accelerator)
    arguments = trainer.args
    for name, instead in _REFUSED.items():
        if getattr(arguments, name, False):
            raise ConfigError(f"TrainingArguments.{name}: expected false, found true. {instead}.")
    if arguments.n_gpu > 1:
        raise ConfigError(
            f"TrainingArguments: expected a process for each GPU, found {arguments.n_gpu} GPUs in one. Start "
            "with torchrun."
        )
    if arguments.save_strategy != "no" and Path(arguments.output_dir).resolve() == Path(folder).resolve():
        raise ConfigError(
            f"TrainingArguments.output_dir: expected another folder than {folder}, in which the Trainer would save its "
            'own checkpoints. Set save_strategy="no", or name another one.'
        )
