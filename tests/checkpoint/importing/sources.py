"""Weights of a tiny Llama as other software writes them: folders of Hugging Face's, Meta's layout, files of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from torchtitan_lite.models.llama.args import ModelArgs
from torchtitan_lite.models.llama.hugging_face import describe
from torchtitan_lite.models.llama.model import Transformer

State = dict[str, torch.Tensor]

ARGS = ModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=300, ffn_dim=48, max_seq_len=16)
PARAMS = {
    **{"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1, "multiple_of": 48},
    **{"ffn_dim_multiplier": 0.5, "norm_eps": 1e-5, "rope_theta": 500000.0},
}
"""What Meta's params.json says of `ARGS`."""
_BY_COLUMNS = ("wo.weight", "w2.weight")


def weights(args: ModelArgs = ARGS) -> State:
    """Return the state dict of our model, each tensor with values of its own."""
    with torch.device("meta"):
        names = Transformer(args).state_dict()
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in names.items()}


def in_their_names(state: Mapping[str, torch.Tensor], args: ModelArgs = ARGS) -> State:
    """Return `state` as transformers has it: the rows of each head of queries and keys in halves."""
    found = {}
    for name, place in describe(args, {}, None, None).places.items():
        tensor = state[name]
        if place.rotary_head_dim is not None:
            heads = tensor.unflatten(0, (-1, place.rotary_head_dim // 2, 2))
            tensor = heads.transpose(1, 2).reshape(tensor.shape)
        found[place.name] = tensor.contiguous()
    return found


def write_config(folder: Path, args: ModelArgs = ARGS, **changes: Any) -> Path:
    """Write config.json into `folder`, made if need be; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**describe(args, {}, None, None).config, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_folder(folder: Path, state: Mapping[str, torch.Tensor], **changes: Any) -> Path:
    """Write `state`, in our names, as a folder of Hugging Face's with one file."""
    write_config(folder, **changes)
    safetensors.torch.save_file(in_their_names(state), folder / "model.safetensors", {"format": "pt"})
    return folder


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], count: int = 3, suffix: str = "") -> Path:
    """Write `tensors`, in their names, into `count` files with an index: of safetensors, or of torch.save."""
    write_config(folder)
    stem, suffix = ("pytorch_model", ".bin") if suffix == ".bin" else ("model", ".safetensors")
    places: dict[str, str] = {}
    for number in range(count):
        file = f"{stem}-{number + 1:05}-of-{count:05}{suffix}"
        part = {name: tensors[name] for name in list(tensors)[number::count]}
        if suffix == ".bin":
            torch.save(part, folder / file)
        else:
            safetensors.torch.save_file(part, folder / file)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
    return folder


def write_meta(folder: Path, state: State, parts: int, *, embeddings_by_columns: bool) -> Path:
    """Write `state` in Meta's layout: cut into `parts`, embeddings by columns as in Llama 2, or by rows as in 3."""
    folder.mkdir(parents=True)
    (folder / "params.json").write_text(json.dumps(PARAMS))
    for number in range(parts):
        part = {}
        for name, tensor in state.items():
            by_columns = name.endswith(_BY_COLUMNS) or (name.startswith("tok_") and embeddings_by_columns)
            cut = tensor if tensor.dim() == 1 else tensor.chunk(parts, 1 if by_columns else 0)[number]
            part[name] = cut.bfloat16().clone()
        part["rope.freqs"] = torch.ones(4)
        torch.save(part, folder / f"consolidated.{number:02}.pth")
    return folder
