"""What of a configuration can be refused on the machine that starts a job, before torch is imported.

The workers refuse the same with the same words; this spares their start, and torchrun's report of it. Files are looked
for, and not read.
"""

from __future__ import annotations

from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.data.batch_size import global_batch_size
from torchtitan_lite.data.tokenizer import BYTES, tokenizer_file
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models.llama.config_file import build_model_args
from torchtitan_lite.parallelisms.parallel_dims import build_parallel_dims


def check_files(config: JobConfig) -> None:
    """Raise ConfigError if the tokenizer, the model's file or all data are missing."""
    model, training = config.model, config.training
    if model.tokenizer_path != BYTES:
        tokenizer_file(model.tokenizer_path)
    build_model_args(model, vocab_size=0, seq_len=training.seq_len)
    # A dry run takes no step, so its machine may be without the data; "stdlib" is part of Python.
    if training.dataset not in ("stdlib", "huggingface") and not config.checkpoint.dry_run:
        from torchtitan_lite.data.documents import check_some_file_matches  # It imports NumPy.

        check_some_file_matches(training.dataset_path or "")


def check_ranks(config: JobConfig, num_processes: int) -> None:
    """Raise ConfigError if the degrees of parallelism or the batch do not fit this many processes."""
    refuse_shared_seed(config, num_processes)
    dims = build_parallel_dims(config.parallelism, config.comm.simulated_ranks or num_processes)
    global_batch_size(config.training, dims.dp_degree)


def refuse_shared_seed(config: JobConfig, num_processes: int) -> None:
    """Raise ConfigError if more than one process would make a seed checkpoint."""
    if config.checkpoint.create_seed_checkpoint and num_processes > 1:
        raise ConfigError(
            f"checkpoint.create_seed_checkpoint: expected one process, found {num_processes}. "
            "Run python train.py without torchrun; any number of processes can start from what it writes."
        )
