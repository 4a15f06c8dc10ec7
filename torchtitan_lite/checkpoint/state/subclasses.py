"""Tensors that are made of other tensors, such as low-bit states and weights, by torch's own protocol.

A class with `__tensor_flatten__` and `__tensor_unflatten__` is saved as its inner dense tensors, each under a name of
its own, next to a form: the class, its inner tensors, and what else makes it, as text. The form is compared and shown,
and never made into anything: the class comes from the live tensor, whose inner tensors a load fills in place. Another
dtype, block or context is refused by name, and never cast.

A sharded one is a DTensor over such a tensor. Its inner tensors become DTensors where it is known how they follow the
outer one (`_RULES`), so that any number of ranks loads them. Else each rank's are saved as the pieces of its shard, and
only the same sharding loads them: sizes alone prove nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_lite.checkpoint.format.shards import local_of
from torchtitan_lite.checkpoint.format.structure import FORM
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.store.manifest import compact_json

_TORCHS_OWN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_USUAL = frozenset({*_TORCHS_OWN, int, float, bool, str, type(None), list, tuple, dict})
_LEFT_OUT = ("device", "stride", "strides", "requires_grad")
"""Of a context: they may differ from run to run. What has no name is left out by its type."""
_BELOW = f".{FORM}"
LIKE, ROWS, EQUAL = "like the outer tensor", "its rows in parts of equal length", "equal on all ranks"
_RULES: Mapping[str, Mapping[str, str]] = {
    "OptimState8bit": {"codes": LIKE, "scale": ROWS, "qmap": EQUAL},
    "OptimState4bit": {"codes": ROWS, "scale": ROWS, "qmap": EQUAL},
    "OptimStateFp8": {"codes": LIKE, "scale": ROWS},
}
"""By class, how each inner tensor follows the outer one: with its shape; a number for each block of its row-major
elements, or a byte for each few of them; or apart from it. Each is proved by a test that compares the dense tensors."""
_WAITS = "trigger_wait"
"""The method of torch's tensors that a collective still fills, which have the protocol, too."""
_MOST_DEPTH = 10


def is_made_of_others(value: object) -> bool:
    """Return whether `value`, or this rank's part of the DTensor `value`, is of a class with torch's protocol.

    Nested tensors, and those that a collective still fills, have that, too, and are none of these.
    """
    if isinstance(value, DTensor):
        value = local_of(value)
    return (
        isinstance(value, torch.Tensor)
        and type(value) not in _TORCHS_OWN
        and not isinstance(value, DTensor)
        and hasattr(type(value), "__tensor_flatten__")
        and hasattr(type(value), "__tensor_unflatten__")
        and not hasattr(type(value), _WAITS)
        and not value.is_nested
    )


def inner_tensors(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the inner dense tensors of `tensor`, called `name`, by their names: they share its memory.

    Those of a DTensor are DTensors, or if no rule is known for it, called after the shard that they make.
    Raises as `parts_of`.
    """
    local = local_of(tensor)
    inner, rules = dict(_inner(name, local, "")), _RULES.get(type(local).__qualname__, {})
    if inner.keys() != rules.keys():
        rules = {}
    for key, rule in rules.items():
        if rule is ROWS and local.numel():  # In a shape that is the same for each number of ranks.
            is_whole = local.dim() > 0 and inner[key].numel() % local.shape[0] == 0
            inner[key] = inner[key].view(local.shape[0], -1) if is_whole else inner[key].view(-1)
    if not isinstance(tensor, DTensor):
        return inner
    if _sharding(name, tensor) is not None:
        shard = _shard(tensor)
        return {f"{key}.{shard}": each for key, each in inner.items()}
    return {key: _sharded(each, tensor, rules[key]) for key, each in inner.items()} if rules else inner


def _sharding(name: str, tensor: torch.Tensor) -> str | None:
    """Return how the DTensor `tensor` is sharded, if no rule is known for that. Raises TypeError for partial sums."""
    if not isinstance(tensor, DTensor):
        return None
    if any(place.is_partial() for place in tensor.placements):
        raise TypeError(f"{name} is a DTensor of partial sums: no rank has its values. Redistribute it first.")
    local = local_of(tensor)
    rules = _RULES.get(type(local).__qualname__, {})
    is_known = rules.keys() == dict(_inner(name, local, "")).keys()
    if all(place.is_replicate() or (is_known and getattr(place, "dim", None) == 0) for place in tensor.placements):
        return None
    return f"{list(tensor.placements)} on a mesh of {list(tensor.device_mesh.shape)}"


def _shard(tensor: DTensor) -> str:
    """Return the name of this rank's shard, the same for all that hold it."""
    places = zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=False)
    return "shard" + "_".join(str(at) for place, at in places if not place.is_replicate())


