"""A Llama that other software wrote, as a seed checkpoint of ours.

The architecture is that of its config.json, or of Meta's params.json; what is not a Llama like ours is refused by name
before anything is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.checkpoint.format.contents import Shape
from torchtitan_lite.converting.exporting import Progress
from torchtitan_lite.converting.new_output import NewOutput
from torchtitan_lite.converting.streamed_file import Advance
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.examining.tensor_stream import TensorStream
from torchtitan_lite.hugging_face.rotary_rows import ReorderedStream
from torchtitan_lite.importing import meta_folder
from torchtitan_lite.importing.seed import Form, write_seed
from torchtitan_lite.importing.wanted import ChosenWeights, as_model
from torchtitan_lite.importing.weights_source import CONFIG, WeightsSource, open_source
from torchtitan_lite.models.llama.args import SETTINGS, ModelArgs, settings_of
from torchtitan_lite.models.llama.config_file import FACTOR, PARAMS, args_of_params
from torchtitan_lite.models.llama.hugging_face import EMBEDDING, HEAD, OUTPUT, TIED, are_equal, args_of, places_of

FULL_FORM = Form()


@dataclass(frozen=True)
class OpenedLlama:
    """A source that holds a Llama: its sizes, its tensors, and where ours are among them."""

    source: WeightsSource
    args: ModelArgs
    chosen: ChosenWeights
    head_dims: dict[str, int]
    """Rows of one head of each tensor in the source whose rows are in Hugging Face's order."""
    embeddings: tuple[str, str]
    """The names of the output projection and of the embedding in the source."""
    states_tying: bool
    """Whether the source says if its embeddings are tied."""

    def stream(self) -> TensorStream:
        """Return what reads the tensors with their rows in our order."""
        of = self.source
        return ReorderedStream(of.path, of.contents, {}, of.strides, self.head_dims, "pairs")


@contextlib.contextmanager
def unseen(label: str, total_bytes: int) -> Iterator[Advance]:
    """Show no progress."""
    yield lambda num_bytes: None


def open_expected(path: Path, expected: ModelArgs) -> OpenedLlama:
    """Return the Llama at `path`, which must have the `expected` sizes and settings. Raises as `open_llama` does."""
    opened, names = open_llama(path), (*SETTINGS, "rope_scaling", TIED)
    pairs = {name: (getattr(opened.args, name), getattr(expected, name)) for name in names}
    if other := [f"{name} {its} instead of {ours}" for name, (its, ours) in pairs.items() if its != ours]:
        raise ConfigError(
            f"{path} is another model than this run's: {', '.join(other)}. Set --model.config_path={_folder(path)}"
        )
    return opened


def write_llama(opened: OpenedLlama, out: Path, form: Form = FULL_FORM, progress: Progress = unseen) -> NewOutput:
    """Write an opened Llama as a seed checkpoint to the new folder `out`. **Coordinator only**.

    Raises ConfigError, before anything is written, if its embeddings are not tied as it says, and as `write_seed` does.
    """
    _refuse_wrong_tying(opened)
    model = settings_of(opened.args) | {"max_seq_len": opened.args.max_seq_len}
    extra = {"imported_from": str(opened.source.path), "model": model}
    done = write_seed(out, opened.chosen.weights, opened.stream(), form, progress, extra)
    return dataclasses.replace(done, notes=[*opened.source.notes, *opened.chosen.notes])


def open_llama(path: Path) -> OpenedLlama:
    """Return the Llama at `path`: a folder of Hugging Face's or in Meta's layout, or a file in one. Reads no tensor.

    Raises ConfigError if it is none that ours can be, and as `open_source` does.
    """
    if meta_folder.is_meta_folder(path):
        return _of_meta(path)
    source = open_source(path)
    if not source.config:
        raise ConfigError(
            f"there is no {CONFIG} in {_folder(path)}, and the sizes of the model are in it: put it there, or use "
            "--names same for the model of a training loop of your own"
        )
    _refuse_quantized(source)
    with _naming_file(path, "; a training loop of your own can take it with --names same"):
        args = args_of(source.config)
    places = places_of(args)
    head_dims = {place.name: place.rotary_head_dim for place in places.values() if place.rotary_head_dim}
    theirs = {name: (place.name, place.shape) for name, place in places.items()}
    chosen, embeddings = _chosen(source, args, theirs, HEAD), (HEAD, places[EMBEDDING].name)
    return OpenedLlama(source, args, chosen, head_dims, embeddings, states_tying=True)


def _of_meta(path: Path) -> OpenedLlama:
    """Return the Llama in Meta's layout at `path`; its names and the order of its rows are ours."""
    folder = meta_folder.read_meta_folder(path)
    with _naming_file(path):
        args = args_of_params(folder.params, folder.vocab_size)
    shapes = {name: place.shape for name, place in places_of(args).items()}
    source = meta_folder.joined_weights(folder, shapes | {OUTPUT: shapes[EMBEDDING]})
    ours = {name: (name, shape) for name, shape in shapes.items()}
    chosen = _chosen(source, args, ours, OUTPUT)
    if args.rope_scaling is not None and FACTOR not in folder.params:
        chosen.notes.append(
            f"{folder.path.name} states no factor of its rotary scaling: {args.rope_scaling.factor:g} taken"
        )
    return OpenedLlama(source, args, chosen, {}, (OUTPUT, EMBEDDING), states_tying=TIED in folder.params)


def _chosen(source: WeightsSource, args: ModelArgs, places: dict[str, tuple[str, Shape]], head: str) -> ChosenWeights:
    """Return our tensors in `source`; `head` is its name of the output projection."""
    tied = args.tie_word_embeddings
    chosen = as_model(source.contents, places, (head,) if tied else ())
    notes = [f"tied embeddings: {OUTPUT} is {EMBEDDING}, one tensor"] if tied else []
    return chosen._replace(notes=notes + chosen.notes)


def _refuse_wrong_tying(opened: OpenedLlama) -> None:
    """Raise ConfigError if the embeddings are one tensor and the source does not say it, or two though it says one."""
    head, embedding = opened.embeddings
    tied = opened.args.tie_word_embeddings
    if head not in opened.source.contents.tensors or (opened.states_tying and not tied):
        return
    is_one = are_equal(opened.source.stream, head, embedding)
    if tied and not is_one:
        raise ConfigError(
            f"{opened.source.path}: {TIED} is true, and {head} has other values than {embedding}. Set it to false to "
            "train both"
        )
    if is_one and not tied:
        raise ConfigError(
            f"{opened.source.path}: {head} has the values of {embedding}, and {PARAMS} does not say whether they are "
            f'one parameter, as in Llama 3.2 1B and 3B. Add "{TIED}": true to it, or false to train two'
        )


@contextlib.contextmanager
def _naming_file(path: Path, hint: str = "") -> Iterator[None]:
    """Let a ConfigError in the block name `path`, and end with `hint`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}{hint}") from None


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _refuse_quantized(source: WeightsSource) -> None:
    quantization = source.config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "") if isinstance(quantization, dict) else ""
        raise ConfigError(
            f"{source.path} is quantized ({method or 'quantization_config'}): import the weights that it was made from"
        )
