"""The section [checkpoint]: when and how a run is saved, and what it goes on from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal, get_args

from torchtitan_lite.config.checks import at_least, choice
from torchtitan_lite.config.field_types import check_types
from torchtitan_lite.config.folders import refuse_address
from torchtitan_lite.config.sections.training import DtypeName
from torchtitan_lite.errors import ConfigError

AsyncMode = Literal["disabled", "async", "async_with_pinned_mem"]
IntervalType = Literal["steps", "seconds"]
VerifyOnLoad = Literal["off", "size", "full"]
WhenBusy = Literal["wait", "skip"]
Strictness = Literal["error", "warn", "ignore"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When checkpoints are made, what is in them, which are kept, what is loaded."""

    enable_checkpoint: bool = False
    """Save and load checkpoints."""

    folder: str = "checkpoint"
    """Folder of checkpoints, inside dump_folder."""

    interval_type: IntervalType = "steps"
    """Unit of `interval`. Seconds are counted from the start of the loop and from each save; all ranks decide
    together."""

    interval: int = 500
    """Steps or seconds from one checkpoint to the next."""

    model_weights_only: bool = False
    """Save only the model's weights at the last step, in export_dtype, under bare names. Such a checkpoint is never
    resumed from."""

    export_dtype: DtypeName = "float32"
    """dtype of floating tensors in the weights-only checkpoint."""

    export_folder: str = ""
    """Folder for the weights-only checkpoint, inside dump_folder; if set, it is made, and the last step is saved in
    full as well. Empty: in its place, with model_weights_only."""

    save_trained_only: bool = False
    """Leave parameters that are not trained (requires_grad False) out of checkpoints and exports, and out of loads:
    the frozen base of a LoRA run. The same parameters must be frozen whenever the run is resumed."""

    create_seed_checkpoint: bool = False
    """Save freshly initialised weights as step-0 and leave; one process only."""

    async_mode: AsyncMode = "disabled"
    """ "disabled": training stands still for a save; "async": for a copy, a thread writes; "async_with_pinned_mem": for
    a copy into shared (on CUDA pinned) memory, a process writes."""

    keep_latest_k: int = 0
    """Full checkpoints kept, counted once they are durable; 0: all."""

    load_step: int = -1
    """Step to load; -1: the latest."""

    initial_load_path: str = ""
    """Checkpoint to start from while the run's own folder has none; a folder that holds .metadata."""

    initial_load_model_only: bool = True
    """Load only the model from initial_load_path; otherwise everything."""

    exclude_from_loading: tuple[str, ...] = ()
    """States left as they are at load: optimizer (together with lr_scheduler), lr_scheduler, dataloader, train_state
    (together with both; steps are then counted from the start again, on a branch), or your own."""

    load_include: tuple[str, ...] = ()
    """Globs over the model's names (layers.*.attention.*): only these tensors, and their optimizer state, are
    loaded; none: all."""

    load_exclude: tuple[str, ...] = ()
    """Globs over the model's names: these tensors, and their optimizer state, are left as they are."""

    load_rename: tuple[str, ...] = ()
    """Renames of the checkpoint's names before they are looked up, as regular expressions: pattern=replacement."""

    load_cast: bool = False
    """Cast floating tensors of another dtype to the model's; otherwise another dtype is a mismatch. Always on for the
    weights of initial_load_path."""

    load_strictness: Strictness = "error"
    """What missing, unexpected or mismatched tensors are: an error; a warning, the rest being loaded; or nothing."""

    verify_on_load: VerifyOnLoad = "full"
    """How a checkpoint is checked before it is trusted: "full": every byte that is read against the digests taken when
    it was written, in the same pass; "size": the manifest and the sizes of files; "off": the manifest alone."""

    new_branch: bool = False
    """With load_step: begin another branch at it, even if the latest checkpoint is on a branch begun there."""

    dry_run: bool = False
    """Print what a resume would load, change and refuse, and leave; exit 0 if it would resume, 1 if not."""

    tensor_digests: bool = False
    """Put a digest of every tensor into the manifest, the same for every topology."""

    verify_resume: bool = False
    """After a load, digest every tensor again and fail, naming the first that differs from the manifest."""

    enable_first_step_checkpoint: bool = False
    """Also save at step 1, to see early that saving works."""

    load_only: bool = False
    """Load, never save; nothing is written into `job.dump_folder`, no metrics either."""

    timeout_seconds: int = 1800
    """The longest wait for a save or a load, its collectives included."""

    when_busy: WhenBusy = "wait"
    """What a save that is due does while the last one is not durable yet: "wait" for it, or "skip" this one. Either
    way one save is under way at most, and memory is that of one."""

    debug_staging: bool = False
    """Digest every tensor before it is staged and compare with the copy: a save during which something changed fails,
    and names what. Costs as much again as staging; async modes only."""

    lease_timeout_seconds: int = 30
    """How long another job's lease of the folder, from a process that cannot be looked at, may show no sign of life
    until it is taken over. A process of this machine that has ended is succeeded at once."""

    max_failed_saves: int = 3
    """Failed saves in a row that end the run; one that succeeds starts the count anew."""

    preemption_signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1", "SIGINT")
    """Signals that make all ranks save the same step and leave with 128 + signal; empty: none."""

    preemption_grace_seconds: int = 600
    """Time from the signal after which a rank that could not leave (its peers are gone) is ended, with exit code 1.
    Not longer than the scheduler's."""

    def __post_init__(self) -> None:
        check_types(self, "checkpoint")
        for name in ("folder", "export_folder"):
            refuse_address(f"checkpoint.{name}", getattr(self, name), "Name a folder inside job.dump_folder.")
        refuse_address("checkpoint.initial_load_path", self.initial_load_path, "Copy the checkpoint to a folder first.")
        if not self.folder:
            raise ConfigError("checkpoint.folder: expected the name of a folder, found an empty string.")
        choice("checkpoint.interval_type", self.interval_type, get_args(IntervalType))
        choice("checkpoint.export_dtype", self.export_dtype, get_args(DtypeName))
        object.__setattr__(self, "async_mode", self.async_mode.lower())
        choice("checkpoint.async_mode", self.async_mode, get_args(AsyncMode))
        at_least("checkpoint.interval", self.interval, 1)
        at_least("checkpoint.keep_latest_k", self.keep_latest_k, 0)
        at_least("checkpoint.load_step", self.load_step, -1)
        at_least("checkpoint.timeout_seconds", self.timeout_seconds, 1)
        choice("checkpoint.verify_on_load", self.verify_on_load, get_args(VerifyOnLoad))
        choice("checkpoint.when_busy", self.when_busy, get_args(WhenBusy))
        # A few heartbeats, or jobs that live would be taken for dead.
        at_least("checkpoint.lease_timeout_seconds", self.lease_timeout_seconds, 10)
        at_least("checkpoint.max_failed_saves", self.max_failed_saves, 1)
        at_least("checkpoint.preemption_grace_seconds", self.preemption_grace_seconds, 1)
        choice("checkpoint.load_strictness", self.load_strictness, get_args(Strictness))
        if self.export_folder and PurePath(self.export_folder) == PurePath(self.folder):
            raise ConfigError(
                f"checkpoint.export_folder: {self.export_folder!r} is checkpoint.folder too, where the export would "
                "take the place of the last full checkpoint. Name another folder."
            )
        if self.create_seed_checkpoint and (self.load_only or not self.enable_checkpoint):
            raise ConfigError(
                "checkpoint.create_seed_checkpoint: nothing would be saved. Set enable_checkpoint, and not load_only."
            )
        if "model" in self.exclude_from_loading:
            raise ConfigError(
                "checkpoint.exclude_from_loading: 'model' cannot be left out; a run without its weights is a fresh "
                "one. Leave checkpointing off, or point dump_folder elsewhere."
            )
        with_it = {"lr_scheduler", "dataloader"} - {*self.exclude_from_loading}
        if "train_state" in self.exclude_from_loading and with_it:
            raise ConfigError(
                "checkpoint.exclude_from_loading: 'train_state' without 'lr_scheduler' and 'dataloader': steps would "
                "be counted from 1 while the learning rate and the data go on where they were. "
                f"Add {', '.join(sorted(with_it))}."
            )
        if "optimizer" in self.exclude_from_loading and "lr_scheduler" not in self.exclude_from_loading:
            raise ConfigError(
                "checkpoint.exclude_from_loading: 'optimizer' without 'lr_scheduler': a fresh optimizer would go on at "
                "an old learning rate. Add lr_scheduler."
            )
