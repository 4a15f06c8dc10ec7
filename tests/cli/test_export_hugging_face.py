"""`export --format hf` and `--format peft`: what transformers and peft load, offline and as it is."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.checkpoint.reading.foreign_folders import save_plain
from tests.checkpoint.small_run import SmallRun
from tests.cli.conftest import Said
from tests.e2e import jobs
from tests.hugging_face import assert_same_function, our_model
from tests.store.filled import flip
from torchtitan_lite.cli.app import main
from torchtitan_lite.data.tokenizer import ByteTokenizer
from torchtitan_lite.models.llama.args import FLAVORS, ModelArgs, RopeScaling
from torchtitan_lite.models.llama.hugging_face import describe
from torchtitan_lite.models.llama.model import Transformer
from torchtitan_lite.store.manifest import seal

COMMAND = "export"
State = dict[str, torch.Tensor]
ARGS = dataclasses.replace(FLAVORS["debugmodel"], vocab_size=258, max_seq_len=64)
SMALL = dataclasses.replace(ARGS, dim=16, ffn_dim=64, n_layers=1, n_heads=2, n_kv_heads=1, max_seq_len=32)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the dump folder of a short run of `train.py`."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    jobs.run(folder, "--training.steps=4", "--lr_scheduler.warmup_steps=1")
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """Return a folder with checkpoints of plain DCP of a small Llama, under our names and under theirs."""
    folder = tmp_path_factory.mktemp("small")
    model = Transformer(SMALL)
    model.init_weights(seed=1)
    state = dict(model.state_dict())
    places = describe(SMALL, {}, 256, 257).places
    save_plain({"model": state, "optimizer": {"x": torch.zeros(2)}}, folder / "ours")
    save_plain({places[name].name: tensor for name, tensor in state.items()}, folder / "theirs")
    (folder / "config.json").write_text(json.dumps({**describe(SMALL, {}, 256, 257).config, "_name_or_path": "/a/b"}))
    return folder, state


def loaded(out: Path) -> State:
    return {n: t for file in out.glob("*.safetensors") for n, t in safetensors.torch.load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_the_model_of_a_run_and_computes_the_same(
    dtype: str, trained: Path, tmp_path: Path, call: Said
) -> None:
    options = ("--dtype", dtype, *(("--max-shard-size", "500KB") if dtype == "bfloat16" else ()))
    code, out, err = call(trained, tmp_path / "llama", "--format", "hf", *options, "--json")
    assert (code, err) == (0, "")
    assert {*json.loads(out)["files"]} == {path.name for path in (tmp_path / "llama").iterdir()}
    assert ("model.safetensors.index.json" in json.loads(out)["files"]) == (dtype == "bfloat16")
    assert json.loads((tmp_path / "llama" / "config.json").read_text())["max_position_embeddings"] == 64
    step = trained / "checkpoint" / "step-4"
    assert_same_function(our_model(step, ARGS, getattr(torch, dtype)), tmp_path / "llama")


@pytest.mark.slow
def test_the_result_says_what_is_there(trained: Path, tmp_path: Path, call: Said) -> None:
    code, out, err = call(trained, tmp_path / "llama", "--format", "hf")
    assert (code, err) == (0, "")
    assert out == (
        f"Exported 39 tensors of {trained}/checkpoint/step-4\n"
        f"to {tmp_path}/llama: 3.1 MiB in 1 file\n"
        "with config.json, tokenizer.json, tokenizer_config.json, generation_config.json, README.md\n"
    )


def test_the_card_has_what_the_checkpoint_knows_and_no_path(trained: Path, tmp_path: Path, call: Said) -> None:
    call(trained, tmp_path / "llama", "--format", "hf", "--dtype", "bfloat16")
    card = (tmp_path / "llama" / "README.md").read_text()
    rows = dict(re.findall(r"^\| (\S.*) \| (.*) \|$", card, re.MULTILINE))
    assert (rows["step"], rows["tokens"], rows["parameters"]) == ("4", "512", "804,480")
    assert rows["dtype"] == "bfloat16, cast from float32"
    assert rows["optimizer"].startswith("AdamW, lr 0.0008, ")
    assert (rows["topology"], rows["dump folder"], rows["sequence length"]) == ("1 process", "run", "64")
    assert {"loss", "grad_norm", "run", "saved with", "exported with"} <= rows.keys()
    assert str(tmp_path.parent) not in card
    assert "license:" not in card


def test_other_tokenizers_and_none(trained: Path, tmp_path: Path, call: Said) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name, content in ByteTokenizer().files().items():
        (folder / name).write_bytes(content)
    assert call(trained, tmp_path / "a", "--format", "hf", "--tokenizer", folder)[0] == 0
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "a" / "config.json").read_text())["eos_token_id"] == 257
    assert call(trained, tmp_path / "b", "--format", "hf", "--no-tokenizer")[0] == 0
    assert "tokenizer.json" not in {path.name for path in (tmp_path / "b").iterdir()}
    assert "AutoTokenizer" not in (tmp_path / "b" / "README.md").read_text()
    code, _, err = call(trained, tmp_path / "c", "--format", "hf", "--tokenizer", tmp_path / "none.json")
    assert (code, err) == (2, f"error: --tokenizer {tmp_path}/none.json: there is no such file or folder\n")
    assert not (tmp_path / "c").exists()


def test_a_tokenizer_that_is_not_that_of_the_run_is_refused_and_noted_if_a_person_names_it(
    small: tuple[Path, State], tmp_path: Path, call: Said
) -> None:
    recorded(tmp_path, small[1], {"model": {"tokenizer_path": "bytes"}, "training": {"seq_len": 8}})
    config = ("--format", "hf", "--config", small[0] / "config.json")
    code, _, err = call(tmp_path / "step-1", tmp_path / "out", *config)
    assert code == 2
    assert "it is not the tokenizer of the run: its fingerprint is bytes, the run's 0123: name that of the run" in err
    code, _, err = call(tmp_path / "step-1", tmp_path / "out", *config, "--tokenizer", "bytes")
    assert code == 0
    assert err.startswith("note: --tokenizer bytes: it is not the tokenizer of the run")


@pytest.mark.parametrize(
    "model",
    [{"flavor": 7}, {"flavor": "9B"}, {"config_path": "/nowhere/config.json"}, {"tokenizer_path": 5, "dropout": "x"}],
)
def test_a_recorded_configuration_that_is_no_model_is_one_sentence(
    model: dict[str, Any], small: tuple[Path, State], tmp_path: Path, call: Said
) -> None:
    recorded(tmp_path, small[1], {"model": model, "training": {"seq_len": 8}, "job": {"description": "\ud800 | x"}})
    code, _, err = call(tmp_path / "step-1", tmp_path / "out", "--format", "hf", "--no-tokenizer")
    assert (code, err.count("\n")) == (2, 1)
    assert f"{tmp_path}/step-1: the recorded configuration is not a model: " in err
    options = ("--format", "hf", "--no-tokenizer", "--config", small[0] / "config.json")
    assert call(tmp_path / "step-1", tmp_path / "out", *options)[0] == 0


def test_a_tokenizer_of_the_run_that_is_gone_is_named(small: tuple[Path, State], tmp_path: Path, call: Said) -> None:
    config = ("--format", "hf", "--config", small[0] / "config.json")
    recorded(tmp_path, small[1], {"model": {"tokenizer_path": "/gone/tokenizer.json"}, "training": {"seq_len": 8}})
    code, _, err = call(tmp_path / "step-1", tmp_path / "out", *config)
    expected = "the tokenizer of the run, /gone/tokenizer.json, is not there: name it with --tokenizer, or export with"
    assert (code, expected in err) == (2, True)
    assert call(tmp_path / "step-1", tmp_path / "out", *config, "--no-tokenizer")[0] == 0


def recorded(folder: Path, state: State, config: dict[str, Any]) -> None:
    """Make `folder`/step-1: a checkpoint of the small Llama with `config`, and a fingerprint of another tokenizer."""
    save_plain({"model": state, "dataloader": {"tokenizer": "0123"}, "optimizer": {"x": 1}}, folder / "plain")
    assert main(["convert", str(folder / "plain"), str(folder / "step-1"), "--layout", "ours"]) == 0
    path = folder / "step-1" / "manifest.json"
    text = path.read_bytes().rpartition(b',\n"digest"')[0]
    path.write_bytes(
        seal(text.replace(b'"extra": {', b'"extra": {"config": ' + json.dumps(config).encode() + b", ", 1))
    )


def test_a_larger_tokenizer_than_the_model_is_refused(trained: Path, tmp_path: Path, call: Said) -> None:
    tokenizer = json.loads(ByteTokenizer().files()["tokenizer.json"])
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 258, "content": "<|more|>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, _, err = call(trained, tmp_path / "out", "--format", "hf", "--tokenizer", tmp_path / "tokenizer.json")
    expected = "error: the tokenizer has 259 tokens, and the model 258: name the run's with --tokenizer\n"
    assert (code, err) == (2, expected)


@pytest.mark.slow
def test_our_names_with_a_config(small: tuple[Path, State], tmp_path: Path, call: Said) -> None:
    folder, _ = small
    code, _, err = call(folder / "ours", tmp_path / "out", "--format", "hf", "--config", folder / "config.json")
    assert code == 0
    assert err.startswith("note: the checkpoint names no tokenizer")
    assert "_name_or_path" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert_same_logits(small[1], tmp_path / "out")


@pytest.mark.slow
def test_the_rotary_scaling_of_llama_3_1(small: tuple[Path, State], tmp_path: Path, call: Said) -> None:
    args = dataclasses.replace(SMALL, rope_theta=100.0, rope_scaling=RopeScaling(factor=4.0, original_length=8))
    (tmp_path / "config.json").write_text(json.dumps(describe(args, {}, 256, 257).config))
    options = ("--format", "hf", "--config", tmp_path, "--no-tokenizer")
    assert call(small[0] / "ours", tmp_path / "out", *options)[0] == 0
    assert_same_logits(small[1], tmp_path / "out", args)


def test_their_names_with_a_config(small: tuple[Path, State], tmp_path: Path, call: Said) -> None:
    folder, state = small
    options = ("--format", "hf", "--config", folder / "config.json", "--names", "same", "--no-tokenizer")
    assert call(folder / "theirs", tmp_path / "out", *options)[0] == 0
    places = describe(SMALL, {}, None, None).places
    found = loaded(tmp_path / "out")
    assert found.keys() == {place.name for place in places.values()}
    assert all(torch.equal(found[places[name].name], tensor) for name, tensor in state.items())  # no rows are moved
    code, _, err = call(folder / "ours", tmp_path / "other", *options)
    assert code == 2
    assert "the model of config.json has model.embed_tokens.weight, " in err
    assert "or --names llama for the names of train.py's model" in err


def test_a_map_of_names_in_a_file(small: tuple[Path, State], tmp_path: Path, call: Said) -> None:
    folder, state = small
    places = describe(SMALL, {}, None, None).places
    save_plain({"model": {f"my.{name}": t for name, t in state.items()} | {"my.extra": torch.ones(1)}}, tmp_path / "c")
    names: dict[str, Any] = {f"my.{name}": place.name for name, place in places.items()} | {"": ["my.extra"]}
    (tmp_path / "map.json").write_text(json.dumps(names))
    options = ("--format", "hf", "--config", folder / "config.json", "--name-map", tmp_path / "map.json")
    assert call(tmp_path / "c", tmp_path / "out", *options, "--no-tokenizer")[0] == 0
    assert loaded(tmp_path / "out").keys() == {place.name for place in places.values()}
    for change, finding in (
        ({"": []}, "the name map has nothing for my.extra"),
        ({"my.other": "x"}, "the name map names my.other, and the model has my.tok_embeddings.weight"),
        ({"my.norm.weight": "lm_head.weight"}, "the same name, lm_head.weight"),
        ({"my.norm.weight": None}, "the name map gives my.norm.weight the name None: expected text"),
        ({"my.norm.weight": 3}, "the name map gives my.norm.weight the name 3: expected text"),
        ({"": "my.extra"}, 'the name map: expected a list of names under ""'),
    ):
        (tmp_path / "map.json").write_text(json.dumps({**names, **change}))
        code, _, err = call(tmp_path / "c", tmp_path / "other", *options)
        assert (code, finding in err) == (2, True), err
    assert not (tmp_path / "other").exists()


def test_a_map_of_names_as_a_function(
    small: tuple[Path, State], tmp_path: Path, call: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, state = small
    save_plain({"model": {f"a.{name}": t for name, t in state.items()} | {"extra": torch.ones(1)}}, tmp_path / "c")
    (tmp_path / "names_of_mine.py").write_text("def new(name):\n    return None if name == 'extra' else 'b.' + name\n")
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    monkeypatch.chdir(tmp_path)
    options = ("--format", "hf", "--config", "config.json", "--name-map", "names_of_mine:new", "--no-tokenizer")
    assert call("c", "out", *options)[0] == 0
    assert loaded(tmp_path / "out").keys() == {f"b.a.{name}" for name in state}


@pytest.mark.parametrize(
    ("options", "finding"),
    [
        ((), "{folder}/ours does not say which model is in it: give --config CONFIG_JSON, and --names same or --name"),
        (("--names", "same"), "--names and --name-map say nothing of the model itself: give its --config CONFIG_JSON"),
        (("--config", "{folder}/none.json"), "--config {folder}/none.json cannot be read: "),
        (("--config", "{folder}/wide.json"), "layers.0.feed_forward.w1.weight has shape [64, 16], expected [65, 16]"),
        (("--config", "{folder}/deep.json"), "missing layers.1.attention.wq.weight, "),
        (("--config", "{folder}/other.json"), "model_type: expected llama, or mistral without a window, found 'gpt2'"),
        (("--names", "same", "--name-map", "x.json"), "--names same and --name-map: expected only one of them"),
        (("--tokenizer", "x", "--no-tokenizer"), "--tokenizer and --no-tokenizer: expected only one of them"),
        (("--exclude", "*.bias"), "--exclude is for --format safetensors and torch and dcp"),
        (("--adapter", "mine"), "--adapter is for --format peft"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_refused_by_name(
    options: tuple[str, ...], finding: str, small: tuple[Path, State], tmp_path: Path, call: Said
) -> None:
    folder, _ = small
    config = json.loads((folder / "config.json").read_text())
    for name, change in (
        ("wide", {"intermediate_size": 65}),
        ("deep", {"num_hidden_layers": 2}),
        ("other", {"model_type": "gpt2"}),
    ):
        (folder / f"{name}.json").write_text(json.dumps({**config, **change}))
    given = [each.format(folder=folder) for each in options]
    code, out, err = call(folder / "ours", tmp_path / "out", "--format", "hf", *given)
    assert (code, out) == (2, "")
    assert finding.format(folder=folder) in err
    assert [*tmp_path.iterdir()] == []


def test_an_own_loop_without_a_config_is_refused_by_name(tmp_path: Path, call: Said) -> None:
    SmallRun(tmp_path / "run").loaded().finished(1)
    code, _, err = call(tmp_path / "run", tmp_path / "out", "--format", "hf")
    assert code == 2
    assert (
        "does not have the weights of the model of the recorded configuration: missing tok_embeddings.weight, " in err
    )
    assert "for a model of your own loop give --config CONFIG_JSON, and --names same or --name-map" in err


def test_damage_is_found_and_nothing_remains(trained: Path, tmp_path: Path, call: Said) -> None:
    shutil.copytree(trained / "checkpoint" / "step-4", tmp_path / "c")
    flip(next((tmp_path / "c").glob("*.distcp")), 700_000)
    code, out, err = call(tmp_path / "c", tmp_path / "out", "--format", "hf")
    assert (code, out) == (3, "")
    assert err.startswith(f"error: {tmp_path}/c is damaged: bytes ")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_without_a_cast_no_torch_is_imported(trained: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from torchtitan_lite.cli.app import main\n"
        "code = main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script, "export", str(trained), str(tmp_path / "out"), "--format", "hf"]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0


def assert_same_logits(state: State, out: Path, args: ModelArgs = SMALL) -> None:
    from transformers import AutoModelForCausalLM

    model = Transformer(args)
    model.init_weights(seed=0)
    model.load_state_dict(state)
    tokens = torch.randint(0, SMALL.vocab_size, (2, 32))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(out)(tokens).logits
        assert (model(tokens) - theirs).abs().max() < 1e-5
