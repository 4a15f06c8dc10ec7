"""The section [training]: data, batch sizes, precision and length of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torchtitan_lite.config.checks import at_least, choice, positive
from torchtitan_lite.config.field_types import check_types
from torchtitan_lite.errors import ConfigError

DtypeName = Literal["float32", "float16", "bfloat16"]
DatasetKind = Literal["stdlib", "text", "jsonl", "parquet", "huggingface"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Data, batch sizes, precision and length of a run."""

    dataset: DatasetKind = "stdlib"
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
    """Folder for the tokens of "parquet" files, and of all files with a tokenizer.json: in job.dump_folder, or
    absolute, so that runs can share it."""

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
    """Seed of parameters, data order, dropout and the generators of Python, NumPy and torch; unset: drawn at start and
    logged."""

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
        choice("training.dataset", self.dataset, get_args(DatasetKind))
        if self.dataset != "stdlib" and not self.dataset_path:
            needs, example = (
                ("the name of a dataset, or a folder", "allenai/c4 --training.dataset_subset=en")
                if self.dataset == "huggingface"
                else ("a glob of files", f"'data/**/*.{_SUFFIXES[self.dataset]}'")
            )
            raise ConfigError(
                f"training.dataset_path: dataset {self.dataset!r} needs {needs}, found none. "
                f"Set --training.dataset_path={example}."
            )
        if self.dataset == "huggingface" and self.max_epochs:
            raise ConfigError(
                f"training.max_epochs: expected 0 with dataset 'huggingface', found {self.max_epochs}: the shares "
                "of the ranks may end at different steps. Set --training.steps."
            )


_SUFFIXES = {"text": "txt", "jsonl": "jsonl", "parquet": "parquet"}
