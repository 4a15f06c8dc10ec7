"""Which tensors of a source become which of the model, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.format.contents import Contents, Shape, StoredTensor
from torchtitan_lite.checkpoint.format.dtypes import dtype_name
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import listed

_WEIGHTS = ("float64", "float32", "float16", "bfloat16")
_COMPUTED = ("rotary_emb.inv_freq", "rope.freqs", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_MASKS = ("attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")
_HEAD = "lm_head.weight"
_EMBEDDINGS = (".wte.weight", ".embed_tokens.weight", ".word_embeddings.weight", ".embed_in.weight", ".shared.weight")
"""Ends of the names of embeddings in models of transformers that have a head next to them."""


class ChosenWeights(NamedTuple):
    """The weights to write, and what was decided about others, in lines for the user."""

    weights: dict[str, str]
    """By the name in the model, in order, the one in the source."""
    notes: list[str]


Rename = Callable[[str], str | None]
"""Returns the model's name for one in the source; None to leave that tensor out."""


def as_model(contents: Contents, places: Mapping[str, tuple[str, Shape]], copies: Iterable[str]) -> ChosenWeights:
    """Return the weights of a model whose tensors are all in `places`: by name, the name and shape in the source.

    A tensor of the source in `copies` is left out. Raises ConfigError, with names, if one is missing, has
    another shape or is no floating-point tensor, or if the source has others than those that a model computes.
    """
    tensors = contents.tensors
    weights: dict[str, str] = {}
    missing, odd = [], []
    for name, (source, shape) in places.items():
        if source not in tensors:
            missing.append(source)
            continue
        found = tensors[source]
        if found.shape != shape:
            odd.append(f"{source} has shape {list(found.shape)}, expected {list(shape)}")
        elif dtype_name(found.dtype) not in _WEIGHTS:
            odd.append(f"{source} is {dtype_name(found.dtype)}, and only floating-point weights can be read")
        weights[name] = source
    unexpected, notes = _other_tensors(contents, {*copies, *weights.values()})
    findings = [f"missing: {listed(missing)}"] if missing else []
    findings += [f"unexpected: {listed(unexpected)}"] if unexpected else []
    findings += [listed(odd, "; ")] if odd else []
    if findings:
        raise ConfigError(f"{contents.path} does not have the tensors of the model: {'; '.join(findings)}")
    return ChosenWeights(weights, notes)


def as_renamed(contents: Contents, rename: Rename, *, is_tied: bool) -> ChosenWeights:
    """Return all tensors under the names that `rename` returns. Raises ConfigError if two get the same name.

    With `is_tied`, a causal language model of transformers whose head is not in the source gets a copy of its
    embedding as the head, unless `rename` leaves that out.
    """
    weights: dict[str, str] = {}
    tensors = contents.tensors
    left_out = [name for name in tensors if is_computed(name, tensors[name])]
    notes = _dropped(left_out)
    for source in tensors:
        name = None if source in left_out else _renamed(rename, source)
        if name is None:
            continue
        if name in weights:
            raise ConfigError(f"the name map gives {source} and {weights[name]} the same name, {name}")
        weights[name] = source
    embeddings = [name for name in weights if name.endswith(_EMBEDDINGS)]
    if is_tied and _HEAD not in {*tensors, *weights} and len(embeddings) == 1 and _renamed(rename, _HEAD):
        weights[_HEAD] = weights[embeddings[0]]
        notes.append(f"tied embeddings: {_HEAD} is a copy of {embeddings[0]}")
    if not weights:
        raise ConfigError(f"{contents.path}: the name map leaves out every tensor")
    return ChosenWeights(weights, notes)


def as_mapped(contents: Contents, names: Mapping[str, Any]) -> ChosenWeights:
    """Return the tensors in `names`, by the model's name the one in the source; under "" a list of those to leave out.

    Raises ConfigError if one is missing, or if the source has others than those that a model computes.
    """
    left_out = names.get("", [])
    pairs = {name: source for name, source in names.items() if name}
    if not isinstance(left_out, list) or not all(isinstance(each, str) for each in (*pairs.values(), *left_out)):
        raise ConfigError('the name map: expected {"name in the model": "name in the source"}, and "" with a list')
    if missing := [source for source in (*pairs.values(), *left_out) if source not in contents.tensors]:
        raise ConfigError(f"{contents.path} does not have {listed(missing)}, which the name map names")
    unexpected, notes = _other_tensors(contents, {*pairs.values(), *left_out})
    if unexpected:
        raise ConfigError(
            f'the name map has nothing for {listed(unexpected)} of {contents.path}; list what to leave out under ""'
        )
    return ChosenWeights(pairs, notes)


def is_computed(name: str, tensor: StoredTensor) -> bool:
    """Return whether a tensor is one that models compute from their settings, and older versions saved."""
    if name.endswith(_COMPUTED):
        return True
    is_mask = tensor.shape == () or (len(tensor.shape) == 4 and tensor.shape[:2] == (1, 1))
    return name.endswith(_MASKS) and is_mask


def _renamed(rename: Rename, source: str) -> str | None:
    """Return the model's name for `source`. Raise ConfigError if a person's function fails, or returns no name."""
    try:
        name = rename(source)
    except Exception as error:
        raise ConfigError(f"the name map raised {type(error).__name__} for {source}: {error}") from error
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigError(f"the name map returned {name!r:.80} for {source}: expected a name, or None")
    return name


def _other_tensors(contents: Contents, taken: set[str]) -> tuple[list[str], list[str]]:
    """Return the tensors that are not `taken` and no model computes, and notes about those that one computes."""
    others = [name for name in contents.tensors if name not in taken]
    computed = [name for name in others if is_computed(name, contents.tensors[name])]
    return [name for name in others if name not in computed], _dropped(computed)


def _dropped(names: list[str]) -> list[str]:
    return [f"left out, because the model computes it: {listed(names)}"] if names else []
