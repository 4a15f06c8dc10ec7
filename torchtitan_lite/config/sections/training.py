"""The section [training]: data, batch sizes, precision and length of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torchtitan_lite.config.checks import at_least, choice, positive
from torchtitan_lite.config.field_types import check_types
from torchtitan_lite.errors import ConfigError

DtypeName = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Data, batch sizes, precision and length of a run."""

    dataset: Literal["stdlib", "text", "jsonl"] = "stdlib"
    """Corpus. "stdlib": the sources of the running Python's standard library; "text" or "jsonl": your own files."""

    dataset_path: str | None = None
    """Glob of the files of "text" and "jsonl"; ** matches folders at any depth."""

    dataset_text_key: str = "text"
    """Key of the text in the object on each line of "jsonl" files."""

    batch_size: int = 8
    """Sequences that a rank takes in one forward pass (the local batch)."""

    global_batch_size: int = -1
    """Sequences in one optimizer step over all data-parallel ranks: a multiple of batch_size x ranks, above which
    gradients are accumulated; -1: batch_size x ranks."""

    seq_len: int = 2048
    """Tokens in a sequence."""

    max_epochs: int = 0
    """Epochs of the corpus after which the run saves and stops; 0: as many as steps need. Each epoch has an order of
    its own."""

    max_norm: float = 1.0
    """Largest total norm of the gradients; larger ones are scaled down to it."""

    steps: int = 10000
    """Optimizer steps in the run."""

    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer states of FSDP in CPU memory (CUDA only)."""

    mixed_precision_param: DtypeName = "bfloat16"
    """Compute dtype of forward and backward; parameters stay in float32. "float16" uses a gradient scaler."""

    mixed_precision_reduce: Literal["float32"] = "float32"
    """dtype of gradient reduction."""

    max_skipped_steps: int = 20
    """Steps in a row skipped by the gradient scaler (float16) that end the run."""

    compile: bool = False
    """Compile each transformer block with torch.compile."""

    gc_freq: int = 50
    """Steps between garbage collections. Automatic collection is off during training, because ranks that each pause at
    their own moment delay one another."""

    seed: int | None = None
    """Seed of parameters, data order and dropout; unset: drawn at start and logged."""

    deterministic: bool = False
    """Use deterministic algorithms, which may be slower."""

    trace_samples: bool = False
    """Write the positions of each step's samples, in the order before the shuffle, to samples/rankR.jsonl in
    job.dump_folder."""

    def __post_init__(self) -> None:
        check_types(self, "training")
        for name in ("batch_size", "seq_len", "steps", "gc_freq", "max_skipped_steps"):
            at_least(f"training.{name}", getattr(self, name), 1)
        at_least("training.max_epochs", self.max_epochs, 0)
        positive("training.max_norm", self.max_norm)
        if self.global_batch_size != -1:
            at_least("training.global_batch_size (or -1)", self.global_batch_size, 1)
        choice("training.mixed_precision_param", self.mixed_precision_param, get_args(DtypeName))
        choice("training.dataset", self.dataset, ("stdlib", "text", "jsonl"))
        if self.dataset != "stdlib" and not self.dataset_path:
            raise ConfigError(
                f"training.dataset_path: dataset {self.dataset!r} needs a glob of files, found none. "
                "Set --training.dataset_path='data/**/*.txt'."
            )
