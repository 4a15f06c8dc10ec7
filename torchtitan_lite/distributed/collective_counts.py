"""How many collectives this rank has begun: when ranks wait for one another, the one that is behind is waited for."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.torch_private import collectives_begun

PIPELINE = "pp"
"""The dimension of the mesh in which ranks send and receive, each as often as its stage needs."""


def counts_of(mesh: DeviceMesh) -> Callable[[], dict[str, int]]:
    """Return a function, for any thread, that counts the collectives of each group of `mesh`, and of all ranks.

    A group has the same name on all of its ranks: its dimension, and its first rank. Not collective.
    """
    groups = {"all ranks": dist.group.WORLD}
    for dimension, group in zip(mesh.mesh_dim_names or (), mesh.get_all_groups(), strict=True):
        if dimension != PIPELINE:
            groups[f"{dimension} from rank {dist.get_process_group_ranks(group)[0]}"] = group

    def count() -> dict[str, int]:
        begun = {name: collectives_begun(group) for name, group in groups.items() if group is not None}
        return {name: number for name, number in begun.items() if number is not None}

    return count
