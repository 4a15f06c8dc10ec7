"""What transformers loads from an export, compared with our own model of the same checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from torchtitan_lite.converting.exporting import Progress
from torchtitan_lite.converting.new_output import NewOutput
from torchtitan_lite.examining.opened import OpenedCheckpoint
from torchtitan_lite.hugging_face.known_model import HuggingFaceModel
from torchtitan_lite.hugging_face.writing import plan, write_planned
from torchtitan_lite.models.llama.args import ModelArgs
from torchtitan_lite.models.llama.model import Transformer

os.environ["HF_HUB_OFFLINE"] = "1"  # Read when transformers is imported, which functions do.
PROMPT = "import os\n\ndef "
NEW_TOKENS = 32
TOLERANCE = 1e-5


def write_model(opened: OpenedCheckpoint, model: HuggingFaceModel, out: Path, show: Progress, **how: Any) -> NewOutput:
    """Write the model in `opened` to the folder `out`, `how` as `plan` has it."""
    return write_planned(plan(opened, model, name=out.absolute().name, **how), out, show)


def our_model(step: Path, args: ModelArgs, dtype: torch.dtype = torch.float32) -> Transformer:
    """Return our model with the weights of the checkpoint `step`, rounded to `dtype` and computing in float32."""
    model = Transformer(args)
    model.init_weights(seed=0)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    dcp_load(dict(state), checkpoint_id=step, no_dist=True)
    for tensor in state.values():
        tensor.copy_(tensor.to(dtype))
    return model.eval()


def assert_same_function(model: Transformer, out: Path) -> None:
    """Fail unless transformers, offline, loads a model from `out` that computes what `model` does.

    Logits are compared in float32; the continuation is the greedy one of the exported tokenizer's tokens.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, report = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not [finding for findings in report.values() for finding in findings]
    tokenizer = AutoTokenizer.from_pretrained(out)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    assert prompt.tolist() == [[256, *PROMPT.encode()]]
    anything = torch.randint(0, model.args.vocab_size, (2, model.args.max_seq_len))
    with torch.no_grad():
        for tokens in (prompt, anything):
            assert (model(tokens) - theirs(tokens).logits).abs().max() < TOLERANCE
        ours = prompt
        for _ in range(NEW_TOKENS):
            ours = torch.cat([ours, model(ours)[:, -1:].argmax(-1)], dim=1)
    found = theirs.generate(prompt, max_new_tokens=NEW_TOKENS)
    assert ours[:, : found.shape[1]].tolist() == found.tolist()
