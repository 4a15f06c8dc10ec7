"""The section [checkpoint]: when and how a run saves, and which checkpoint it resumes from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Annotated, Literal, get_args

from torchtitan_lite.config.address import is_in_object_store
from torchtitan_lite.config.checks import (
    AtLeastOne,
    AtLeastZero,
    NotNegative,
    at_least,
    check_types,
    refuse_address,
    refuse_unknown_address,
)
from torchtitan_lite.config.sections.training import DtypeName
from torchtitan_lite.errors import ConfigError

AsyncMode = Literal["disabled", "async", "async_with_pinned_mem"]
DcpMetadata = Literal["auto", "always", "never"]
DigestTime = Literal["save", "load", "staging", "ranks"]
Strictness = Literal["error", "warn", "ignore"]


_SIDES = ("min", "max")


def spelled_metric(name: str, *, highest: bool) -> str:
    """Return the value of keep_best_metric for the metric `name`, in its shortest spelling."""
    if highest:
        return f"max:{name}"
    return f"min:{name}" if name.partition(":")[0] in _SIDES else name


@dataclass(frozen=True, kw_only=True)
class _Written:
    """Where checkpoints go, and what else the end of a run writes."""

    enable_checkpoint: bool = False
    """Save and load checkpoints."""

    folder: str = "checkpoint"
    """Folder for checkpoints, inside job.dump_folder, or the address of one in an object store: s3://bucket/run.
    docs/where_a_step_can_be.md"""

    upload_folder: str = ""
    """Second folder for checkpoints: each committed one is uploaded there in the background, and a start loads from
    there what its own disk lacks. An address such as s3://bucket/run, or a folder, inside job.dump_folder unless it is
    absolute; empty: none. docs/where_a_step_can_be.md"""

    upload_max_mb_per_second: NotNegative = 0.0
    """Most megabytes (10^6 bytes) a second that the uploads of the run send; 0: no limit."""

    model_weights_only: bool = False
    """Save only the model's weights at the last step, in export_dtype, under bare parameter names. A run never resumes
    from such a checkpoint."""

    export_dtype: DtypeName = "float32"
    """dtype of floating-point tensors in the weights-only checkpoint."""

    export_folder: str = ""
    """Folder for the weights-only checkpoint, inside job.dump_folder, or an address. If set, the run writes that
    checkpoint there and also saves the last step in full. Empty: with model_weights_only, the weights-only checkpoint
    replaces the last full one."""

    last_save_in_hf: bool = False
    """At the end, also write the weights in Hugging Face's format, in export_dtype: into hf_folder/step-N, once the
    last checkpoint is durable. All ranks write it."""

    hf_folder: str = "hf"
    """Folder for last_save_in_hf, inside job.dump_folder."""

    save_trained_only: bool = False
    """Leave parameters that are not trained (requires_grad False) out of checkpoints and exports: the
    frozen base of a LoRA run. A load takes all that the checkpoint has; what it lacks must be frozen at the load."""

    def _check_folders(self) -> None:
        for name in ("folder", "export_folder", "upload_folder"):
            refuse_unknown_address(f"checkpoint.{name}", getattr(self, name))
        refuse_address("checkpoint.hf_folder", self.hf_folder, "Name a folder inside job.dump_folder.")
        if self.upload_folder and is_in_object_store(self.folder):
            raise ConfigError(
                f"checkpoint.upload_folder: found {self.upload_folder!r} with a folder in an object store, where saves "
                "go at once. Name a folder on disk as checkpoint.folder, or leave upload_folder out."
            )
        used = [name for name in ("export_folder", "upload_folder") if getattr(self, name)]
        taken: dict[PurePath, str] = {}
        for name in ("folder", *used, *(("hf_folder",) if self.last_save_in_hf or self.upload_folder else ())):
            value = getattr(self, name)
            other = taken.setdefault(PurePath(value), name)
            if not value or other != name:
                found = f"{value!r}, which is checkpoint.{other} too" if other != name else "an empty string"
                raise ConfigError(f"checkpoint.{name}: expected a folder of its own, found {found}. Name another one.")
        if self.last_save_in_hf and self.save_trained_only:
            raise ConfigError(
                "checkpoint.last_save_in_hf: with save_trained_only a checkpoint lacks the frozen parameters. Leave "
                "one of the two out; torchtitan-lite export --format peft writes adapters."
            )


@dataclass(frozen=True, kw_only=True)
class _Times:
    """When a run saves."""

    interval_type: Literal["steps", "seconds", "auto", "none"] = "steps"
    """When to save. "steps" and "seconds": every `interval` of them. "auto": so that the time lost to saves and to
    failures is least, as measured. "none": only for at_steps, or_every_seconds, save(now=True) and the last step.
    Seconds count from the start of the training loop and then from each save; all ranks save at the same step.
    docs/intervals.md compares them."""

    interval: AtLeastOne = 500
    """Steps or seconds from one checkpoint to the next, with interval_type "steps" or "seconds"."""

    or_every_seconds: NotNegative = 0.0
    """Also save once this many seconds have passed since the last save, whatever interval_type says: with "steps",
    whichever comes first; 0: off."""

    at_steps: tuple[int, ...] = ()
    """Also save at these steps, such as 100,1000,10000."""

    enable_first_step_checkpoint: bool = False
    """Also save at step 1, to find out early whether saving works."""

    mtbf_hours: NotNegative = 0.0
    """With interval_type "auto": the mean hours between failures of this run; 0: estimated from the number of ranks
    and the unclean ends of its starts so far."""

    max_lost_seconds: NotNegative = 0.0
    """With interval_type "auto": the most seconds of the run that a failure may lose; 0: no limit. Comes before
    max_overhead."""

    max_overhead: NotNegative = 0.0
    """With interval_type "auto": what saves may cost at most, as a part of the time between them (0.01: one percent);
    0: no limit."""

    def _check_times(self) -> None:
        for step in self.at_steps:
            at_least("checkpoint.at_steps", step, 1)


@dataclass(frozen=True, kw_only=True)
class _Copies:
    """How long a save blocks training, and which copies of the state stay in memory."""

    async_mode: AsyncMode = "disabled"
    """How long a save blocks training. "disabled": until it is durable; "async": while it copies the state, which a
    thread then writes; "async_with_pinned_mem": while it copies the state into shared memory (pinned on CUDA), which a
    process then writes."""

    memory_interval: AtLeastZero = 0
    """Steps from one image to the next: a copy of the state in memory only, which outlives the trainer. 0: only the
    copies that asynchronous saves make anyway. Above 0 the copies take three times the memory of one (two, if there is
    no room for three). Not with async_mode "disabled". docs/where_a_step_can_be.md says what survives which end."""

    memory_peer_copies: int = 0
    """How many other hosts keep each image in their memory, too: 0 or 1. With 1 the loss of a host costs a few steps,
    as that of a process. Needs memory_interval, several hosts, and six times the memory of one copy on each rank."""

    memory_peer_copy_max_mb_per_second: NotNegative = 0.0
    """The most megabytes per second that a host sends to the next one for memory_peer_copies; 0: no limit."""

    memory_ttl_seconds: NotNegative = 600.0
    """Seconds that images stay in memory after the last trainer ended, for a restart to resume from; 0: no images, and
    no process that holds them."""

    def _check_copies(self) -> None:
        if self.memory_interval and self.async_mode == "disabled":
            raise ConfigError(
                f"checkpoint.memory_interval = {self.memory_interval} with checkpoint.async_mode = 'disabled': such "
                "saves make no copy of the state. Set async_mode to 'async' or 'async_with_pinned_mem'."
            )
        if self.memory_peer_copies not in (0, 1):
            raise ConfigError(f"checkpoint.memory_peer_copies: expected 0 or 1, found {self.memory_peer_copies!r}.")
        if self.memory_peer_copies and not self.memory_interval:
            raise ConfigError(
                "checkpoint.memory_peer_copies = 1 with checkpoint.memory_interval = 0: peer copies are copies of "
                "in-memory snapshots, and there are none. Set checkpoint.memory_interval, such as 10."
            )
        if self.memory_interval and not self.memory_ttl_seconds:
            raise ConfigError(
                f"checkpoint.memory_interval = {self.memory_interval} with checkpoint.memory_ttl_seconds = 0: no "
                "process would hold snapshots. Set memory_ttl_seconds, such as 600."
            )


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """Which checkpoints stay."""

    keep_latest_k: AtLeastZero = 0
    """Full checkpoints to keep, counted once durable; 0: all. If another keep_ key is set, 0 keeps only what that one
    does. A checkpoint is removed only if no keep_ key keeps it; the latest one, and pinned ones, always stay."""

    keep_every_n_steps: AtLeastZero = 0
    """Also keep the checkpoints whose step is a multiple of this; 0: off."""

    keep_best_k: AtLeastZero = 0
    """Also keep the k checkpoints with the best keep_best_metric; 0: off. This key alone removes no checkpoint without
    that metric."""

    keep_best_metric: str = "loss"
    """The metric for keep_best_k, as given to save(metrics=...): its lowest values are the best, or with "max:" before
    the name ("max:accuracy") the highest. The trainer records loss and grad_norm."""

    keep_for_hours: NotNegative = 0.0
    """Also keep the checkpoints that were saved at most this many hours ago; 0: off."""

    min_free_disk_gb: NotNegative = 0.0
    """Free space in GB (10^9 bytes) on the disk of checkpoints. While there is less after a save, the oldest ones are
    removed that only keep_latest_k keeps, or no keep_ key is set for; 0: off."""

    @property
    def best_metric(self) -> tuple[str, bool]:
        """The name in keep_best_metric, and whether its highest values are the best."""
        side, colon, name = self.keep_best_metric.partition(":")
        return (name, side == "max") if colon and side in _SIDES else (self.keep_best_metric, False)

    def _check_kept(self) -> None:
        name, highest = self.best_metric
        if not name:
            raise ConfigError("checkpoint.keep_best_metric: expected the name of a metric, found an empty string.")
        object.__setattr__(self, "keep_best_metric", spelled_metric(name, highest=highest))


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What a start loads."""

    load_step: Annotated[int, partial(at_least, low=-1)] = -1
    """Step to load; -1: the latest."""

    new_branch: bool = False
    """With load_step: start another branch at that step, even if the latest checkpoint is on a branch that started
    there."""

    initial_load_path: str = ""
    """Checkpoint to start from while the run's own folder has none: a folder that holds .metadata."""

    initial_load_model_only: bool = True
    """Load only the model from initial_load_path; if off, load everything."""

    initial_load_in_hf: bool = False
    """initial_load_path names weights in Hugging Face's format, or others that import-weights reads. While the run's
    own folder has no checkpoint, they are imported into it as step-0, from which the run starts."""

    create_seed_checkpoint: bool = False
    """Save the initial weights as step-0, then exit. Needs exactly one process."""

    load_only: bool = False
    """Load, but never save. The run writes nothing into `job.dump_folder`, no metrics either."""

    dry_run: bool = False
    """Print what a resume would load, change and refuse, then exit: with 0 if it would resume, 1 if not."""

    def _check_start(self) -> None:
        refuse_unknown_address("checkpoint.initial_load_path", self.initial_load_path)
        if self.initial_load_in_hf and not self.initial_load_path:
            raise ConfigError(
                "checkpoint.initial_load_in_hf: there is no initial_load_path. Set it to the folder with the weights."
            )
        if self.initial_load_in_hf and self.create_seed_checkpoint:
            raise ConfigError(
                "checkpoint.create_seed_checkpoint: it saves new weights as step 0, and a later start would not import "
                "those of initial_load_in_hf. Leave one of the two out: the import makes a step 0, too."
            )
        if self.initial_load_in_hf and not self.initial_load_model_only:
            raise ConfigError(
                "checkpoint.initial_load_in_hf: published weights have no optimizer and no position in the data."
                " Set initial_load_model_only."
            )


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """Which part of a checkpoint a load takes, and what it checks."""

    exclude_from_loading: tuple[str, ...] = ()
    """States to skip at load, which keep their initial values: optimizer (only together with lr_scheduler),
    lr_scheduler, dataloader, train_state (only together with lr_scheduler and dataloader; steps then count from 1
    again, on a new branch), rng, or states of your own."""

    load_include: tuple[str, ...] = ()
    """Globs over the model's names (layers.*.attention.*): load only these tensors and their optimizer state; empty:
    all."""

    load_exclude: tuple[str, ...] = ()
    """Globs over the model's names: skip these tensors and their optimizer state, which keep their initial values."""

    load_rename: tuple[str, ...] = ()
    """Regular expressions, each pattern=replacement, that rename the checkpoint's tensors to the model's names."""

    load_cast: bool = False
    """Cast floating-point tensors to the model's dtype; if off, another dtype is a mismatch. Always on for the weights
    of initial_load_path."""

    load_strictness: Strictness = "error"
    """What a missing, unexpected or mismatched tensor causes: an error, a warning or nothing. With the last two the
    other tensors are loaded."""

    verify_on_load: Literal["off", "size", "full", "full_alone"] = "full"
    """What a load checks before it uses a checkpoint. "full": every byte that it reads, in the same pass, against the
    digests taken at the save; "full_alone": the same, and no rank takes bytes that another one has read; "size": the
    manifest and the sizes of files; "off": only the manifest."""

    def _check_loaded(self) -> None:
        if "model" in self.exclude_from_loading:
            raise ConfigError(
                "checkpoint.exclude_from_loading: 'model' cannot be left out; a run without its weights is a fresh "
                "start. Unset checkpoint.enable_checkpoint, or name another job.dump_folder."
            )
        with_it = {"lr_scheduler", "dataloader"} - {*self.exclude_from_loading}
        if "train_state" in self.exclude_from_loading and with_it:
            raise ConfigError(
                "checkpoint.exclude_from_loading: 'train_state' without 'lr_scheduler' and 'dataloader': steps would "
                "count from 1 again while the learning rate and the data continue where they were. "
                f"Add {', '.join(sorted(with_it))}."
            )
        if "optimizer" in self.exclude_from_loading and "lr_scheduler" not in self.exclude_from_loading:
            raise ConfigError(
                "checkpoint.exclude_from_loading: 'optimizer' without 'lr_scheduler': a new optimizer would start at "
                "an old learning rate. Add lr_scheduler."
            )


