"""The command that trains a model from a TOML config: `train.py`, and `torchtitan-lite-train` once installed.

`--help` lists every key. Nothing slow is imported before the configuration is known to be right.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchtitan_lite import faults, log
from torchtitan_lite.collection import freeze_imported, no_collection
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.config.manager import parse_config_or_exit
from torchtitan_lite.distributed.environment import fault_spec, launched
from torchtitan_lite.errors import ConfigError, PeerLost, TorchtitanLiteError


def main(arguments: list[str] | None = None) -> int:
    """Run the job that `arguments`, by default the command line's, describe; return its exit code.

    docs/troubleshooting.md lists the codes.
    """
    began = time.monotonic()
    rank = launched().rank
    log.setup(rank)
    try:
        faults.install(fault_spec(), rank=rank)
    except ConfigError as error:
        log.logger.error("ConfigError: %s", error)
        return 2
    with _ctrl_c_ends_at_once():
        config = parse_config_or_exit(sys.argv[1:] if arguments is None else arguments)
        # Imported only now: torch takes seconds to import, and a wrong key or --help must not wait for it.
        record = _import_job()

    code = record(_run_job)(config, rank, began)
    return code if code is not None else 0


def _import_job() -> Callable[[Callable[..., int]], Callable[..., int | None]]:
    """Import what a job needs. Return torchrun's `record`."""
    with no_collection():  # Imports leave almost no garbage, and collections take a fifth of their time.
        from torch.distributed.elastic.multiprocessing.errors import record

        import torchtitan_lite.trainer  # noqa: F401
        from torchtitan_lite.torch_private import load_compiler

        load_compiler()  # Otherwise torch's first optimizer does, in the middle of the start.

        freeze_imported()  # The first collection would come as soon as collections are on again.
    return record


@contextmanager
def _ctrl_c_ends_at_once() -> Iterator[None]:
    """Let SIGINT end the process in the block, where nothing has to be closed: Python would show a traceback."""
    is_main = threading.current_thread() is threading.main_thread()  # Others may not set handlers.
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _run_job(config: JobConfig, rank: int, began: float) -> int:
    """Run the job on this rank. `record` puts the traceback of an unexpected error into torchrun's report."""
    from torchtitan_lite.distributed.lost_peer import naming_lost_peers
    from torchtitan_lite.distributed.process_group import process_group
    from torchtitan_lite.trainer import Trainer

    try:
        with (
            naming_lost_peers(time_outs=False),
            process_group(config.comm, deterministic=config.training.deterministic) as world,
        ):
            code = Trainer(config, world, began=began).run()
            faults.point("exit")
            return code
    except TorchtitanLiteError as error:
        if not error.reported_elsewhere:
            whose = f" (rank {error.origin_rank})" if error.origin_rank else ""
            log.logger.error("%s: %s%s", type(error).__name__, error, whose)
            if rank:
                _report_error(error)  # The launcher may show only rank 0's output.
        return 2 if isinstance(error, ConfigError) else 1


def _report_error(error: TorchtitanLiteError) -> None:
    """Put `error` into torchrun's report: its traceback, except of a lost peer, whose cause is on another rank."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if not isinstance(error, PeerLost):
        get_error_handler().record_exception(error)
        return
    try:
        raise PeerLost(error.rank, error.finding) from None
    except PeerLost as without_traceback:
        get_error_handler().record_exception(without_traceback)


if __name__ == "__main__":
    sys.exit(main())
