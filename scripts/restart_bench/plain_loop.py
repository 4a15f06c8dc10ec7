"""Train the same model in a plain loop, as tutorials do: the other contenders of scripts/bench_restart.py.

    torchrun ... plain_loop.py WAY CONFIG_JSON FOLDER INTERVAL STEPS BATCH SEQ_LEN

Every INTERVAL steps the state is saved, and a start loads the latest one, in one of these ways: `dcp`, a folder of
`dcp.save` that is renamed when it is complete; `torch.save`, the whole state by rank 0; `nvrx`, local checkpoints of
nvidia-resiliency-ext.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed import PrefixStore
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from restart_times import stamp

from torchtitan_lite.models.llama.args import ModelArgs
from torchtitan_lite.models.llama.model import Transformer


def main(way: str, sizes: str, folder: Path, interval: int, steps: int, batch_size: int, seq_len: int) -> None:
    """Train from the latest checkpoint in `folder`."""
    stamp("imported")
    rank = int(os.environ["RANK"])
    store, _, num_ranks = next(iter(rendezvous("env://")))
    # torchrun keeps its store when it restarts the workers. Without a prefix gloo of torch 2.13 tries the addresses
    # of the old workers, gives up, and the job does not restart at all.
    store = PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    stamp("met")
    with torch.device("meta"):
        model = Transformer(ModelArgs(**json.loads(sizes), max_seq_len=seq_len))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.init_weights(0, buffer_device=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    stamp("built")
    place = WAYS[way](model, optimizer, folder)
    step = place.load()
    stamp("loaded")
    while step < steps:
        step += 1
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        tokens = torch.randint(model.args.vocab_size, (batch_size, seq_len + 1), generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        stamp("trained", step)
        if step % interval == 0:
            place.save(step)


class Place:
    """Where a loop saves its model and optimizer."""

    def __init__(self, model: Transformer, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder

    def load(self) -> int:
        """Load the latest state, if there is one; return its step. All ranks."""
        raise NotImplementedError

    def save(self, step: int) -> None:
        """Save the state of `step`, and remove those before it. All ranks."""
        raise NotImplementedError

    def latest(self) -> int:
        """Return the latest step in the folder; 0 if there is none."""
        names = [path.name.removesuffix(".pt") for path in self.folder.glob("*")]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def publish(self, unfinished: Path, name: str) -> None:
        """Give what rank 0 has finished its name, and remove the others. All ranks."""
        if dist.get_rank() == 0:
            unfinished.rename(self.folder / name)
            for old in self.folder.iterdir():
                if old.name != name:
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
        dist.barrier()


class Dcp(Place):
    """Sharded folders."""

    def load(self) -> int:
        step = self.latest()
        if step:
            weights, moments = get_state_dict(self.model, self.optimizer)
            dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=self.folder / str(step))
            set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments)
        return step

    def save(self, step: int) -> None:
        weights, moments = get_state_dict(self.model, self.optimizer)
        unfinished = self.folder / f"{step}.unfinished"
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=unfinished)
        self.publish(unfinished, str(step))


class TorchSave(Place):
    """One file, which rank 0 writes and all ranks read."""

    def load(self) -> int:
        step = self.latest()
        if step:
            found = torch.load(self.folder / f"{step}.pt", weights_only=True, mmap=True)
            options = StateDictOptions(full_state_dict=True)
            weights, moments = found["model"], found["optimizer"]
            set_state_dict(
                self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments, options=options
            )
        return step

    def save(self, step: int) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, moments = get_state_dict(self.model, self.optimizer, options=options)
        unfinished = self.folder / f"{step}.unfinished"
        if dist.get_rank() == 0:
            self.folder.mkdir(exist_ok=True)
            torch.save({"model": weights, "optimizer": moments}, unfinished)
        self.publish(unfinished, f"{step}.pt")


class Nvrx(Place):
    """Local checkpoints, each rank its own file."""

    def __init__(self, model: Transformer, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
        from nvrx_tensors import InHostMemory

        super().__init__(model, optimizer, folder)
        local = Path(os.environ["XDG_RUNTIME_DIR"]) / "nvrx"
        self._manager, self._boxed = LocalCheckpointManager(local), InHostMemory

    def _tensors(self) -> dict[str, torch.Tensor]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        named = {f"model.{name}": value for name, value in weights.items()}
        named |= {f"{name}.{key}": value for name, of in moments["state"].items() for key, value in of.items()}
        return {
            name: value.to_local() if isinstance(value, DTensor) else value
            for name, value in named.items()
            if isinstance(value, torch.Tensor)
        }

    def load(self) -> int:
        step = self._manager.find_latest()
        if step <= 0:
            return 0
        self._make_moments()
        found, _ = self._manager.load()
        with torch.no_grad():
            for name, value in self._tensors().items():
                value.copy_(found.state_dict[name])
        return int(step)

    def _make_moments(self) -> None:
        """Have the optimizer make its state, with a step that changes nothing."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()
        self.optimizer.zero_grad()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def save(self, step: int) -> None:
        self._manager.save(self._boxed(self._tensors()), step)


WAYS: dict[str, type[Place]] = {"dcp": Dcp, "torch.save": TorchSave, "nvrx": Nvrx}


if __name__ == "__main__":
    main(*sys.argv[1:3], Path(sys.argv[3]), *map(int, sys.argv[4:]))
