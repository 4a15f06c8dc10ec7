"""The adapter of a model trained with peft, in the files that `PeftModel.from_pretrained` loads.

peft's files have the model's own names without that of the adapter: `q_proj.lora_A.weight` for
`q_proj.lora_A.default.weight`, and `lm_head.weight` for `lm_head.modules_to_save.default.weight`. The base is left out,
whether the checkpoint has it or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.converting import safetensors_files
from torchtitan_lite.converting.exporting import new_tensors
from torchtitan_lite.converting.model_part import ModelKey, model_keys
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.examining.opened import OpenedCheckpoint
from torchtitan_lite.examining.tensor_stream import TensorStream
from torchtitan_lite.hugging_face.model_card import adapter_card
from torchtitan_lite.hugging_face.writing import CARD, PlannedExport, tensor_summary
from torchtitan_lite.log import listed
from torchtitan_lite.store.manifest_fields import json_bytes

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
KINDS = ("LORA", "LOHA", "LOKR", "IA3", "OFT", "HRA", "LN_TUNING", "FOURIERFT")
"""The methods whose files have the model's names, without the adapter's. Of others, peft computes what it saves."""
_PREFIX = "base_model."
_SAVED_MODULE = "modules_to_save"
_DORA = "lora_magnitude_vector"
_RANK_FIRST = ("lora_A", "lora_embedding_A")


def plan_adapter(
    opened: OpenedCheckpoint, config: Mapping[str, Any], *, adapter: str, name: str, dtype: str = ""
) -> PlannedExport:
    """Return the files of `adapter` in `opened` for the folder `name`; `config` is its adapter_config.json.

    Raises ConfigError if `opened` has no such adapter, or `config` is that of another one; and ExtraMissing.
    """
    safetensors_files.require_library()
    kind = config.get("peft_type")
    if kind not in KINDS:
        raise ConfigError(f"{CONFIG}: peft_type: expected one of {', '.join(KINDS)}, found {kind!r}")
    contents = opened.contents
    keys = [each for each in model_keys(contents, opened.manifest) if each.key in contents.tensors]
    names = {each.name: saved for each in keys if (saved := saved_name(each.name, adapter, config.get("bias", "none")))}
    if not any(_is_of_adapter(each, adapter) for each in names):
        raise ConfigError(f"{opened.folder} has no tensor of the adapter {adapter!r}{_other_adapters(keys)}")
    if odd := [each for each in names if not each.startswith(_PREFIX)]:
        raise ConfigError(
            f"{odd[0]}: expected a name that begins with {_PREFIX}: give the manager the model that get_peft_model "
            "returned"
        )
    if finding := _other_rank(contents, keys, names, config):
        raise ConfigError(f"{CONFIG} is that of another adapter: {finding}")
    chosen = [each for each in keys if each.name in names]
    tensors = new_tensors(contents, {each.key: names[each.name] for each in chosen}, dtype)
    stream = TensorStream(opened.folder, contents, opened.records)
    facts = {"method": str(kind), **tensor_summary(contents, chosen, tensors)}
    files = {
        CONFIG: json_bytes({**config, "inference_mode": True}, indent=2),
        CARD: adapter_card(name, opened, stream, facts),
    }
    # Without the base, every tensor was trained.
    is_trained_only = bool(opened.saved_by.config.get("checkpoint", {}).get("save_trained_only"))
    left_out = [each.name for each in keys if each.name not in names] if is_trained_only else []
    return PlannedExport({WEIGHTS: tensors}, files, stream, left_out)


def saved_name(name: str, adapter: str, bias: object) -> str:
    """Return the name in peft's file of the tensor `name` of the model; "" if peft does not save it."""
    path = name.split(".")
    if bias == "all" and path[-1] == "bias" and not _is_of_adapter(name, adapter):
        return "" if _SAVED_MODULE in path or "original_module" in path else name
    if isinstance(bias, str) and bias.endswith("_only") and path[-2:] == ["base_layer", "bias"]:
        return name
    if not _is_of_adapter(name, adapter):
        return ""
    if _SAVED_MODULE in path:
        at = path.index(_SAVED_MODULE)
        return ".".join((*path[:at], *path[at + 2 :]))
    if path[-1] == adapter:
        return ".".join(path[:-1])
    if path[-3] == _DORA:
        return ".".join(path[:-2])
    return ".".join((*path[:-2], path[-1]))


def _is_of_adapter(name: str, adapter: str) -> bool:
    path = name.split(".")
    if _SAVED_MODULE in path:
        at = path.index(_SAVED_MODULE)
        return path[at + 1 : at + 2] == [adapter] and len(path) > at + 2
    return path[-1] == adapter or (len(path) > 2 and path[-2] == adapter)


def _other_adapters(keys: Iterable[ModelKey]) -> str:
    """Return what adapters there seem to be, as a part of a sentence."""
    paths = [each.name.split(".") for each in keys]
    found = {
        path[at + 1]
        for path in paths
        for at, part in enumerate(path[:-1])
        if part.startswith("lora_") or part == _SAVED_MODULE
    }
    return f": name another one of its adapters with --adapter ({listed(sorted(found))})" if found else ""


def _other_rank(
    contents: Contents, keys: Sequence[ModelKey], names: Mapping[str, str], config: Mapping[str, Any]
) -> str:
    """Return which tensor has another rank than `config` says; "" if none has."""
    rank = config.get("r")
    if config.get("peft_type") != "LORA" or config.get("rank_pattern") or type(rank) is not int:
        return ""
    for each in keys:
        shape = contents.tensors[each.key].shape
        if each.name in names and set(_RANK_FIRST) & {*each.name.split(".")} and shape[:1] != (rank,):
            return f"r is {rank}, and {each.name} has shape {list(shape)}"
    return ""
