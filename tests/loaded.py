"""What the server that tests fork from has imported: all that a job, a rank or a killed run needs.

Warnings are errors from here on, and what torch excepts from that as it is imported stays excepted, as in a test
run of one process. Whoever runs a script takes that back (`warn_as_python_does`).
"""

import warnings

warnings.simplefilter("error")

import pytest  # noqa: E402, F401  # rank cases live in test modules
import torch  # noqa: E402
import torch._dynamo  # noqa: E402  # the first optimizer imports it, which takes longer than a whole job
import torch.distributed.checkpoint.state_dict  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.tensor.parallel  # noqa: E402, F401

import torchtitan_lite.trainer  # noqa: E402, F401


def warn_as_python_does() -> None:
    """Warnings are printed, as in a new interpreter."""
    # A filter of the same kind takes the place of the one above.
    warnings.filters.remove(("error", None, Warning, None, 0))  # type: ignore[attr-defined]  # typed as a sequence
    warnings.simplefilter("default", append=True)
