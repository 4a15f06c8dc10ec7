"""The model card: what the checkpoint itself knows of its run, as the README.md of an export.

A fact that the checkpoint does not have is left out, and so are paths of the machine. Settings of the run are in it
only for a checkpoint whose configuration describes its model: a training loop of one's own records others than its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import torchtitan_lite
from torchtitan_lite.examining.opened import OpenedCheckpoint, WrittenBy
from torchtitan_lite.examining.tensor_stream import TensorStream
from torchtitan_lite.hugging_face.model_files import DescribedModel

TOKENIZER = "tokenizer.json"
_WRITE_TEXT = ("ForCausalLM", "LMHeadModel")
"""What the names of classes in transformers end with that generate text."""
_WRITERS = {WrittenBy.DCP: "PyTorch's DCP", WrittenBy.TORCHTITAN: "torchtitan"}
_TOKENS = "train_state.n_tokens_seen"
_WITH_TOKENIZER = """\
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("{name}")
    model = AutoModelForCausalLM.from_pretrained("{name}")
    tokens = tokenizer("def ", return_tensors="pt")
    print(tokenizer.decode(model.generate(**tokens, max_new_tokens=50)[0], skip_special_tokens=True))
"""
_WITHOUT_TOKENIZER = """\
    from transformers import {kind}

    model = {kind}.from_pretrained("{name}")
"""
_ADAPTER = """\
    from peft import PeftModel

    model = PeftModel.from_pretrained(base, "{name}")  # the base that it was trained on
"""


def model_card(
    name: str,
    opened: OpenedCheckpoint,
    stream: TensorStream,
    model: DescribedModel,
    facts: Mapping[str, str],
    *,
    of_trainer: bool,
) -> bytes:
    """Return the card of `model` in the folder `name`, made of `opened`; `facts` are those of the export itself.

    With `of_trainer` the configuration of the run is in it.
    """
    writes_text = any(str(each).endswith(_WRITE_TEXT) for each in model.config.get("architectures") or ())
    kind = "AutoModelForCausalLM" if writes_text else "AutoModel"
    example = _WITH_TOKENIZER if TOKENIZER in model.files and writes_text else _WITHOUT_TOKENIZER
    head = ["library_name: transformers", *(["pipeline_tag: text-generation"] if writes_text else [])]
    settings = _run_settings(opened.saved_by.config) if of_trainer else {}
    rows = {**_progress(opened, stream), **facts, **settings, **_origin_rows(opened)}
    return _card(name, head, example.replace("{kind}", kind), rows)


def adapter_card(name: str, opened: OpenedCheckpoint, stream: TensorStream, facts: Mapping[str, str]) -> bytes:
    """Return the card of the adapter `name`, made of `opened`."""
    return _card(name, ["library_name: peft"], _ADAPTER, {**_progress(opened, stream), **facts, **_origin_rows(opened)})


def _card(name: str, head: list[str], example: str, facts: Mapping[str, str]) -> bytes:
    rows = [f"| {_cell(key)} | {_cell(value)} |" for key, value in facts.items()]
    in_code = "".join(each for each in name if each.isprintable() and each not in '"\\')
    lines = ["---", *head, "---", "", f"# {_cell(name)}", "", example.format(name=in_code)]
    lines += ["## How it was made", "", "| | |", "| --- | --- |", *rows, ""]
    lines += ["License, data and intended use are not recorded: add them before you give this model away."]
    return ("\n".join(lines) + "\n").encode(errors="replace")


def _progress(opened: OpenedCheckpoint, stream: TensorStream) -> dict[str, str]:
    """Return how far the run was."""
    facts = {} if opened.step is None else {"step": f"{opened.step:,}"}
    if _TOKENS in opened.contents.tensors:
        tokens = b"".join(map(bytes, stream.slices(_TOKENS)))
        facts["tokens"] = f"{int.from_bytes(tokens, 'little'):,}"
    return facts | {name: f"{value:g}" for name, value in opened.extra.get("metrics", {}).items()}


def _run_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of the run that shaped the weights."""
    training, optimizer, schedule = (config.get(name, {}) for name in ("training", "optimizer", "lr_scheduler"))
    job = config.get("job", {})
    of_optimizer = ("lr", "beta1", "beta2", "eps", "weight_decay")
    found = {
        "description": job.get("description"),
        "dump folder": PurePath(str(job.get("dump_folder", ""))).name,
        "dataset": training.get("dataset"),
        "sequence length": training.get("seq_len"),
        "sequences in a rank's batch": training.get("batch_size"),
        "sequences in a step": training.get("global_batch_size"),
        "compute dtype": training.get("mixed_precision_param"),
        "optimizer": _listed_settings(optimizer.get("name"), optimizer, of_optimizer),
        "schedule": _listed_settings(
            schedule.get("decay_type"), schedule, ("warmup_steps", "decay_ratio", "min_lr_factor")
        ),
        "steps of the run": training.get("steps"),
        "gradient clipping": training.get("max_norm"),
        "seed": training.get("seed"),
    }
    return {key: str(value) for key, value in found.items() if value not in (None, "", -1)}


def _listed_settings(name: Any, section: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    given = [f"{key} {section[key]}" for key in keys if section.get(key) is not None]
    return ", ".join([str(name), *given]) if name else ""


def _origin_rows(opened: OpenedCheckpoint) -> dict[str, str]:
    """Return what wrote the checkpoint, and when."""
    manifest = opened.manifest
    facts = {"saved": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(opened.created_at))}
    if manifest is None:
        facts["written by"] = _WRITERS.get(opened.origin, "")
    else:
        facts["topology"] = opened.saved_by.topology
        facts["run"] = manifest.lineage.run_id
        facts["saved with"] = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    facts["exported with"] = f"torchtitan_lite {torchtitan_lite.__version__}"
    return {key: value for key, value in facts.items() if value}


def _cell(text: object) -> str:
    """Return `text` on one line of a table."""
    return " ".join(str(text).replace("|", "\\|").split())
