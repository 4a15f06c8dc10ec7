"""`import-weights`: weights of other software as a checkpoint that a run starts from."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from torchtitan_lite.cli.name_map import read_name_map
from torchtitan_lite.cli.named_checkpoint import local
from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.cli.writing_verbs import new_place
from torchtitan_lite.config.argument_parser import Option, Positional
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import counted, readable_bytes
from torchtitan_lite.models.llama.args import settings_of
from torchtitan_lite.store import layout
from torchtitan_lite.store.store import CheckpointStore

if TYPE_CHECKING:
    from rich.text import Text

    from torchtitan_lite.converting.new_output import NewOutput
    from torchtitan_lite.importing.seed import Form
    from torchtitan_lite.models.llama.args import ModelArgs

_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class ImportWeights:
    """Convert third-party weights into a seed checkpoint.

    SOURCE is a Hugging Face folder, a safetensors file, a file of torch.save or a folder of Meta's Llama; no code in it
    is run. Writes OUT only after verifying it.
    """

    source: Annotated[str, Positional("SOURCE")]
    """The folder or the file with the weights."""
    out: Annotated[str, Positional("OUT")]
    """Output folder, such as outputs/checkpoint/step-0."""
    dtype: Literal["float32", "bfloat16", "float16", "same"] = "float32"
    """Cast floating-point tensors to this dtype; same leaves each as it is."""
    files: int = 0
    """Number of files for the tensors; without it, as many as files of up to 5 GB need."""
    names: Literal["llama", "same"] = "llama"
    """llama: the model of train.py. same: keep the names, for a training loop of your own."""
    name_map: Annotated[str, Option("NAMES")] = ""
    """For your own loop: FILE.json with {name in your model: name in SOURCE}, or module:function."""

    def run(self, screen: Screen) -> None:
        if self.files < 0:
            raise ConfigError(f"--files {self.files}: expected at least 1")
        if self.names == "same" and self.name_map:
            raise ConfigError("--names same and --name-map: expected only one of them")
        source, out = local(self.source, "import-weights"), new_place(self.out, is_step=True)
        names = read_name_map(self.name_map) if self.name_map else None

        from torchtitan_lite.importing.seed import Form, refuse_out

        refuse_out(out)
        _refuse_folder_of_a_run(out)
        form = Form("" if self.dtype == "same" else self.dtype, self.files or None)
        args = None
        if self.names == "same" or names is not None:
            done = _import_named(source, out, names, form, screen)
        else:
            from torchtitan_lite.models.llama.imported import open_llama, write_llama

            opened = open_llama(source)
            done, args = write_llama(opened, out, form, screen.progress), opened.args
        data: dict[str, Any] = {
            "source": str(source),
            "out": str(out),
            "dtype": None if self.dtype == "same" else self.dtype,
            **done.to_json(),
            "notes": done.notes,
            "model": None if args is None else settings_of(args),
            "train": None if args is None else shlex.join(_command(source, out, args)),
        }
        screen.show(data, lambda: _imported_text(source, out, done, args))


def _refuse_folder_of_a_run(out: Path) -> None:
    """Raise ConfigError if `out` would be the first step of a run that has later ones.

    It would not start from it; but if all later ones are damaged, it would, and with weights that are not its own.
    """
    if layout.parse_step(out.name) is None or not out.parent.is_dir():
        return
    if steps := [info.step for info in CheckpointStore(out.parent).committed()]:
        raise ConfigError(
            f"{out}: {out.parent} has step {steps[-1]} of a run, which would not start from the imported weights: name "
            "OUT in another folder"
        )


def _import_named(source: Path, out: Path, names: Any, form: Form, screen: Screen) -> NewOutput:
    """Write all tensors for a model that is not known here, under the names of a map or their own."""
    from torchtitan_lite.importing.seed import write_seed
    from torchtitan_lite.importing.wanted import as_mapped, as_renamed
    from torchtitan_lite.importing.weights_source import open_source

    opened = open_source(source)
    if isinstance(names, dict):
        chosen = as_mapped(opened.contents, names)
    else:
        is_tied = bool(opened.config) and opened.config.get("tie_word_embeddings", True)
        chosen = as_renamed(opened.contents, names or (lambda name: name), is_tied=is_tied)
    extra = {"imported_from": str(source)}
    done = write_seed(out, chosen.weights, opened.stream(), form, screen.progress, extra)
    return dataclasses.replace(done, notes=[*opened.notes, *chosen.notes])


def _imported_text(source: Path, out: Path, done: NewOutput, args: ModelArgs | None) -> Text:
    from rich.text import Text

    count = len([name for name in done.files if layout.is_data_file(name)])
    lines = [
        f"Imported {counted(done.num_tensors, 'tensor')} of {source}",
        f"to {out}: {readable_bytes(done.num_bytes)} in {counted(count, 'file')}",
    ]
    lines += [f"Note: {note}" for note in done.notes]
    if args is None:
        lines.append(f"Start your loop from it with initial_load_path={str(out)!r}")
    else:
        words = [shlex.quote(word) for word in _command(source, out, args)]
        lines += ["Train from it with", f"  {' '.join(words[:3])} \\"]
        lines += [f"    {word} \\" for word in words[3:-1]] + [f"    {words[-1]}"]
    # Not folded: the command is to be copied.
    return Text("\n".join(lines), no_wrap=True, overflow="ignore")


def _command(source: Path, out: Path, args: ModelArgs) -> list[str]:
    """Return the command that trains from the checkpoint `out`, without what only a person knows."""
    from torchtitan_lite.models.llama.config_file import fitting_flavor

    folder = source if source.is_dir() else source.parent
    flavor = fitting_flavor(args)
    model = f"--model.flavor={flavor}" if flavor else f"--model.config_path={folder}"
    tokenizer = f"--model.tokenizer_path={folder}" if (folder / _TOKENIZER).is_file() else ""
    start = f"--checkpoint.initial_load_path={out}"
    words = ["python", "train.py", "--checkpoint.enable_checkpoint", start, model, tokenizer]
    return [word for word in words if word]
