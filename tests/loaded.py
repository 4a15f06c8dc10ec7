"""The imports of the server from which tests fork: everything that a job, a rank or a killed run needs.

From here on warnings are errors, except those that torch excludes at its import, as in a test run of one process.
Processes that run a script undo that (`tests/forked.py`). No collection of garbage looks at what was imported.
"""

import warnings

warnings.simplefilter("error")

import pytest  # noqa: E402, F401  # rank cases are in test modules
import torch  # noqa: E402
import torch._dynamo  # noqa: E402  # the first optimizer imports it, which takes longer than a complete job
import torch.distributed.checkpoint.state_dict  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.tensor.parallel  # noqa: E402, F401

import torchtitan_lite.memory.images.run_images  # noqa: E402  # a run imports it where it is on
import torchtitan_lite.trainer  # noqa: E402, F401
from tests.disks import wait_for_no_server  # noqa: E402
from torchtitan_lite.collection import freeze_imported  # noqa: E402

wait_for_no_server()
# As train.py does. A load collects twice: 0.15 s each over the objects of the imports, and in every process that is
# forked the collection would copy their pages.
freeze_imported()
