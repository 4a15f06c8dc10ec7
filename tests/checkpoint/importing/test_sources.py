"""Every form of weights that is read becomes the same tensors, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.checkpoint.importing.sources import (
    ARGS,
    PARAMS,
    State,
    in_their_names,
    weights,
    write_config,
    write_folder,
    write_meta,
    write_shards,
)
from torchtitan_lite.checkpoint.resume.evaluation import load_model
from torchtitan_lite.checkpoint.resume.load_source import is_seed
from torchtitan_lite.converting.new_output import NewOutput
from torchtitan_lite.errors import CheckpointDamaged, ConfigError
from torchtitan_lite.examining.opened import open_checkpoint
from torchtitan_lite.importing.seed import Form, write_seed
from torchtitan_lite.importing.wanted import as_renamed
from torchtitan_lite.importing.weights_source import open_source
from torchtitan_lite.models.llama.args import ModelArgs, RopeScaling
from torchtitan_lite.models.llama.imported import FULL_FORM, open_expected, open_llama, unseen, write_llama
from torchtitan_lite.models.llama.model import Transformer
from torchtitan_lite.store.manifest import CheckpointKind


def import_llama(path: Path, out: Path, *, form: Form = FULL_FORM, expected: ModelArgs | None = None) -> NewOutput:
    """Import the Llama at `path` to `out`, as a run does if it must have the `expected` sizes."""
    opened = open_llama(path) if expected is None else open_expected(path, expected)
    return write_llama(opened, out, form)


def imported(path: Path, out: Path, form: Form | None = None) -> State:
    """Import the Llama at `path` to `out`, and return what our loader reads from there."""
    import_llama(path, out, form=form or Form())
    model = Transformer(ARGS)
    load_model(model, out)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def tensors_of(path: Path, out: Path) -> State:
    """Import all tensors at `path` under their own names, and return them as stock DCP reads them."""
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    source = open_source(path)
    chosen = as_renamed(source.contents, lambda name: name, is_tied=False)
    write_seed(out, chosen.weights, source.stream(), Form(""), unseen, {})
    stored = source.contents.tensors
    state = {
        f"model.{name}": torch.empty(stored[name].shape, dtype=getattr(torch, str(stored[name].dtype)))
        for name in chosen.weights
    }
    dcp_load(state, checkpoint_id=out, no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


TIED = dataclasses.replace(ARGS, tie_word_embeddings=True)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FORMS: dict[str, Callable[[Path, State], Path]] = {
    "one file": lambda at, state: write_folder(at, state),
    "shards": lambda at, state: write_shards(at, in_their_names(state)),
    "shards of torch.save": lambda at, state: write_shards(at, in_their_names(state), suffix=".bin"),
    "the file itself": lambda at, state: write_folder(at, state) / "model.safetensors",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_of_hugging_faces_is_our_model_bit_for_bit(form: str, tmp_path: Path) -> None:
    state = weights()
    path = FORMS[form](tmp_path / "hf", state)
    assert_equal(imported(path, tmp_path / "step-0"), state)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("embeddings_by_columns", [True, False])
def test_metas_parts_are_joined(parts: int, embeddings_by_columns: bool, tmp_path: Path) -> None:
    state = weights()
    path = write_meta(tmp_path / "meta", state, parts, embeddings_by_columns=embeddings_by_columns)
    done = import_llama(path, tmp_path / "step-0")
    assert done.notes == ["left out, because the model computes it: rope.freqs"]
    model = Transformer(ARGS)
    load_model(model, tmp_path / "step-0")
    assert_equal(dict(model.state_dict()), {name: tensor.bfloat16().float() for name, tensor in state.items()})


def test_a_part_of_metas_that_is_missing_is_named(tmp_path: Path) -> None:
    path = write_meta(tmp_path / "meta", weights(), 2, embeddings_by_columns=False)
    shutil.copy(path / "consolidated.01.pth", path / "consolidated.02.pth")
    (path / "consolidated.01.pth").unlink()
    with pytest.raises(CheckpointDamaged, match=r"consolidated\.01\.pth is missing"):
        import_llama(path, tmp_path / "step-0")
    (path / "consolidated.02.pth").unlink()
    with pytest.raises(ConfigError, match=r"wq\.weight has shape \[16, 32\] in 1 file, .* is a file .* missing"):
        import_llama(path, tmp_path / "step-0")


def test_what_is_written_is_a_seed_checkpoint_that_is_verified(tmp_path: Path) -> None:
    import_llama(write_folder(tmp_path / "hf", weights()), tmp_path / "step-0", form=Form("bfloat16", 3))
    opened = open_checkpoint(tmp_path / "step-0")
    assert opened.manifest is not None
    assert (opened.kind, opened.step, is_seed(tmp_path / "step-0", 0)) == (CheckpointKind.FULL, 0, True)
    assert sorted(opened.sizes) == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    assert {str(tensor.dtype) for tensor in opened.contents.tensors.values()} == {"bfloat16"}
    assert all(record.blocks for record in opened.manifest.files.values())


@pytest.mark.parametrize("stored", ["nowhere", "too"])
def test_tied_embeddings_are_one_tensor_and_reported(stored: str, tmp_path: Path) -> None:
    state = weights(TIED)
    theirs = in_their_names(state, TIED)
    if stored == "too":
        theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(theirs, write_config(tmp_path / "hf", TIED) / "model.safetensors")
    done = import_llama(tmp_path / "hf", tmp_path / "step-0", expected=TIED)
    assert done.notes == ["tied embeddings: output.weight is tok_embeddings.weight, one tensor"]
    model = Transformer(TIED)
    load_model(model, tmp_path / "step-0")
    assert_equal(dict(model.state_dict()), state)


def test_embeddings_that_are_called_tied_and_differ_are_refused(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "hf", weights(), tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"lm_head\.weight has other values than model\.embed_tokens\.weight"):
        import_llama(path, tmp_path / "step-0")
    assert not (tmp_path / "step-0").exists()


def test_tied_weights_are_another_model_than_that_of_a_run_without_ties(tmp_path: Path) -> None:
    theirs = in_their_names(weights(TIED), TIED)
    safetensors.torch.save_file(theirs, write_config(tmp_path / "hf", TIED) / "model.safetensors")
    with pytest.raises(ConfigError, match=r"tie_word_embeddings True instead of False\. Set --model\.config_path="):
        import_llama(tmp_path / "hf", tmp_path / "step-0", expected=ARGS)


@pytest.mark.parametrize("tied", [None, True, False])
def test_equal_embeddings_of_metas_are_tied_or_not_as_its_params_say(tied: bool | None, tmp_path: Path) -> None:
    state = weights()
    state["output.weight"] = state["tok_embeddings.weight"]
    path = write_meta(tmp_path / "meta", state, 2, embeddings_by_columns=False)
    if tied is None:
        with pytest.raises(ConfigError, match=r'Add "tie_word_embeddings": true to it, or false to train two'):
            import_llama(path, tmp_path / "step-0")
        return
    (path / "params.json").write_text(json.dumps(PARAMS | {"tie_word_embeddings": tied}))
    import_llama(path, tmp_path / "step-0")
    stored = open_checkpoint(tmp_path / "step-0").contents.tensors
    assert ("model.output.weight" in stored) is not tied and "model.tok_embeddings.weight" in stored


def test_a_missing_head_is_an_error_if_the_embeddings_are_not_tied(tmp_path: Path) -> None:
    theirs = in_their_names(weights())
    del theirs["lm_head.weight"]
    write_config(tmp_path / "hf")
    safetensors.torch.save_file(theirs, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"does not have the tensors of the model: missing: lm_head\.weight$"):
        import_llama(tmp_path / "hf", tmp_path / "step-0")
    assert not (tmp_path / "step-0").exists()


def test_missing_unexpected_and_other_shapes_are_listed_together(tmp_path: Path) -> None:
    theirs = in_their_names(weights())
    theirs["model.norm.weight"] = torch.ones(7)
    theirs["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)
    theirs["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    theirs["model.layers.1.mlp.up_proj.weight"] = torch.ones(48, 32, dtype=torch.int8)
    del theirs["model.layers.1.mlp.gate_proj.weight"]
    write_config(tmp_path / "hf")
    safetensors.torch.save_file(theirs, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ConfigError) as raised:
        import_llama(tmp_path / "hf", tmp_path / "step-0")
    assert str(raised.value).endswith(
        "missing: model.layers.1.mlp.gate_proj.weight; unexpected: model.layers.0.self_attn.q_proj.bias; "
        "model.layers.1.mlp.up_proj.weight is int8, and only floating-point weights can be read; "
        "model.norm.weight has shape [7], expected [32]"
    )


def odd_tensors() -> State:
    """Return tensors in every memory layout that torch.save keeps."""
    whole = torch.arange(24.0).reshape(4, 6)
    return {
        "transposed": whole.T,
        "rows": whole[1:3],
        "columns": whole[:, 1:4],
        "steps": whole[::2, ::3],
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "half": torch.ones(3, dtype=torch.float16),
        "brain": torch.ones(3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "counts": torch.arange(5),
        "float8": torch.ones(4).to(torch.float8_e4m3fn),
        "unsigned": torch.tensor([1, 65535], dtype=torch.uint16),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "one": torch.ones(1, 5).expand(1, 5),
    }


def test_tensors_of_a_torch_file_in_any_memory_layout(tmp_path: Path) -> None:
    expected = odd_tensors()
    torch.save(expected, tmp_path / "w.pt")
    found = tensors_of(tmp_path / "w.pt", tmp_path / "out")
    assert found.keys() == expected.keys()
    elements = {name: (found[name].tolist(), expected[name].tolist()) for name in expected}
    assert [name for name, (its, ours) in elements.items() if its != ours] == []
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in expected.items()}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: OrderedDict(state),
        lambda state: {"model": state, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}, "epoch": 3},
        lambda state: {"state_dict": state, "hyper_parameters": {"lr": 0.1}, "best": torch.tensor(0.5)},
        lambda state: {"module": state, "counts": defaultdict(int, a=1)},
        lambda state: {"weights": state, "step": 7, "name": "x"},
        lambda state: {
            "model_state_dict": torch.nn.Module().state_dict() | state,
            "loss": 0.25,
            "size": torch.Size([2]),
        },
    ],
    ids=["bare", "ordered", "model", "state_dict", "module", "other name", "model_state_dict"],
)
def test_a_state_dict_is_found_in_what_trainers_save(wrap: Callable[[State], object], tmp_path: Path) -> None:
    state = {"a.weight": torch.ones(2, 3), "a.bias": torch.zeros(3)}
    torch.save(wrap(state), tmp_path / "w.pt")
    assert_equal(tensors_of(tmp_path / "w.pt", tmp_path / "out"), state)


def test_the_state_dict_of_a_module_with_versions_is_found(tmp_path: Path) -> None:
    module = torch.nn.BatchNorm1d(3)
    torch.save(module.state_dict(), tmp_path / "w.pt")
    assert_equal(tensors_of(tmp_path / "w.pt", tmp_path / "out"), dict(module.state_dict()))


@pytest.mark.parametrize(
    ("saved", "finding"),
    [
        ({"a": {"w": torch.ones(1)}, "b": {"w": torch.ones(1)}}, r"holds several groups of tensors \('a', 'b'\)"),
        ({"lr": 0.1, "name": "x"}, r"holds no tensors \('lr', 'name'\)"),
        ({"w": torch.ones(1), "epoch": 3}, "no plain tensors: epoch"),
        ({"model": {"w": torch.ones(1), "_extra_state": {"a": 1}}}, "'model': no plain tensors: _extra_state"),
        (torch.ones(2), "holds one tensor: save"),
        ([torch.ones(2)], "holds no mapping of names to tensors"),
        ({}, r"holds no tensors \(nothing\)"),
    ],
)
def test_what_is_no_state_dict_is_refused_with_what_is_there(saved: object, finding: str, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "w.pt")
    with pytest.raises(ConfigError, match=finding):
        open_source(tmp_path / "w.pt")


@pytest.mark.parametrize("named", ["the file", "its folder"])
def test_a_part_of_deepspeeds_zero_3_is_refused_with_what_joins_it(named: str, tmp_path: Path) -> None:
    file = tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    shapes = [OrderedDict(weight=torch.Size([2, 3]), bias=torch.Size([2]))]
    module = OrderedDict(weight=torch.empty(0), bias=torch.empty(0))
    torch.save({"module": module, "buffer_names": [], "optimizer": None, "param_shapes": shapes}, file)
    with pytest.raises(ConfigError, match=r"DeepSpeed's ZeRO, .* run the zero_to_fp32\.py that DeepSpeed left"):
        open_source(file if named == "the file" else tmp_path)


def test_the_complete_weights_that_deepspeed_has_with_zero_2_are_read(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2).state_dict()
    shapes = [OrderedDict((name, tensor.shape) for name, tensor in module.items())]
    torch.save({"module": module, "param_shapes": shapes}, tmp_path / "mp_rank_00_model_states.pt")
    assert_equal(tensors_of(tmp_path / "mp_rank_00_model_states.pt", tmp_path / "step-0"), module)


def test_links_are_followed_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    state = weights()
    real = write_folder(tmp_path / "blobs", state)
    (tmp_path / "snapshot").mkdir()
    for number, name in enumerate(("config.json", "model.safetensors")):
        (real / name).rename(real / f"{number}abc")
        (tmp_path / "snapshot" / name).symlink_to(real / f"{number}abc")
    assert_equal(imported(tmp_path / "snapshot", tmp_path / "step-0"), state)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "hf", in_their_names(weights()))
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointDamaged, match=r"of the 3 files in .*these are missing: model-00002-of-00003"):
        open_source(path)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "hf", {"a": torch.ones(1), "b": torch.ones(1)}, count=2)
    shutil.copy(path / "model-00001-of-00002.safetensors", path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointDamaged, match="a is in two files"):
        open_source(path)


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "hf", {"a": torch.ones(1)}, count=1)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(CheckpointDamaged, match=r"'\.\./\.\./etc/passwd' is not the name of a file next to it"):
        open_source(path)


def test_the_sizes_of_a_run_must_be_those_of_the_source(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "hf", weights())
    other = dataclasses.replace(ARGS, ffn_dim=96, rope_scaling=RopeScaling(factor=8.0))
    expected = (
        r"another model than this run's: ffn_dim 48 instead of 96, rope_scaling None instead of .*config_path=.*hf$"
    )
    with pytest.raises(ConfigError, match=expected):
        import_llama(path / "model.safetensors", tmp_path / "step-0", expected=other)
    assert not (tmp_path / "step-0").exists()
    done = import_llama(path, tmp_path / "step-0", expected=dataclasses.replace(ARGS, max_seq_len=7, dropout=0.5))
    assert (done.num_tensors, done.notes) == (21, [])


def test_params_that_are_none_are_refused_with_the_folder(tmp_path: Path) -> None:
    path = write_meta(tmp_path / "meta", weights(), 1, embeddings_by_columns=False)
    (path / "params.json").write_text('{"dim": "wide"}')
    with pytest.raises(ConfigError, match=r"meta: params\.json: dim: expected a whole number from 1 on, found 'wide'"):
        import_llama(path, tmp_path / "step-0")


def test_a_rotary_scaling_without_a_factor_is_reported(tmp_path: Path) -> None:
    path = write_meta(tmp_path / "meta", weights(), 1, embeddings_by_columns=False)
    (path / "params.json").write_text(json.dumps(PARAMS | {"use_scaled_rope": True}))
    done = import_llama(path, tmp_path / "step-0")
    assert done.notes[1:] == ["meta states no factor of its rotary scaling: 32 taken"]
