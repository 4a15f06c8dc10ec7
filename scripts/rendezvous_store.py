"""Serve the store in which nodes of torchrun meet, on a host that is none of them: the loss of a node leaves it alone.

    python scripts/rendezvous_store.py 0.0.0.0 29500

It has nothing to save: where it ends, start it again, then the job. docs/clusters.md has the options of torchrun.
"""

from __future__ import annotations

import signal
import sys

from torch.distributed import TCPStore

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> int:
    """Run the command."""
    if len(sys.argv) != 3 or not sys.argv[2].isdigit():
        sys.stderr.write("usage: rendezvous_store.py ADDRESS PORT\n")
        return 2
    # Blocked and waited for, not left to their defaults: those do nothing to process 1 of a container.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
    print(f"Nodes meet at port {store.port}", flush=True)
    signal.sigwait(SIGNALS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