def _sharded(inner: torch.Tensor, outer: DTensor, rule: str) -> DTensor:
    mesh, placements = outer.device_mesh, list(outer.placements)
    if rule is EQUAL:
        return DTensor.from_local(inner, mesh, [Replicate()] * mesh.ndim, run_check=False)
    shape = outer.shape if rule is LIKE else torch.Size([outer.shape[0], *inner.shape[1:]])
    if rule is ROWS and inner.dim() == 1:
        shape = torch.Size([outer.numel() * inner.numel() // local_of(outer).numel()])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(inner, mesh, placements, run_check=False, shape=shape, stride=stride)


def parts_of(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Return the inner tensors of `tensor`, called `name`, by their names, and its form under `FORM`.

    Raises TypeError for one with a context that is no plain value, or with an inner tensor that cannot be written.
    """
    inner = inner_tensors(name, tensor)
    form: dict[str, Any] = {"class": class_name(tensor), "shape": [*tensor.shape]}
    context = {"context": _context_of(name, tensor)}
    if isinstance(tensor, DTensor) and (sharding := _sharding(name, tensor)):
        form["inner"] = {key.rpartition(".")[0]: [_dtype_text(each)] for key, each in inner.items()}
        joint = {FORM: compact_json({**form, "sharding": sharding})}
        # The shapes of a rank's pieces are its own, and its context may have some of them.
        return {**inner, **joint, f"{_shard(tensor)}.{FORM}": compact_json(context)}
    form["inner"] = {key: [_dtype_text(each), [*each.shape]] for key, each in inner.items()}
    return {**inner, FORM: compact_json({**form, **context})}


def _dtype_text(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def with_parts(name: str, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return `values`, called `name`, with the parts of each tensor that is made of others in its place."""
    odd = [key for key, each in values.items() if type(each) not in _USUAL and is_made_of_others(each)]
    return {**values, **{key: parts_of(f"{name}.{key}", values[key]) for key in odd}} if odd else values


@torch.no_grad()  # Otherwise each part of a DTensor would be a new view, under autograd.
def with_parts_apart(entries: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `entries` of `where` with the parts of each tensor that is made of others, under names below its own.

    Raises ConfigError if an entry has one of these names already.
    """
    whole = with_parts(where, entries)
    found = {name: value for name, value in entries.items() if whole[name] is value}
    for name in [name for name in entries if name not in found]:
        parts = {f"{name}.{key}": part for key, part in whole[name].items()}
        if both := [key for key in parts if key in found]:
            raise ConfigError(
                f"{where}.{name} is a {class_name(entries[name])}, whose parts have names below it in a checkpoint, "
                f"and one of them is {both[0]}, which is another entry of {where}. Give that one another name."
            )
        found |= parts
    return found


def parts_below(name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of the tensor `name` by their own names, from what `with_parts_apart` returned."""
    return {key.removeprefix(f"{name}."): part for key, part in entries.items() if key.startswith(f"{name}.")}


def forms_in(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form of each tensor that is made of others, by its name, from what `with_parts_apart` returned."""
    return {key.removesuffix(_BELOW): form for key, form in entries.items() if key.endswith(_BELOW)}


def class_name(value: Any) -> str:
    """Return the full name of the class of `value`, or of what a DTensor has of it here."""
    kind = type(local_of(value))
    return f"{kind.__module__}.{kind.__qualname__}"


def form_difference(stored: object, own: object) -> str:
    """Return how the form `stored` in a checkpoint differs from the `own` one, None: a plain tensor; empty if not.

    The module of a class may have another name in another version of its library.
    """
    there, here = _parsed(stored), _parsed(own)
    is_same = there == here or {**there, "class": _short_name(there)} == {**here, "class": _short_name(here)}
    return "" if is_same else f"{_form_text(there)} in the checkpoint, {_form_text(here)} expected"


def fill(tensor: torch.Tensor, parts: Mapping[str, Any], name: str) -> None:
    """Have the inner tensors of `tensor` hold `parts`, which were read for it: in place, if they are not its own."""
    for key, own in inner_tensors(name, tensor).items():
        here, read = local_of(own), local_of(parts[key])
        if here is not read and (here.data_ptr(), here.shape) != (read.data_ptr(), read.shape):
            here.copy_(read)


def _inner(name: str, tensor: torch.Tensor, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the inner dense tensors of `tensor`, with names that are joined by dots where one is made of others."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # its class has the protocol
    for key in names:
        each = getattr(tensor, key)
        each = each.trigger_wait() if hasattr(type(each), _WAITS) else each
        if is_made_of_others(each):
            yield from _inner(name, each, f"{prefix}{key}.")
            continue
        if type(each) not in _TORCHS_OWN or each.layout is not torch.strided:
            raise TypeError(
                f"{name} is a {class_name(tensor)}, and its inner tensor {prefix}{key} is a {class_name(each)} of "
                f"layout {each.layout}, which a checkpoint cannot hold. Use a class over dense tensors."
            )
        yield prefix + key, each.detach()


def _context_of(name: str, tensor: torch.Tensor) -> str:
    """Return what makes `tensor` besides its inner tensors, as text: of its class's own copy, which drops what it can.

    An appearance dtype that operations of the class drop is none of it.
    """
    tensor = local_of(tensor)
    with torch.no_grad():
        _, context = tensor.detach().__tensor_flatten__()  # type: ignore[attr-defined]  # its class has the protocol
    inner = {
        key: _context_of(f"{name}.{key}", each)
        for key in tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]  # as above
        if is_made_of_others(each := getattr(tensor, key))
    }
    try:
        text = _text(context, tensor.shape, 0)
    except ValueError as error:
        raise TypeError(
            f"{name} is a {class_name(tensor)}, whose __tensor_flatten__ returns {error}: a checkpoint could not say "
            "whether a later run has the same. Let it return plain values, dtypes, enums, dataclasses and tuples."
        ) from None
    return text + "".join(f"; {key}: {each}" for key, each in inner.items())


def _text(value: Any, shape: torch.Size, depth: int) -> str:
    """Return a text of `value` in which only its meaning counts. Raise ValueError with what has none."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    if isinstance(value, torch.Size):
        return "shape" if value == shape else str([*value])
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if depth < _MOST_DEPTH and (named := _fields(value)) is not None:
        texts = [f"{key}={_text(each, shape, depth + 1)}" for key, each in named.items() if key not in _LEFT_OUT]
        kind = "" if type(value) is dict else type(value).__qualname__
        return f"{kind}({', '.join(texts)})"
    if depth < _MOST_DEPTH and type(value) in (list, tuple):
        return f"[{', '.join(_text(each, shape, depth + 1) for each in value)}]"
    raise ValueError(f"a {type(value).__module__}.{type(value).__qualname__}")


def _fields(value: Any) -> dict[str, Any] | None:
    """Return the fields of a dict, a dataclass or a named tuple by name; None for anything else."""
    if type(value) is dict:
        return {f"{key}": each for key, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: getattr(value, name) for name in value._fields}
    return None


def _parsed(form: object) -> dict[str, Any]:
    """Return the form in a text that may be anything; an empty one for None, a plain tensor."""
    if form is None:
        return {}
    try:
        parsed = json.loads(form) if isinstance(form, str) else None
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) and parsed else {"class": "unreadable form"}


def _short_name(form: Mapping[str, Any]) -> str:
    return f"{form.get('class')}".rpartition(".")[2]


def _form_text(form: Mapping[str, Any]) -> str:
    if not form:
        return "a plain tensor"
    inner = form.get("inner")
    tensors = [f"{key} {' '.join(map(str, kind))}" for key, kind in inner.items()] if isinstance(inner, dict) else []
    of_class = f"a {form.get('class')} of {', '.join(tensors)}, " if "class" in form else ""
    sharding = f"sharded as {form['sharding']}" if "sharding" in form else f"context {form.get('context')}"
    return of_class + sharding
