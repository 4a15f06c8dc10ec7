"""A model as Hugging Face's libraries know it: its configuration, and where each of its tensors is in their files.

Whoever knows a model family makes these values; whoever writes or reads the files knows no family. Every tensor of the
model has one place, and no two have the same name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Place(NamedTuple):
    """One tensor in Hugging Face's files."""

    name: str
    """Its name in their files."""
    shape: tuple[int, ...]
    """Its shape there, which is that of the whole tensor in the model, too."""
    rotary_head_dim: int | None = None
    """Rows of one head, if the rows of each head are in another order there: `rotary_rows` has the two orders."""


@dataclass(frozen=True)
class HuggingFaceModel:
    """What is written beside the tensors, and where each tensor goes."""

    config: Mapping[str, Any]
    """The contents of config.json, without the dtype."""
    places: Mapping[str, Place]
    """The place of every tensor of the model, by our name for it."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Further files by name: those of the tokenizer, generation_config.json."""
    left_out: Collection[str] = ()
    """Our names of further tensors, which are not written."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer whose files these are, to compare with that of the run's data; "" for any."""
