"""Check the configuration, then become torchrun with train.py: one start of an interpreter in place of three.

run_train.sh runs it and documents the variables. A wrong configuration ends with 2, and --help with 0, before torch is
imported.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from torchtitan_lite.collection import no_collection
from torchtitan_lite.config.manager import parse_config_or_exit

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def main(arguments: list[str]) -> None:
    """Run torchrun, in this process, with the `arguments` of train.py."""
    parse_config_or_exit(arguments)
    with no_collection():  # Which takes a fifth of the time of the import.
        from torch.distributed import run

        gc.freeze()  # Else the first collection after this block looks at 250,000 objects, for 0.1 s.
    run.main([*_launch_options(run.get_args_parser().format_help()), str(TRAIN), *arguments])


def _launch_options(known: str) -> list[str]:
    """Return the options of torchrun, whose help is `known`: older versions lack two of them."""
    options = ["--standalone", "--local-addr=localhost", f"--nproc-per-node={os.environ.get('NGPU') or _num_devices()}"]
    options.append(f"--local-ranks-filter={os.environ.get('LOG_RANK') or '0'}")
    if restarts := os.environ.get("MAX_RESTARTS"):
        options.append(f"--max-restarts={restarts}")
    if "--signals-to-handle" in known:
        options.append(f"--signals-to-handle={SIGNALS}")
    if "--shutdown-timeout" in known:
        options.append(f"--shutdown-timeout={os.environ.get('SHUTDOWN_TIMEOUT') or '600'}")
    return options


def _num_devices() -> int:
    import torch

    return torch.cuda.device_count() or 2


if __name__ == "__main__":
    main(sys.argv[1:])
