"""Check the configuration, then become torchrun with train.py: one start of an interpreter in place of three.

run_train.sh runs it and documents the variables. A wrong configuration, a missing file and ranks that do not fit end
with 2, and --help with 0, before torch is imported; without $NGPU torch has to count the devices first. The workers
refuse the same with the same words; this spares their start, and torchrun's report of it. If the workers fail or a
signal ends the job, torchrun's report is shown without its traceback, and the exit code is 1.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite import faults
from torchtitan_lite.collection import freeze_imported, no_collection
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.config.manager import parse_config_or_exit
from torchtitan_lite.data.batch_size import global_batch_size
from torchtitan_lite.data.tokenizer import BYTES, tokenizer_file
from torchtitan_lite.distributed.environment import fault_spec, memory_is_off
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models.llama.config_file import build_model_args
from torchtitan_lite.parallelisms.parallel_dims import build_parallel_dims
from torchtitan_lite.preflight import refuse_shared_seed

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
LAST_CALL_SECONDS = 5
"""How long fewer nodes than the most wait for others. A node that comes later interrupts the job, so not too short."""
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def main(arguments: list[str]) -> None:
    """Run torchrun, in this process, with the `arguments` of train.py."""
    config = parse_config_or_exit(arguments)
    with _ending_with_2():  # torchrun would turn the 2 of its workers into 1.
        faults.parse_faults(fault_spec())
        memory_is_off()
        check_files(config)
        given = os.environ.get("NGPU")
        if given:
            _check_ranks(config, int(given))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # No traceback of an import; torchrun sets a handler of its own.
    with no_collection():  # Which takes a fifth of the time of the import.
        from torch.distributed import run

        freeze_imported()  # Else the first collection after this block looks at 250,000 objects, for 0.1 s.
    num_processes = int(given or _num_devices())
    if not given:
        with _ending_with_2():
            _check_ranks(config, num_processes)
    try:
        run.main([*_launch_options(num_processes, run.get_args_parser().format_help()), str(TRAIN), *arguments])
    except _job_ended() as ended:  # An expected end. Its traceback is torchrun's own, and 40 lines at 80 columns.
        sys.exit(f"{type(ended).__name__}: {ended}")


@contextmanager
def _ending_with_2() -> Iterator[None]:
    """Exit with 2 and one sentence for a ConfigError of the block."""
    try:
        yield
    except ConfigError as error:
        sys.stderr.write(f"ConfigError: {error}\n")
        raise SystemExit(2) from None


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


def _check_ranks(config: JobConfig, num_processes: int) -> None:
    """Raise ConfigError if the most nodes do not fit, and warn of each smaller number that does not."""
    fewest, most = _num_nodes()
    check_ranks(config, most * num_processes)
    for number in range(fewest, most):
        try:
            check_ranks(config, number * num_processes)
        except ConfigError as error:
            sys.stderr.write(f"With {number} of {most} nodes this job would fail: {error}\n")


def _num_nodes() -> tuple[int, int]:
    """Return the fewest nodes that train, and the most."""
    fewest, _, most = (os.environ.get("NNODES") or "1").partition(":")
    return int(fewest), int(most or fewest)


def _job_ended() -> tuple[type[BaseException], ...]:
    """Return what torchrun raises if workers failed, and if it got a signal."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    return ChildFailedError, SignalException


def _launch_options(num_processes: int, known: str) -> list[str]:
    """Return the options of torchrun, whose help is `known`: older versions lack two of them."""
    options = [*_meeting(), f"--nproc-per-node={num_processes}"]
    options.append(f"--local-ranks-filter={os.environ.get('LOG_RANK') or '0'}")
    if restarts := os.environ.get("MAX_RESTARTS"):
        options.append(f"--max-restarts={restarts}")
    if "--signals-to-handle" in known:
        options.append(f"--signals-to-handle={SIGNALS}")
    if "--shutdown-timeout" in known:
        options.append(f"--shutdown-timeout={os.environ.get('SHUTDOWN_TIMEOUT') or '600'}")
    return options


def _meeting() -> list[str]:
    """Return the options by which the nodes meet: all are clients of a store that outlives each of them."""
    place = os.environ.get("RDZV")
    if not place:
        return ["--standalone", "--local-addr=localhost"]
    # Else a node that joins later is not heard: its agents publish the address of a store that they share once.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    nodes, name = os.environ.get("NNODES") or "1", os.environ.get("RDZV_ID") or "job"
    how = f"is_host=0,last_call_timeout={LAST_CALL_SECONDS}"
    options = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-conf={how}"]
    return [*options, f"--rdzv-endpoint={place}", f"--rdzv-id={name}"]


def _num_devices() -> int:
    import torch

    return torch.cuda.device_count() or 2


if __name__ == "__main__":
    main(sys.argv[1:])
