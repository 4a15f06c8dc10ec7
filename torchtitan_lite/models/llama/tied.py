"""Whether the two embeddings in stored weights are one tensor, where a file says so or leaves it open.

Tied embeddings are one parameter of the model and one tensor of a checkpoint, `tok_embeddings.weight`. Other software
may store the output projection next to it; it is dropped only after every element was compared.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torchtitan_lite.examining.tensor_stream import TensorStream

OUTPUT = "output.weight"
EMBEDDING = "tok_embeddings.weight"


def are_equal(stream: Callable[[], TensorStream], first: str, second: str) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes. `stream` returns a new reader of both."""
    one, other = stream(), stream()
    a, b = one.contents.tensors[first], other.contents.tensors[second]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    pairs = zip(one.slices(first), other.slices(second), strict=True)
    return all(np.array_equal(np.frombuffer(x.data, np.uint8), np.frombuffer(y.data, np.uint8)) for x, y in pairs)
