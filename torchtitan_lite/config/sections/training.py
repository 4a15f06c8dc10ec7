"""The sections [training], [model], [optimizer], [lr_scheduler], [parallelism] and [activation_checkpoint]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from torchtitan_lite.config.checks import AtLeastOne, AtLeastZero, Positive, at_least, check_types
from torchtitan_lite.errors import ConfigError

DtypeName = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Data, batch sizes, precision and length of a run."""

    dataset: Literal["stdlib", "text", "jsonl", "parquet", "huggingface"] = "stdlib"
    """Corpus. "stdlib": the sources of the running Python's standard library; "text", "jsonl" or "parquet": your own
    files; "huggingface": a dataset that the library datasets reads as a stream."""

    dataset_path: str | None = None
    """Glob of the files of "text", "jsonl" and "parquet"; ** matches folders at any depth. For "huggingface": the
    dataset's name, or a folder of its files."""

    dataset_text_key: str = "text"
    """Key of the text on each line of "jsonl" files, and its column in "parquet" files and "huggingface" datasets."""

    dataset_subset: str | None = None
    """Subset of a "huggingface" dataset, such as "en" of allenai/c4; unset: its default."""

    dataset_split: str = "train"
    """Split of a "huggingface" dataset."""

    tokens_folder: str = "tokens"
    """Folder for the tokens of "jsonl" and "parquet" files, and of all files with a tokenizer.json: in job.dump_folder,
    or absolute, so that runs can share it."""

    batch_size: AtLeastOne = 8
    """Sequences that a rank takes in one forward pass (the local batch)."""

    global_batch_size: int = -1
    """Sequences in one optimizer step over all data-parallel ranks: a multiple of batch_size x ranks, above which
    gradients are accumulated; -1: batch_size x ranks."""

    seq_len: AtLeastOne = 2048
    """Tokens in a sequence."""

    max_epochs: AtLeastZero = 0
    """Epochs of the corpus after which the run saves and stops; 0: as many as steps need. Each epoch has an order of
    its own."""

    max_norm: Positive = 1.0
    """Largest total norm of the gradients; larger ones are scaled down to it."""

    steps: AtLeastOne = 10000
    """Optimizer steps in the run."""

    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer states of FSDP in CPU memory (CUDA only)."""

    mixed_precision_param: DtypeName = "bfloat16"
    """Compute dtype of forward and backward; parameters stay in float32. "float16" uses a gradient scaler."""

    mixed_precision_reduce: Literal["float32"] = "float32"
    """dtype of gradient reduction."""

    max_skipped_steps: AtLeastOne = 20
    """Steps in a row skipped by the gradient scaler (float16) that end the run."""

    on_divergence: Literal["off", "stop", "rollback"] = "stop"
    """At a loss or gradient norm that is not finite, or a spike: "stop"; "rollback" to the latest good checkpoint, and
    skip the batch; "off": train on."""

    spike_factor: float = 0.0
    """A loss above this many times its running median is a spike, too; 0: none is."""

    spike_window: AtLeastOne = 100
    """Steps of the running median. No loss is a spike before there are that many."""

    max_rollbacks: AtLeastOne = 3
    """Rollbacks from the last rollback_window steps after which the next one stops the run instead."""

    rollback_window: AtLeastOne = 1000
    """Steps in which at most max_rollbacks may begin."""

    compile: bool = False
    """Compile each transformer block with torch.compile."""

    gc_freq: AtLeastOne = 50
    """Steps between garbage collections. Automatic collection is off during training, because ranks that each pause at
    their own moment delay one another."""

    seed: int | None = None
    """Seed of parameters, data order, dropout and the generators of Python, NumPy and torch; unset: drawn at start and
    logged."""

    deterministic: bool = False
    """Use deterministic algorithms, which may be slower."""

    trace_samples: bool = False
    """Write the positions of each step's samples, in the order before the shuffle, to samples/rankR.jsonl in
    job.dump_folder."""

    def __post_init__(self) -> None:
        check_types(self, "training")
        if self.spike_factor and not 1 < self.spike_factor < math.inf:
            raise ConfigError(f"training.spike_factor: expected a number above 1, or 0, found {self.spike_factor}.")
        if self.global_batch_size != -1:
            at_least("training.global_batch_size (or -1)", self.global_batch_size, 1)
        if self.dataset != "stdlib" and not self.dataset_path:
            needs = "the name of a dataset, or a folder" if self.dataset == "huggingface" else "a glob of files"
            raise ConfigError(
                f"training.dataset_path: dataset {self.dataset!r} needs {needs}, found none. Set "
                "--training.dataset_path, such as 'data/**/*' or allenai/c4."
            )
        if self.dataset == "huggingface" and self.max_epochs:
            raise ConfigError(
                f"training.max_epochs: expected 0 with dataset 'huggingface', found {self.max_epochs}: the shares "
                "of the ranks may end at different steps. Set --training.steps."
            )


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model to train."""

    name: Literal["llama3"] = "llama3"
    """Model family; "llama" is accepted as another name of it."""

    flavor: str = "debugmodel"
    """Size: debugmodel, 1B, 8B, 70B or 405B."""

    config_path: str = ""
    """A config.json of a Llama, Meta's params.json, or the folder with one: sizes and rotary settings in place of the
    flavor's. "" takes the flavor's."""

    tokenizer_path: str = "bytes"
    """Tokenizer: "bytes", which are UTF-8 bytes plus BOS and EOS; or a tokenizer.json, or the folder that holds one."""

    dropout: float = 0.0
    """Probability of dropping an activation after attention and after feed-forward."""

    def __post_init__(self) -> None:
        check_types(self, "model")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"model.dropout: expected a probability in [0, 1), found {self.dropout}.")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer and its hyperparameters."""

    name: Literal["AdamW", "Adam"] = "AdamW"
    """Algorithm."""

    lr: Positive = 8e-4
    """Peak learning rate; lr_scheduler multiplies it by a factor in [0, 1]."""

    beta1: float = 0.9
    """Decay of the running mean of gradients."""

    beta2: float = 0.95
    """Decay of the running mean of squared gradients."""

    eps: float = 1e-8
    """Term added to the denominator."""

    weight_decay: float = 0.1
    """Weight decay: decoupled in AdamW, an L2 penalty in Adam."""

    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Kernel. "fused" falls back to "foreach" on a device that has no fused kernel."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer")


DecayType = Literal["linear", "sqrt", "cosine"]


@dataclass(frozen=True, kw_only=True)
class LRScheduler:
    """The schedule of the learning rate: linear warm-up, constant, decay."""

    warmup_steps: AtLeastZero = 200
    """Steps of linear rise from 0 to the peak."""

    decay_ratio: float | None = None
    """Fraction of all steps spent in decay; unset: every step after warm-up; 0: none, constant after warm-up."""

    decay_type: DecayType = "linear"
    """Shape of the decay."""

    min_lr_factor: float = 0.0
    """Fraction of the peak learning rate at which the decay ends."""

    def __post_init__(self) -> None:
        check_types(self, "lr_scheduler")
        for name, value in (("decay_ratio", self.decay_ratio), ("min_lr_factor", self.min_lr_factor)):
            if value is not None and not 0.0 <= value <= 1.0:
                raise ConfigError(f"lr_scheduler.{name}: expected a number in [0, 1], found {value}.")


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How ranks share the model and the data. The product of the degrees is the number of processes."""

    data_parallel_replicate_degree: AtLeastOne = 1
    """Groups of ranks that each hold the complete model and take different data: HSDP, or DDP if
    data_parallel_shard_degree is 1."""

    data_parallel_shard_degree: int = -1
    """Ranks over which FSDP2 shards parameters; -1: all that the other degrees leave."""

    tensor_parallel_degree: AtLeastOne = 1
    """Ranks that share each layer and, between layers, the sequence. Must divide the model's n_heads, n_kv_heads and
    feed-forward width, and seq_len."""

    pipeline_parallel_degree: AtLeastOne = 1
    """Ranks that each hold some of the layers, as stages of a pipeline."""

    pipeline_parallel_schedule: Literal["1F1B", "GPipe", "Interleaved1F1B"] = "1F1B"
    """Order of the micro-batches. "1F1B" and "GPipe" have one stage a rank, "Interleaved1F1B" two, or as many as the
    split points make."""

    pipeline_parallel_split_points: tuple[str, ...] = ()
    """First layer of each stage except the first one, such as layers.2,layers.4. Empty: stages of equal length as far
    as possible, the first and the last one shorter, because they also hold the embedding and the output."""

    pipeline_parallel_microbatch_size: AtLeastOne = 1
    """Sequences in a micro-batch, the part of a local batch that goes through a stage at a time."""

    pipeline_parallel_microbatches: Annotated[int | None, partial(at_least, low=1)] = None
    """Micro-batches in a local batch; if set, it overrides pipeline_parallel_microbatch_size."""

    def __post_init__(self) -> None:
        check_types(self, "parallelism")
        if self.data_parallel_shard_degree != -1:
            at_least("parallelism.data_parallel_shard_degree (or -1)", self.data_parallel_shard_degree, 1)


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """Which activations backward recomputes instead of keeping."""

    mode: Literal["none", "selective", "full"] = "selective"
    """Blocks to recompute: "none"; "full", every block; or "selective", those of selective_ac_option."""

    selective_ac_option: str = "2"
    """A number n: every n-th block. "op": every block, except the results of its expensive operators."""

    def __post_init__(self) -> None:
        check_types(self, "activation_checkpoint")
        option = self.selective_ac_option
        if option != "op" and not (option.isdigit() and int(option) >= 1):
            raise ConfigError(
                f"activation_checkpoint.selective_ac_option: expected 'op' or a number >= 1, found {option!r}."
            )
