"""`export --format peft`: the files that peft itself would have written, from a checkpoint of a training loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import tests.hugging_face  # noqa: F401  # offline
from tests.checkpoint.reading.foreign_folders import save_plain
from tests.cli.conftest import Said
from torchtitan_lite.checkpoint import CheckpointManager

LAYERS = ["q_proj", "v_proj"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft 0.21 reads it
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),
]


@pytest.fixture
def call(said: Said) -> Said:
    """Return a function that runs `export --format peft` with arguments, and returns its exit code and output."""
    return lambda *arguments: said("export", *arguments, "--format", "peft")


def base() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, attention_bias=True, **sizes))


def with_adapter(kind: str = "LoraConfig", **settings: Any) -> Any:
    """Return a model of peft whose trained parameters are random."""
    import peft

    model = peft.get_peft_model(base(), getattr(peft, kind)(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter))
    return model


def saved_by_peft(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    return tensors


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.slow
@pytest.mark.parametrize("trained_only", [True, False])
def test_the_adapter_of_a_loop_is_loaded_by_peft(trained_only: bool, tmp_path: Path, call: Said) -> None:
    from peft import PeftModel

    model = with_adapter(r=4, target_modules=LAYERS, modules_to_save=["lm_head"])
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    root = tmp_path / "run" / "checkpoint"
    with CheckpointManager.for_loop(
        model=model, optimizer=optimizer, folder=str(root), interval=1, save_trained_only=trained_only
    ) as manager:
        manager.load()
        manager.save(1)
    expected = saved_by_peft(model, tmp_path / "peft")
    code, out, err = call(root, tmp_path / "adapter", "--config", tmp_path / "peft", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["tensors"] == len(expected)
    assert_equal(safetensors.torch.load_file(tmp_path / "adapter" / "adapter_model.safetensors"), expected)
    tokens = torch.arange(8)[None]
    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)
    assert "| method | LORA |" in (tmp_path / "adapter" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LoraConfig", {"r": 4, "target_modules": LAYERS, "bias": "all"}),
        ("LoraConfig", {"r": 4, "target_modules": LAYERS, "bias": "lora_only"}),
        ("LoraConfig", {"r": 4, "target_modules": LAYERS, "use_dora": True}),
        ("LoraConfig", {"r": 4, "target_modules": LAYERS, "trainable_token_indices": [1, 2]}),
        ("LoHaConfig", {"r": 4, "target_modules": LAYERS}),
        ("LoKrConfig", {"r": 4, "target_modules": LAYERS}),
        ("IA3Config", {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
        ("OFTConfig", {"oft_block_size": 4, "target_modules": LAYERS}),
        ("HRAConfig", {"r": 2, "target_modules": LAYERS}),
        ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
        ("FourierFTConfig", {"n_frequency": 4, "target_modules": LAYERS}),
    ],
)
def test_other_methods_have_the_files_of_peft(kind: str, settings: dict[str, Any], tmp_path: Path, call: Said) -> None:
    model = with_adapter(kind, **settings)
    expected = saved_by_peft(model, tmp_path / "peft")
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    for name, state in (("full", model.state_dict()), ("trained", trained)):
        save_plain({"model": state, "optimizer": {"x": torch.zeros(2)}}, tmp_path / name)
        assert call(tmp_path / name, tmp_path / f"{name}-adapter", "--config", tmp_path / "peft")[0] == 0
        found = safetensors.torch.load_file(tmp_path / f"{name}-adapter" / "adapter_model.safetensors")
        assert_equal(found, expected)


def test_a_trained_tensor_that_peft_has_no_place_for_is_named(tmp_path: Path, call: Said) -> None:
    model = with_adapter(r=4, target_modules=LAYERS)
    model.base_model.model.model.norm.weight.requires_grad_(True)
    model.peft_config["default"].save_pretrained(tmp_path)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    with CheckpointManager.for_loop(
        model=model, optimizer=optimizer, folder=str(tmp_path / "run"), interval=1, save_trained_only=True
    ) as manager:
        manager.load()
        manager.save(1)
    code, _, err = call(tmp_path / "run", tmp_path / "adapter", "--config", tmp_path / "adapter_config.json")
    assert code == 0
    expected = "note: left out, because trained but not part of the adapter: base_model.model.model.norm.weight\n"
    assert err == expected


def test_what_is_no_adapter_or_another_one_is_refused_by_name(tmp_path: Path, call: Said) -> None:
    tensors = {"base_model.model.q.lora_A.mine.weight": torch.ones(4, 2), "base_model.model.q.weight": torch.ones(2, 2)}
    save_plain(dict(tensors), tmp_path / "c")
    save_plain({"q.lora_A.default.weight": torch.ones(4, 2)}, tmp_path / "bare")
    lora = {"peft_type": "LORA", "r": 4}
    for source, config, options, finding in (
        ("c", None, (), "--format peft needs --config: the adapter_config.json that LoraConfig.save_pretrained writes"),
        (
            "c",
            lora,
            (),
            "c has no tensor of the adapter 'default': name another one of its adapters with --adapter",
        ),
        (
            "c",
            {**lora, "r": 8},
            ("--adapter", "mine"),
            "r is 8, and base_model.model.q.lora_A.mine.weight has shape [4, 2]",
        ),
        ("c", {"peft_type": "PREFIX_TUNING"}, (), "peft_type: expected one of LORA, "),
        ("c", [], (), "expected an object, as in adapter_config.json"),
        (
            "bare",
            lora,
            (),
            "q.lora_A.default.weight: expected a name that begins with base_model.: give the manager the model",
        ),
    ):
        given = []
        if config is not None:
            (tmp_path / "adapter_config.json").write_text(json.dumps(config))
            given = ["--config", str(tmp_path / "adapter_config.json")]
        code, _, err = call(tmp_path / source, tmp_path / "out", *given, *options)
        assert (code, finding in err) == (2, True), err
        assert not (tmp_path / "out").exists()
    assert call(tmp_path / "c", tmp_path / "out", *given, "--adapter", "mine")[0] == 0
