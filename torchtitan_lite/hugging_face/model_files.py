"""What is known of a model in Hugging Face's files: the names of its tensors there, and what stands next to them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol


class Place(NamedTuple):
    """One tensor in Hugging Face's files."""

    name: str
    """Its name in their files."""
    shape: tuple[int, ...]
    """Its shape there, which is that of the whole tensor in the model, too."""
    rotary_head_dim: int | None = None
    """Rows of one head, if the rows of each head are in another order there: `rotary_rows` has the two orders."""


class DescribedModel(Protocol):
    """What the writers of the files need of a `HuggingFaceModel`, whose fields say more."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def places(self) -> Mapping[str, Place]: ...

    @property
    def files(self) -> Mapping[str, bytes]: ...

    @property
    def left_out(self) -> Collection[str]: ...

    @property
    def tokenizer(self) -> str: ...
