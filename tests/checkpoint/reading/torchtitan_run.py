"""Train four steps with torchtitan 0.3's own objects, save a full folder, and continue. A test runs this program.

`python torchtitan_run.py FOLDER` writes `FOLDER/checkpoint/step-4` and `FOLDER/reference.pt`. Needs torchtitan 0.3.
"""
# ruff: noqa: E402

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.utils.data import IterableDataset

from tests.titan_packages import leave_kernels_out

leave_kernels_out()

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm, compute_ffn_hidden_dim
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import (
    _EMBEDDING_INIT,
    _LINEAR_INIT,
    _NORM_INIT,
    _depth_init,
    _output_linear_init,
)
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

DIM, HEADS, KV_HEADS, LAYERS, VOCAB = 128, 4, 2, 2, 258


class Tokens(IterableDataset[torch.Tensor]):
    """Counts its rows; each row is a function of its number."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.randint(0, VOCAB, (33,), generator=torch.Generator().manual_seed(self.at))

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


class Progress:
    """The state of torchtitan's trainer under `train_state`."""

    step = ntokens_seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]


def build_model() -> Any:
    """Return a Llama of 0.3's classes that equals ours: unscaled rotary positions, separate q, k and v."""
    norm = RMSNorm.Config(normalized_shape=DIM, param_init=_NORM_INIT)

    def block(depth: int) -> Any:
        attention = make_gqa_config(
            dim=DIM,
            n_heads=HEADS,
            n_kv_heads=KV_HEADS,
            wqkv_param_init=_LINEAR_INIT,
            wo_param_init=_depth_init(depth),
            inner_attention=ScaledDotProductAttention.Config(),
            fuse_qkv=False,
            rope=ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=64, theta=500000, scaling="none"),
        )
        ffn = make_ffn_config(
            dim=DIM,
            hidden_dim=compute_ffn_hidden_dim(DIM, multiple_of=32),
            w1_param_init=_LINEAR_INIT,
            w2w3_param_init=_depth_init(depth),
        )
        return Llama3TransformerBlock.Config(attention_norm=norm, ffn_norm=norm, attention=attention, feed_forward=ffn)

    config = Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCAB,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=DIM, param_init=_EMBEDDING_INIT),
        norm=norm,
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB, param_init=_output_linear_init(DIM)),
        layers=[block(depth) for depth in range(LAYERS)],
    )
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def main(folder: Path) -> None:
    store = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    ScaledDotProductAttention.sdpa_backends = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]  # those of a CPU
    torch.manual_seed(0)
    model = build_model()
    adamw = default_adamw(lr=8e-4)
    adamw.implementation = "for-loop"
    optimizers = adamw.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8).build(
        optimizers=optimizers, training_steps=10
    )
    loader = ParallelAwareDataloader(Tokens(), dp_rank=0, dp_world_size=1, batch_size=4)
    progress = Progress()
    manager = CheckpointManager.Config(enable=True, interval=4, last_save_model_only=False).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=str(folder),
    )
    batches = iter(loader)

    def train_step() -> tuple[torch.Tensor, float]:
        batch = next(batches)
        progress.step += 1
        progress.ntokens_seen += batch[:, 1:].numel()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizers.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        schedulers.step()
        return batch, loss.item()

    for _ in range(4):
        train_step()
    manager.save(4)
    saved = {
        "model": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "optimizer": {
            name: value.clone() for name, value in optimizers.state_dict().items() if isinstance(value, torch.Tensor)
        },
        "lr": schedulers.schedulers[0].get_last_lr(),
        "tokens": progress.ntokens_seen,
    }
    following = [train_step() for _ in range(3)]
    after = {"following": following, "lr_after": schedulers.schedulers[0].get_last_lr()}
    torch.save(saved | after, folder / "reference.pt")
    manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
