"""What the server that tests fork from has imported: all that a job, a rank or a killed run needs."""

import pytest  # noqa: F401  # rank cases live in test modules
import torch
import torch._dynamo  # the first optimizer imports it, which takes longer than a whole job
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

import torchtitan_lite.trainer  # noqa: F401
