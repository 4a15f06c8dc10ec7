"""What a new layout of a checkpoint needs of the old one: its entries, and the values of small ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtitan_lite.checkpoint.format import plain_value
from torchtitan_lite.checkpoint.format.contents import StoredObject
from torchtitan_lite.checkpoint.format.structure import Path, paths_of
from torchtitan_lite.checkpoint.untrusted.safe_load import UnsafeItem, load_item
from torchtitan_lite.converting.dcp_folder import NewObject, NewState
from torchtitan_lite.converting.streamed_file import NewTensor
from torchtitan_lite.errors import CheckpointUnsafe
from torchtitan_lite.examining.opened import OpenedCheckpoint
from torchtitan_lite.examining.tensor_stream import TensorStream


class Reader:
    """Reads the small things of the checkpoint `opened` that a layout needs."""

    def __init__(self, opened: OpenedCheckpoint) -> None:
        self.opened, self.contents = opened, opened.contents
        self.stream = TensorStream(opened.folder, opened.contents, opened.records)

    def object(self, key: str) -> NewObject:
        """Return the object under `key`, as it is. Raises CheckpointUnsafe if it holds more than plain data."""
        stored = self.contents.objects[key]
        if stored.item is None:
            return NewObject.of(stored.value)
        data = self.stream.read_item(stored.item)
        value = self._loaded(key, data, stored)
        if stored.is_typed:
            return NewObject(data, is_plain=False, is_typed=True)
        try:
            return NewObject(data, plain_value.encode_value(value))
        except plain_value.NotPlain:
            return NewObject(data, is_plain=False)

    def elements(self, key: str) -> bytes:
        """Return the elements of the small tensor under `key`."""
        return b"".join(map(bytes, self.stream.slices(key)))

    def value(self, key: str) -> Any:
        """Return the object under `key`, or the whole number in the tensor under it; None if there is neither."""
        if key in self.contents.objects:
            stored = self.contents.objects[key]
            if stored.item is None:
                return stored.value
            return self._loaded(key, self.stream.read_item(stored.item), stored)
        stored_tensor = self.contents.tensors.get(key)
        if stored_tensor is not None and stored_tensor.shape in ((), (1,)) and "int" in str(stored_tensor.dtype):
            [part] = self.stream.slices(key)
            return int.from_bytes(part, "little", signed=True)
        return None

    def state(self, keys: Mapping[str, tuple[str, Path]], dtype: str = "") -> NewState:
        """Return the entries under the given keys of the checkpoint, each under its new key and path."""
        held = self.contents.tensors
        tensors = {new: NewTensor.of(self.contents, key, dtype) for key, (new, _) in keys.items() if key in held}
        objects = {new: self.object(key) for key, (new, _) in keys.items() if key in self.contents.objects}
        return NewState(tensors, objects, dict(keys.values()))

    def paths(self) -> Mapping[str, Path]:
        """Return the path of each key in the nested state, as DCP has it."""
        if self.contents.structure is not None:
            return paths_of(self.contents.structure, tensors=self.contents.tensors)
        return {key: self.contents.paths.get(key, (key,)) for key in self.contents}

    def _loaded(self, key: str, data: bytes, stored: StoredObject) -> Any:
        try:
            return load_item(data, is_typed=stored.is_typed)
        except UnsafeItem as error:
            raise CheckpointUnsafe(self.contents.path, f"{key}: {error}") from None
