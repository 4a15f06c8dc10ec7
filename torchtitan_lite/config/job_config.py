"""The configuration, as values.

One frozen dataclass a section, one doc string a key: `--help`, the config reference and the
validation all come from here. Nothing here touches a file, the environment or torch; turning a
value into an object happens in one `build_*` function beside that object. A `JobConfig` that
exists is valid in itself; what depends on the machine (ranks, devices, folders) is checked where
it is known.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal, get_args

from torchtitan_lite.config.field_types import check_sections, check_types
from torchtitan_lite.config.folders import refuse_address
from torchtitan_lite.errors import ConfigError

DtypeName = Literal["float32", "float16", "bfloat16"]
AsyncMode = Literal["disabled", "async", "async_with_pinned_mem"]
IntervalType = Literal["steps", "seconds"]
ActivationCheckpointMode = Literal["none", "selective", "full"]
DecayType = Literal["linear", "sqrt", "cosine"]
VerifyOnLoad = Literal["off", "size", "full"]
WhenBusy = Literal["wait", "skip"]
Strictness = Literal["error", "warn", "ignore"]
OptimizerName = Literal["AdamW", "Adam"]
OptimizerImplementation = Literal["fused", "foreach", "for-loop"]
PipelineSchedule = Literal["1F1B", "GPipe", "Interleaved1F1B"]
EXCLUDABLE_STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state", "rng")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is run and where its output goes."""

    config_file: str | None = None
    """TOML file with these sections; looked up as given, then in train_configs/."""

    dump_folder: str = "./outputs"
    """Folder for everything the run writes, relative to the working directory."""

    description: str = "default job"
    """Free text, logged at start."""

    print_args: bool = False
    """Log the resolved configuration at start."""

    def __post_init__(self) -> None:
        check_types(self, "job")
        refuse_address("job.dump_folder", self.dump_folder, "Name a folder, and copy it when the run is over.")