# A dataclass has the keys of its last base first.
@dataclass(frozen=True, kw_only=True)
class Checkpoint(_Loaded, _Start, _Kept, _Copies, _Times, _Written):
    """When a run saves, what a checkpoint holds, which ones are kept and what is loaded."""

    digest_tensors: tuple[str, ...] = ()
    """When every tensor is digested; any of these. "save": into the manifest, the same for every topology. "load":
    after a load, again, to compare with the manifest; a difference is an error that names the first such tensor.
    "staging": before the copy of an asynchronous save, to compare the copy; if a tensor changed meanwhile, the save
    fails and names it; that takes as long again as staging. "ranks": at every save, what several ranks hold, on each
    of them; a rank that differs is named with its host, and the run ends."""

    dcp_metadata: DcpMetadata = "auto"
    """Whether a save writes .metadata, which only DCP's own readers need; `torchtitan-lite add-metadata` adds it later.
    "auto": unless the state has more than 50,000 tensors and shards, which would take over a second."""

    timeout_seconds: AtLeastOne = 1800
    """Longest wait, in seconds, for a save or a load, its collectives included."""

    when_busy: Literal["wait", "skip"] = "wait"
    """What to do if a save is due and the last one is not durable yet: "wait" for the last one, or "skip" this one. In
    both cases at most one save is in flight, so there is at most one copy in memory."""

    # At least a few heartbeats: with fewer, the lease of a live job would look abandoned.
    lease_timeout_seconds: Annotated[int, partial(at_least, low=10)] = 30
    """Seconds without a sign of life after which the lease of another job on the folder is taken over, if its process
    cannot be inspected from here (another machine or container). The lease of a process on this machine that has ended
    is taken over at once."""

    max_failed_saves: AtLeastOne = 3
    """Failed saves in a row that end the run; a save that succeeds resets the count."""

    preemption_signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1", "SIGINT")
    """Signals that make all ranks save the same step and exit with 128 + signal; empty: none."""

    preemption_grace_seconds: AtLeastOne = 600
    """Seconds from the signal until a rank that could not leave, because its peers are gone, is ended with exit code 1.
    Set it below the time that your scheduler waits before it kills."""

    def __post_init__(self) -> None:
        check_types(self, "checkpoint")
        self._check_folders()
        self._check_times()
        self._check_copies()
        self._check_kept()
        self._check_start()
        self._check_loaded()
        times: tuple[str, ...] = get_args(DigestTime)
        for time in self.digest_tensors:
            if time not in times:
                raise ConfigError(f"checkpoint.digest_tensors: expected one of {', '.join(times)}, found {time!r}.")
        object.__setattr__(self, "digest_tensors", tuple(time for time in times if time in self.digest_tensors))
        for name, why in (("memory_interval", "keeps no images"), ("min_free_disk_gb", "is never full")):
            if is_in_object_store(self.folder) and getattr(self, name) > 0:
                raise ConfigError(
                    f"checkpoint.{name}: found {getattr(self, name)} with a folder in an object store, which {why}. "
                    "Leave it out."
                )
        if self.create_seed_checkpoint and (self.load_only or not self.enable_checkpoint):
            raise ConfigError(
                "checkpoint.create_seed_checkpoint: nothing would be saved. Set enable_checkpoint, and unset load_only."
            )
