"""A model as Hugging Face's libraries know it: its configuration, and where each of its tensors is in their files.

Whoever knows a model family makes these values; whoever writes or reads the files knows no family. Every tensor of the
model has one place, and no two have the same name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.hugging_face.model_files import Place
from torchtitan_lite.log import listed

if TYPE_CHECKING:
    from torchtitan_lite.checkpoint.context import RunContext
    from torchtitan_lite.checkpoint.run_folders import RunFolders
    from torchtitan_lite.checkpoint.state.run_state import RunState
    from torchtitan_lite.config.job_config import JobConfig
    from torchtitan_lite.hugging_face.last_export import HuggingFaceExport


@dataclass(frozen=True)
class HuggingFaceModel:
    """What is written next to the tensors, and where each tensor goes."""

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

    def last_export(
        self, config: JobConfig, run: RunState, folders: RunFolders, context: RunContext
    ) -> HuggingFaceExport:
        """Return what writes the weights of the last step of `run`: the manager asks for it. Any rank.

        Raises ConfigError if a parameter has no place, ExtraMissing if the package safetensors is not installed.
        """
        # What writes the files loads much that a run without them does not need.
        from torchtitan_lite.hugging_face.last_export import HuggingFaceExport

        if lacking := sorted(run.model.parameter_names() - self.places.keys()):
            raise ConfigError(
                f"hugging_face: {listed(lacking)} of the model have no place in it. Add a Place for each parameter."
            )
        return HuggingFaceExport(config, self, folders, context)
