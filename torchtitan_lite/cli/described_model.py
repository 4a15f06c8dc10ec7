"""Which model a checkpoint holds, in the words of Hugging Face, as far as the checkpoint and a person say it.

A checkpoint of `train.py` records its model and its tokenizer. For any other a person gives a config.json, and the
names of the tensors in it. What is missing is refused by name.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_lite.cli.name_map import GivenModel, NameMap, read_name_map
from torchtitan_lite.config.sections.training import Model
from torchtitan_lite.converting.model_part import ModelKey, model_keys
from torchtitan_lite.data.tokenizer import BYTES, Tokenizer, build_tokenizer
from torchtitan_lite.disk.plain_file import read_plain
from torchtitan_lite.errors import CheckpointUnsafe, ConfigError
from torchtitan_lite.examining.opened import OpenedCheckpoint
from torchtitan_lite.hugging_face.known_model import HuggingFaceModel
from torchtitan_lite.hugging_face.model_files import Place
from torchtitan_lite.hugging_face.writing import model_mismatch, stream_of
from torchtitan_lite.log import listed
from torchtitan_lite.models.llama.args import ModelArgs, args_of_settings
from torchtitan_lite.models.llama.config_file import build_model_args
from torchtitan_lite.models.llama.hugging_face import (
    EMBEDDING,
    GENERATION,
    MOST_LAYERS,
    OUTPUT,
    TIED,
    are_equal,
    args_of,
    describe,
    generation_config,
    places_of,
)

Described = tuple[HuggingFaceModel, bool, list[str]]
"""A model, whether the configuration in the checkpoint is that of the model, and notes for the person."""
_MOST_BYTES = 1 << 20
_TOKENIZER_OF_DATA = "dataloader.tokenizer"
_SETTINGS = "train_state.model."
_MODEL_OF_IMPORT = "model"
"""In the manifest of a seed that `import-weights` or initial_load_in_hf made."""
_LARGEST_SIZE = 1 << 40
_WITHOUT_TOKENIZER = (
    "note: the checkpoint names no tokenizer, so no files of one are written; --tokenizer PATH adds them"
)
_HOW = "give --config CONFIG_JSON, and --names same or --name-map if its names are not those of train.py's model"


def described_checkpoint(opened: OpenedCheckpoint, given: GivenModel) -> Described:
    """Return the model in `opened`. Raise ConfigError, with what is missing or does not fit."""
    if given.tokenizer and given.no_tokenizer:
        raise ConfigError("--tokenizer and --no-tokenizer: expected only one of them")
    keys = model_keys(opened.contents, opened.manifest)
    if given.names == "llama" and not given.name_map:
        return _llama(opened, keys, given)
    if given.names == "same" and given.name_map:
        raise ConfigError("--names same and --name-map: expected only one of them")
    if not given.config:
        raise ConfigError("--names and --name-map say nothing of the model itself: give its --config CONFIG_JSON too")
    config = read_config(given.config)
    names, left_out = _new_names(keys, read_name_map(given.name_map) if given.name_map else {})
    tensors = {each.name: opened.contents.tensors.get(each.key) for each in keys if each.name in names}
    if objects := [name for name, tensor in tensors.items() if tensor is None]:
        finding = f"{objects[0]} is not a tensor, and safetensors holds only tensors"
        raise ConfigError(f"{finding}: leave it out with --name-map")
    places = {name: Place(names[name], tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    _refuse_other_llama(opened, config, places)
    files = _named_tokenizer(given.tokenizer).files() if given.tokenizer else {}
    files |= {GENERATION: generation_config(config.get("bos_token_id"), config.get("eos_token_id"))}
    model = HuggingFaceModel(config, places, files, left_out)
    return model, False, [] if given.tokenizer or given.no_tokenizer else [_WITHOUT_TOKENIZER]


def read_config(given: str, name: str = "config.json") -> dict[str, Any]:
    """Return the contents of the JSON file `given`, or of `name` in the folder `given`. Raise ConfigError."""
    path = Path(given) / name if Path(given).is_dir() else Path(given)
    try:
        document = json.loads(read_plain(path.resolve(), _MOST_BYTES))
    except (OSError, ValueError, RecursionError, CheckpointUnsafe) as error:
        raise ConfigError(f"--config {given} cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"--config {given}: expected an object, as in {name}")
    # Where the model was when the file was written.
    return {key: value for key, value in document.items() if key != "_name_or_path"}


def _llama(opened: OpenedCheckpoint, keys: list[ModelKey], given: GivenModel) -> Described:
    """Return the model of `train.py`: of the sizes in a given config.json, else of the recorded ones."""
    notes = []
    imported = _imported_args(opened)
    if not (given.config or opened.saved_by.config or imported):
        source = opened.extra.get("imported_from")  # It has the files to give.
        where = f" (the weights are those of {source})" if isinstance(source, str) else ""
        raise ConfigError(f"{opened.folder} does not say which model is in it: {_HOW}{where}")
    tokenizer = _model_tokenizer(opened, given)
    if tokenizer is not None and (finding := _other_tokenizer(opened, tokenizer)):
        if not given.tokenizer:
            raise ConfigError(f"model.tokenizer_path: {finding}: name that of the run with --tokenizer")
        notes.append(f"note: --tokenizer {given.tokenizer}: {finding}")
    bos, eos = (None, None) if tokenizer is None else (tokenizer.bos, tokenizer.eos)
    files = {} if tokenizer is None or given.no_tokenizer else tokenizer.files()
    if given.config:
        config = read_config(given.config)
        model = describe(args_of(config), files, config.get("bos_token_id", bos), config.get("eos_token_id", eos))
        model = dataclasses.replace(model, config=config, left_out=_copies(opened, model, keys))
        source = f"of {given.config}"
    else:
        args, source = imported or _recorded_args(opened, keys), "of the recorded configuration"
        model = describe(args, files, bos, eos)
    if finding := model_mismatch(model, opened.contents, [key for key in keys if key.name not in model.left_out]):
        how = f": for a model of your own loop {_HOW}" if not given.config else ""
        raise ConfigError(f"{opened.folder} does not have the weights of the model {source}: {finding}{how}")
    rows = model.places[EMBEDDING].shape[0]
    if tokenizer is not None and tokenizer.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, and the model {rows}: name the run's with --tokenizer"
        )
    if tokenizer is None and not given.no_tokenizer:
        notes.append(_WITHOUT_TOKENIZER)
    return model, bool(opened.saved_by.config) and not given.config, notes


def _copies(opened: OpenedCheckpoint, model: HuggingFaceModel, keys: list[ModelKey]) -> list[str]:
    """Return the name of the output projection if `model` ties it to the embedding, and both are stored and equal."""
    found = {each.name: each.key for each in keys}
    if not model.config[TIED] or not {OUTPUT, EMBEDDING} <= found.keys():
        return []
    return [OUTPUT] if are_equal(lambda: stream_of(opened, model, ()), found[OUTPUT], found[EMBEDDING]) else []


def _imported_args(opened: OpenedCheckpoint) -> ModelArgs | None:
    """Return the sizes that an import recorded for `train.py`; None if none did, or not as it does."""
    recorded = opened.extra.get(_MODEL_OF_IMPORT)
    if opened.saved_by.config or not isinstance(recorded, dict):
        return None
    try:
        args = dataclasses.replace(args_of_settings(recorded), max_seq_len=recorded["max_seq_len"])
        return args if _is_possible_model(args) else None
    except (ConfigError, KeyError, TypeError):
        return None


def _is_possible_model(args: ModelArgs) -> bool:
    """Return whether `args`, from a file, have the types and the sizes of a model."""
    found, usual = vars(args), vars(dataclasses.replace(ModelArgs(), rope_scaling=args.rope_scaling))
    if any(type(found[name]) is not type(value) for name, value in usual.items()):
        return False
    sizes = [value for value in found.values() if type(value) is int]
    return min(sizes) > 0 and max(sizes) < _LARGEST_SIZE and args.n_layers <= MOST_LAYERS


def _recorded_args(opened: OpenedCheckpoint, keys: list[ModelKey]) -> ModelArgs:
    """Return the sizes of the recorded configuration."""
    model, training = (opened.saved_by.config.get(name, {}) for name in ("model", "training"))
    known = {field.name for field in dataclasses.fields(Model)}
    tensors, objects = opened.contents.tensors, opened.contents.objects
    # Those that the run took from its model.config_path, if it had such a file.
    settings = {key.removeprefix(_SETTINGS): objects[key].value for key in objects if key.startswith(_SETTINGS)}
    embedding = next((tensors[each.key].shape for each in keys if each.name == EMBEDDING and each.key in tensors), ())
    try:
        if settings:
            return dataclasses.replace(args_of_settings(settings), max_seq_len=int(training["seq_len"]))
        section = Model(**{name: value for name, value in model.items() if name in known} | {"tokenizer_path": BYTES})
        # The stored embedding says how large the vocabulary is, also where the tokenizer is gone.
        return build_model_args(section, vocab_size=embedding[0] if embedding else 1, seq_len=int(training["seq_len"]))
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{opened.folder}: the recorded configuration is not a model: {error}; {_HOW}") from None


def _model_tokenizer(opened: OpenedCheckpoint, given: GivenModel) -> Tokenizer | None:
    """Return the tokenizer that is given, else the recorded one; None if there is none."""
    if given.tokenizer:
        return _named_tokenizer(given.tokenizer)
    path = opened.saved_by.config.get("model", {}).get("tokenizer_path", "")
    if not path or not isinstance(path, str) or (given.no_tokenizer and path != BYTES):
        return None
    if path != BYTES and not Path(path).expanduser().exists():
        raise ConfigError(
            f"the tokenizer of the run, {path}, is not there: name it with --tokenizer, or export with --no-tokenizer"
        )
    return build_tokenizer(path)


def _named_tokenizer(given: str) -> Tokenizer:
    """Return the tokenizer at the path `given` by a person. Raise ConfigError if there is none."""
    if given != BYTES and not Path(given).expanduser().exists():
        raise ConfigError(f"--tokenizer {given}: there is no such file or folder")
    return build_tokenizer(given)


def _other_tokenizer(opened: OpenedCheckpoint, tokenizer: Tokenizer) -> str:
    """Return how `tokenizer` differs from that of the run; "" if it does not, or if the checkpoint does not say."""
    recorded = opened.contents.objects.get(_TOKENIZER_OF_DATA)
    if recorded is None or not isinstance(recorded.value, str) or recorded.value == tokenizer.fingerprint:
        return ""
    return f"it is not the tokenizer of the run: its fingerprint is {tokenizer.fingerprint}, the run's {recorded.value}"


def _new_names(keys: list[ModelKey], names: NameMap) -> tuple[dict[str, str], list[str]]:
    """Return the new name of each of `keys` that is written, and the others. Raise ConfigError for holes in the map."""
    own = [each.name for each in keys]
    renamed = {name: names(name) for name in own} if callable(names) else _by_table(own, names)
    taken: dict[str, str] = {}
    for name, new in renamed.items():
        if new is None:
            continue
        if not isinstance(new, str) or not new:
            raise ConfigError(f"the name map gives {name} the name {new!r:.80}: expected text")
        if new in taken:
            raise ConfigError(f"the name map gives {taken[new]} and {name} the same name, {new}")
        taken[new] = name
    if not taken:
        raise ConfigError("the name map leaves out every tensor")
    return {name: new for new, name in taken.items()}, [name for name, new in renamed.items() if new is None]


def _by_table(own: list[str], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the table `names` has for the names in `own`, None for what it leaves out; without one the same."""
    if not names:
        return {name: name for name in own}
    left_out = names.get("", [])
    given = {name: new for name, new in names.items() if name}
    if not isinstance(left_out, list):
        raise ConfigError('the name map: expected a list of names under ""')
    if unknown := [str(name) for name in (*given, *left_out) if name not in own]:
        raise ConfigError(f"the name map names {listed(unknown)}, and the model has {listed(own)}")
    if unnamed := [name for name in own if name not in given and name not in left_out]:
        raise ConfigError(f'the name map has nothing for {listed(unnamed)}; list what to leave out under ""')
    if odd := [name for name, new in given.items() if new is None]:
        raise ConfigError(f"the name map gives {odd[0]} the name None: expected text")
    return given | dict.fromkeys(left_out)


def _refuse_other_llama(opened: OpenedCheckpoint, config: Mapping[str, Any], places: Mapping[str, Place]) -> None:
    """Raise ConfigError if `config` is a Llama that we know, and `places` have other names or shapes than its."""
    try:
        expected = places_of(args_of(config)).values()
    except ConfigError:
        return  # A model that only its own code knows.
    found = {place.name: place.shape for place in places.values()}
    missing = [each.name for each in expected if each.name not in found]
    if missing:
        raise ConfigError(
            f"{opened.folder}: the model of config.json has {listed(missing)}, and no tensor has that name: found "
            f"{listed([*found])}; give a --name-map, or --names llama for the names of train.py's model"
        )
    if odd := [each for each in expected if found.get(each.name, each.shape) != each.shape]:
        raise ConfigError(
            f"{opened.folder}: {odd[0].name} has shape {list(found[odd[0].name])}, and in the model of config.json "
            f"{list(odd[0].shape)}"
        )