@dataclass(frozen=True, kw_only=True)
class Profiling:
    """Traces of where the time and the memory go."""

    enable_profiling: bool = False
    """Write a torch.profiler trace every `profile_freq` steps."""

    save_traces_folder: str = "profile_traces"
    """Folder for traces, inside dump_folder."""

    profile_freq: int = 10
    """Steps from one trace to the next."""

    enable_memory_snapshot: bool = False
    """Write a snapshot of the CUDA allocator every `profile_freq` steps (CUDA only)."""

    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder for memory snapshots, inside dump_folder."""

    def __post_init__(self) -> None:
        check_types(self, "profiling")
        _at_least("profiling.profile_freq", self.profile_freq, 1)


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What is logged, and how often."""

    log_freq: int = 10
    """Steps from one logged step to the next; step 1 is always logged."""

    enable_tensorboard: bool = False
    """Write TensorBoard files besides metrics.jsonl."""

    save_tb_folder: str = "tb"
    """Folder for TensorBoard files, inside dump_folder; one folder for the whole run, restarts included."""

    rank_0_only: bool = True
    """Write TensorBoard from rank 0 only; otherwise each rank has its own folder."""

    def __post_init__(self) -> None:
        check_types(self, "metrics")
        _at_least("metrics.log_freq", self.log_freq, 1)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model is trained."""

    name: Literal["llama3"] = "llama3"
    """Model family ("llama" is accepted for it)."""

    flavor: str = "debugmodel"
    """Size: debugmodel, 1B, 8B, 70B or 405B."""

    tokenizer_path: str = "bytes"
    """Tokenizer: "bytes", the UTF-8 bytes plus BOS and EOS, is the only one."""

    dropout: float = 0.0
    """Probability of dropping an activation after attention and feed-forward."""

    def __post_init__(self) -> None:
        check_types(self, "model")
        if self.tokenizer_path != "bytes":
            raise ConfigError(
                f"model.tokenizer_path: expected 'bytes', the only tokenizer there is, found {self.tokenizer_path!r}. "
                "Set --model.tokenizer_path=bytes."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"model.dropout: expected a probability in [0, 1), found {self.dropout}.")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How parameters are updated."""

    name: OptimizerName = "AdamW"
    """Algorithm."""

    lr: float = 8e-4
    """Peak learning rate; lr_scheduler multiplies it by a factor in [0, 1]."""

    beta1: float = 0.9
    """Decay of the running mean of gradients."""

    beta2: float = 0.95
    """Decay of the running mean of squared gradients."""

    eps: float = 1e-8
    """Term added to the denominator."""

    weight_decay: float = 0.1
    """Weight decay: decoupled in AdamW, an L2 penalty in Adam."""

    implementation: OptimizerImplementation = "fused"
    """Kernel: "fused" falls back to "foreach" where the device has no fused one."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer")
        _positive("optimizer.lr", self.lr)
        _choice("optimizer.name", self.name, get_args(OptimizerName))
        _choice("optimizer.implementation", self.implementation, get_args(OptimizerImplementation))


@dataclass(frozen=True, kw_only=True)
class LRScheduler:
    """The factor of the learning rate at each step: rise, constant, decay."""

    warmup_steps: int = 200
    """Steps of linear rise from 0 to the peak."""

    decay_ratio: float | None = None
    """Share of all steps spent in decay; unset: everything after warm-up; 0: constant after warm-up."""

    decay_type: DecayType = "linear"
    """Shape of the decay."""

    min_lr_factor: float = 0.0
    """Factor at which the decay ends."""

    def __post_init__(self) -> None:
        check_types(self, "lr_scheduler")
        _at_least("lr_scheduler.warmup_steps", self.warmup_steps, 0)
        _choice("lr_scheduler.decay_type", self.decay_type, get_args(DecayType))
        for name, value in (("decay_ratio", self.decay_ratio), ("min_lr_factor", self.min_lr_factor)):
            if value is not None and not 0.0 <= value <= 1.0:
                raise ConfigError(f"lr_scheduler.{name}: expected a number in [0, 1], found {value}.")


@dataclass(frozen=True, kw_only=True)
class Training:
    """The run itself."""

    dataset: Literal["stdlib", "text", "jsonl"] = "stdlib"
    """Corpus: "stdlib", the sources of the running Python's standard library; "text" or "jsonl", your own files."""

    dataset_path: str | None = None
    """Glob of the files of "text" and "jsonl", ** included."""

    dataset_text_key: str = "text"
    """Key of the text in each line's object, for "jsonl"."""

    batch_size: int = 8
    """Sequences a rank takes in one forward pass (local batch)."""

    global_batch_size: int = -1
    """Sequences in one optimizer step over all ranks; more than batch_size x ranks accumulates gradients; -1:
    batch_size x ranks."""

    seq_len: int = 2048
    """Tokens in a sequence."""

    max_epochs: int = 0
    """Passes over the corpus after which the run stops, saved; 0: as many as steps need, each in another order."""

    max_norm: float = 1.0
    """Gradients are scaled down to this total norm."""

    steps: int = 10000
    """Optimizer steps in the run."""

    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer states of FSDP in CPU memory (CUDA only)."""

    mixed_precision_param: DtypeName = "bfloat16"
    """Compute dtype of forward and backward; parameters are kept in float32. float16 uses a gradient scaler."""

    mixed_precision_reduce: Literal["float32"] = "float32"
    """dtype of gradient reduction."""

    max_skipped_steps: int = 20
    """Steps in a row that the gradient scaler may skip (float16) before the run stops."""

    compile: bool = False
    """torch.compile each transformer block, in place."""

    gc_freq: int = 50
    """Steps from one garbage collection to the next; automatic collection is off while training."""

    seed: int | None = None
    """Seed of parameters, data order and dropout; unset: drawn at start and logged."""

    deterministic: bool = False
    """Use deterministic algorithms, possibly slower."""

    trace_samples: bool = False
    """Write the positions of each step's samples, in the order before the shuffle, to samples/rankR.jsonl in
    dump_folder."""

    def __post_init__(self) -> None:
        check_types(self, "training")
        for name in ("batch_size", "seq_len", "steps", "gc_freq", "max_skipped_steps"):
            _at_least(f"training.{name}", getattr(self, name), 1)
        _at_least("training.max_epochs", self.max_epochs, 0)
        _positive("training.max_norm", self.max_norm)
        if self.global_batch_size != -1:
            _at_least("training.global_batch_size (or -1)", self.global_batch_size, 1)
        _choice("training.mixed_precision_param", self.mixed_precision_param, get_args(DtypeName))
        _choice("training.dataset", self.dataset, ("stdlib", "text", "jsonl"))
        if self.dataset != "stdlib" and not self.dataset_path:
            raise ConfigError(
                f"training.dataset_path: dataset {self.dataset!r} needs a glob of files, found none. "
                "Set --training.dataset_path='data/**/*.txt'."
            )


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How ranks share the model. The product of the degrees is the number of processes."""

    data_parallel_replicate_degree: int = 1
    """Groups of ranks that each hold a whole model and take different data (HSDP; DDP, if nothing is sharded)."""

    data_parallel_shard_degree: int = -1
    """Ranks over which FSDP2 shards parameters; -1: what is left."""

    tensor_parallel_degree: int = 1
    """Ranks that share each layer and, between layers, the sequence; it divides the model's heads, n_kv_heads too."""

    pipeline_parallel_degree: int = 1
    """Ranks that each hold some of the layers, one stage after the other."""

    pipeline_parallel_schedule: PipelineSchedule = "1F1B"
    """Order of the micro-batches. 1F1B, GPipe: one stage a rank; Interleaved1F1B: two, or as the split points say."""

    pipeline_parallel_split_points: tuple[str, ...] = ()
    """First layer of each stage but the first one, as layers.2,layers.4; empty: as equal as can be, the first and the
    last stage the shorter ones."""

    pipeline_parallel_microbatch_size: int = 1
    """Sequences of a local batch that pass a stage at a time."""

    pipeline_parallel_microbatches: int | None = None
    """Micro-batches that a local batch is split into; if set, it counts instead of the size."""

    def __post_init__(self) -> None:
        check_types(self, "parallelism")
        if self.data_parallel_shard_degree != -1:
            _at_least("parallelism.data_parallel_shard_degree (or -1)", self.data_parallel_shard_degree, 1)
        for name in ("data_parallel_replicate_degree", "tensor_parallel_degree", "pipeline_parallel_degree"):
            _at_least(f"parallelism.{name}", getattr(self, name), 1)
        _choice("parallelism.pipeline_parallel_schedule", self.pipeline_parallel_schedule, get_args(PipelineSchedule))
        _at_least("parallelism.pipeline_parallel_microbatch_size", self.pipeline_parallel_microbatch_size, 1)
        if self.pipeline_parallel_microbatches is not None:
            _at_least("parallelism.pipeline_parallel_microbatches", self.pipeline_parallel_microbatches, 1)


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

    create_seed_checkpoint: bool = False
    """Save freshly initialised weights as step-0 and leave; one process only."""

    async_mode: AsyncMode = "disabled"
    """ "disabled": training stands still for a save; "async": for a copy, a thread writes; "async_with_pinned_mem": for
    a copy into shared (on CUDA pinned) memory, a process writes."""

    keep_latest_k: int = 0
    """Full checkpoints kept, counted once they are durable; 0: all."""

    load_step: int = -1
    """Step to load; -1: the newest."""

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
    """With load_step: begin another branch at it, even if the newest checkpoint is on a branch begun there."""

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
        _choice("checkpoint.interval_type", self.interval_type, get_args(IntervalType))
        _choice("checkpoint.export_dtype", self.export_dtype, get_args(DtypeName))
        object.__setattr__(self, "async_mode", self.async_mode.lower())
        _choice("checkpoint.async_mode", self.async_mode, get_args(AsyncMode))
        _at_least("checkpoint.interval", self.interval, 1)
        _at_least("checkpoint.keep_latest_k", self.keep_latest_k, 0)
        _at_least("checkpoint.load_step", self.load_step, -1)
        _at_least("checkpoint.timeout_seconds", self.timeout_seconds, 1)
        _choice("checkpoint.verify_on_load", self.verify_on_load, get_args(VerifyOnLoad))
        _choice("checkpoint.when_busy", self.when_busy, get_args(WhenBusy))
        # A few heartbeats, or jobs that live would be taken for dead.
        _at_least("checkpoint.lease_timeout_seconds", self.lease_timeout_seconds, 10)
        _at_least("checkpoint.max_failed_saves", self.max_failed_saves, 1)
        _at_least("checkpoint.preemption_grace_seconds", self.preemption_grace_seconds, 1)
        _choice("checkpoint.load_strictness", self.load_strictness, get_args(Strictness))
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


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """Which activations are computed again in backward instead of kept."""

    mode: ActivationCheckpointMode = "selective"
    """none; full: every block; selective: as selective_ac_option says."""

    selective_ac_option: str = "2"
    """A number n: every n-th block; "op": all but the results of expensive operators."""

    def __post_init__(self) -> None:
        check_types(self, "activation_checkpoint")
        _choice("activation_checkpoint.mode", self.mode, get_args(ActivationCheckpointMode))
        option = self.selective_ac_option
        if option != "op" and not (option.isdigit() and int(option) >= 1):
            raise ConfigError(
                f"activation_checkpoint.selective_ac_option: expected 'op' or a number >= 1, found {option!r}."
            )


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Deadlines of communication."""

    init_timeout_seconds: int = 300
    """Of collectives until the first step of this start is over."""

    train_timeout_seconds: int = 100
    """Of collectives after it."""

    trace_buf_size: int = 20000
    """Entries in NCCL's flight recorder; 0: off."""

    def __post_init__(self) -> None:
        check_types(self, "comm")
        _at_least("comm.init_timeout_seconds", self.init_timeout_seconds, 1)
        _at_least("comm.train_timeout_seconds", self.train_timeout_seconds, 1)


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """All sections."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    comm: Comm = field(default_factory=Comm)

    def __post_init__(self) -> None:
        check_sections(self)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values, sections as keys; what config.json holds."""
        return dataclasses.asdict(self)


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name}: expected at least {low}, found {value}.")


def _positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name}: expected a positive finite number, found {value}.")


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}: expected one of {', '.join(choices)}, found {value!r}.")
