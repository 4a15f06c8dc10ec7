"""`export`: the weights of a checkpoint, for other tools."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from torchtitan_lite.cli.name_map import GivenModel
from torchtitan_lite.cli.named_checkpoint import resolve_any
from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.cli.writing_verbs import new_place
from torchtitan_lite.config.argument_parser import Option, Positional
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.examining.opened import OF_HUGGING_FACE, OpenedCheckpoint, open_checkpoint
from torchtitan_lite.examining.presence import reporting_removal
from torchtitan_lite.log import counted, listed, readable_bytes
from torchtitan_lite.store.place import Place

if TYPE_CHECKING:
    from torchtitan_lite.converting.new_output import NewOutput

_FORMATS_OF = {
    **dict.fromkeys(("names", "name_map", "tokenizer", "no_tokenizer"), ("hf",)),
    **dict.fromkeys(("include", "exclude"), ("safetensors", "torch", "dcp")),
    "config": ("hf", "peft"),
    "adapter": ("peft",),
}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True)
class _Weights:
    """Which weights, and where they go."""

    step: Annotated[str, Positional("STEP")]
    """A checkpoint: its folder, FOLDER:10, or FOLDER for the latest."""
    out: Annotated[str, Positional("OUT")]
    """Output folder, or file (torch; safetensors if it is named *.safetensors)."""
    format: Literal["safetensors", "torch", "dcp", "hf", "peft"] = "safetensors"
    """safetensors: files with an index. torch: one file for torch.load. dcp: a folder for dcp.load. hf: a folder for
    from_pretrained of transformers. peft: an adapter's folder for PeftModel.from_pretrained."""
    dtype: Annotated[Literal["", "float32", "float16", "bfloat16"], Option("{float32,float16,bfloat16}")] = ""
    """Cast floating-point tensors to this dtype; without it, each keeps its own."""
    max_shard_size: Annotated[str, Option("SIZE")] = ""
    """The largest file, as 5GB or 500MiB; of safetensors and hf 5GB by default."""
    include: Annotated[str, Option("GLOBS")] = ""
    """Globs of the model's names, with commas: only these."""
    exclude: Annotated[str, Option("GLOBS")] = ""
    """Globs of the model's names, with commas: not these."""


@dataclass(frozen=True)
class Export(_Weights):
    """Write the weights of a checkpoint in another format, for other tools.

    The checkpoint may be ours, plain DCP's, torchtitan's or another library's, full or weights-only. Writes OUT only
    after verifying it.
    """

    config: Annotated[str, Option("FILE")] = ""
    """hf: the model's config.json, where the checkpoint does not describe the model. peft: the adapter_config.json."""
    names: Literal["llama", "same"] = "llama"
    """hf: llama, the model of train.py; same, a model that has Hugging Face's names already."""
    name_map: Annotated[str, Option("NAMES")] = ""
    """hf: FILE.json with {name in the model: name in the file}, or module:function."""
    tokenizer: Annotated[str, Option("PATH")] = ""
    """hf: a tokenizer.json or its folder, in place of the recorded one."""
    no_tokenizer: bool = False
    """hf: write no files of a tokenizer."""
    adapter: Annotated[str, Option("NAME")] = "default"
    """peft: the name that the adapter has in the model."""

    def run(self, screen: Screen) -> None:
        most = num_bytes(self.max_shard_size) if self.max_shard_size else None
        out = new_place(self.out, is_step=self.format == "dcp")
        target = resolve_any(self.step)

        from torchtitan_lite.converting.exporting import weights_alone

        with reporting_removal(target.folder):
            opened = open_checkpoint(target.folder)
            if opened.origin in OF_HUGGING_FACE and self.format in ("hf", "peft"):
                already = "has the form of Hugging Face's libraries already: copy it, or name another --format"
                raise ConfigError(f"{target.folder} {already}")
            done = self._export(weights_alone(opened), out, most, screen)
        data = {"step": target.step, "source": str(target.folder), "out": str(out), "format": self.format}
        data |= {"dtype": self.dtype or None, **done.to_json()}
        screen.show(data, lambda: _exported_text(target.folder, out, done))

    def _export(self, opened: OpenedCheckpoint, out: Path, most: int | None, screen: Screen) -> NewOutput:
        self._refuse_options()
        if self.format == "peft":
            return self._adapter(opened, out, screen)
        if self.format == "hf":
            return self._model(opened, out, most, screen)
        from torchtitan_lite.converting.exporting import export

        return export(opened, out, screen.progress, self.format, self.dtype, most, self.include, self.exclude)

    def _model(self, opened: OpenedCheckpoint, out: Path, most: int | None, screen: Screen) -> NewOutput:
        from torchtitan_lite.cli.described_model import described_checkpoint
        from torchtitan_lite.hugging_face.writing import plan, write_planned

        given = GivenModel(self.config, self.names, self.name_map, self.tokenizer, self.no_tokenizer)
        model, of_trainer, notes = described_checkpoint(opened, given)
        for note in notes:
            screen.note(note)
        name = out.absolute().name
        planned = plan(opened, model, name=name, dtype=self.dtype, max_shard_bytes=most, of_trainer=of_trainer)
        return write_planned(planned, out, screen.progress)

    def _adapter(self, opened: OpenedCheckpoint, out: Path, screen: Screen) -> NewOutput:
        from torchtitan_lite.cli.described_model import read_config
        from torchtitan_lite.hugging_face import adapter
        from torchtitan_lite.hugging_face.writing import write_planned

        if not self.config:
            raise ConfigError(
                "--format peft needs --config: the adapter_config.json that LoraConfig.save_pretrained writes"
            )
        config = read_config(self.config, adapter.CONFIG)
        planned = adapter.plan_adapter(opened, config, adapter=self.adapter, name=out.absolute().name, dtype=self.dtype)
        if planned.left_out:
            screen.note(f"note: left out, because trained but not part of the adapter: {listed(planned.left_out)}")
        return write_planned(planned, out, screen.progress)

    def _refuse_options(self) -> None:
        """Raise ConfigError for an option that the format does not have."""
        usual = Export(self.step, self.out)
        for name, formats in _FORMATS_OF.items():
            if getattr(self, name) != getattr(usual, name) and self.format not in formats:
                raise ConfigError(f"--{name.replace('_', '-')} is for --format {' and '.join(formats)}")


def num_bytes(text: str) -> int:
    """Return the number of bytes that `text`, such as "5GB", means. Raise ConfigError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper().removesuffix("B") + "B" if match[2] else "") if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise ConfigError(f"--max-shard-size {text!r} is not a size: expected a number with a unit, as 5GB or 500MiB")
    return size


def _exported_text(source: Place, out: Path, done: NewOutput) -> str:
    weights = [name for name in done.files if not name.endswith((".json", ".md", ".jinja"))]
    others = [name for name in done.files if name not in weights]
    size = f"{readable_bytes(done.num_bytes)} in {counted(len(weights), 'file')}"
    text = f"Exported {counted(done.num_tensors, 'tensor')} of {source}\nto {out}: {size}"
    return f"{text}\nwith {', '.join(others)}" if others else text
