"""The weights in a checkpoint of transformers, accelerate or Lightning, as far as they can be read without a pickle.

Their names are the model's own: those in the safetensors files, or below `state_dict` in Lightning's folders of DCP.
"""

from __future__ import annotations

import dataclasses

from torchtitan_lite.checkpoint.examining.opened import OF_HUGGING_FACE, OpenedCheckpoint, WrittenBy
from torchtitan_lite.checkpoint.examining.transformers_folder import WEIGHTS
from torchtitan_lite.checkpoint.format.structure import Path as KeyPath
from torchtitan_lite.errors import ConfigError

_LIGHTNING_MODEL = "state_dict"


def weights_alone(opened: OpenedCheckpoint) -> OpenedCheckpoint:
    """Return `opened` with nothing but weights if one of these libraries wrote it, and unchanged otherwise.

    Raises ConfigError where they are in a pickle, or in a folder below.
    """
    contents, folder = opened.contents, opened.folder
    if opened.origin is WrittenBy.LIGHTNING:
        if folder.is_file():
            raise _in_pickle(opened, folder.name)
        paths = {key: contents.paths.get(key, (key,)) for key in contents}
        below = {key: path[1:] for key, path in paths.items() if path[0] == _LIGHTNING_MODEL and len(path) > 1}
        return _only(opened, below)
    if opened.origin in OF_HUGGING_FACE:
        bare = [key for key, tensor in contents.tensors.items() if not any(chunk.item for chunk in tensor.chunks)]
        if not bare:
            raise _elsewhere(opened)
        return _only(opened, {key: (key,) for key in bare})
    return opened


def _only(opened: OpenedCheckpoint, paths: dict[str, KeyPath]) -> OpenedCheckpoint:
    """Return `opened` with the keys in `paths`, which are their paths in the state of the model."""
    contents = dataclasses.replace(
        opened.contents,
        tensors={key: tensor for key, tensor in opened.contents.tensors.items() if key in paths},
        objects={key: stored for key, stored in opened.contents.objects.items() if key in paths},
        paths=paths,
    )
    return dataclasses.replace(opened, contents=contents)


def _elsewhere(opened: OpenedCheckpoint) -> ConfigError:
    folders = sorted({file.partition("/")[0] for file in opened.contents.files if "/" in file})
    if folders:
        names = " and ".join(folders)
        return ConfigError(f"{opened.folder} has its tensors in {names}: name the folder with the weights, as STEP")
    pickled = sorted(filter(WEIGHTS.fullmatch, opened.contents.files))
    return _in_pickle(opened, pickled[0] if pickled else "no safetensors file")


def _in_pickle(opened: OpenedCheckpoint, name: str) -> ConfigError:
    return ConfigError(
        f"{opened.folder}: expected weights in safetensors files or a folder of DCP, found {name}, and export reads no "
        "pickle: try import-weights, which takes plain tensors out of one without running it"
    )
