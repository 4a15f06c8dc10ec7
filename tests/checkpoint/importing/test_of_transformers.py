"""Models that transformers made from a configuration and saved: imported with the same logits, or refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.cli.command import command
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.resume.evaluation import load_model
from torchtitan_lite.config.job_config import Model
from torchtitan_lite.models.llama.config_file import build_model_args
from torchtitan_lite.models.llama.model import Transformer

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SIZES = {
    **{"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 16,
}
TOKENS = torch.arange(96).reshape(2, 48) % 300


def made(kind: str, folder: Path, *, shards: str = "5GB", dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """Make a model of `kind`, "Llama" or "Qwen2" ..., save it to `folder` and return it."""
    import transformers

    torch.manual_seed(3)
    sizes = {} if kind == "GPT2" else SIZES
    configuration = getattr(transformers, f"{kind}Config")(**{**sizes, **config})
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{kind}{head}")(configuration).to(dtype).eval()
    model.save_pretrained(folder, max_shard_size=shards)
    return model


def logits(folder: Path, out: Path) -> torch.Tensor:
    """Return what our model computes with the imported weights `out` of `folder`."""
    args = build_model_args(Model(config_path=str(folder)), vocab_size=258, seq_len=48)
    model = Transformer(args)
    model.init_weights(0)
    load_model(model, out)
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS)
    return found


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"kind": "Mistral", "sliding_window": None},
        {"rope_parameters": LLAMA3},
        {"tie_word_embeddings": True},
        {"shards": "60KB"},
        {"dtype": torch.bfloat16},
        {
            "rms_norm_eps": 1e-3,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
        },
    ],
    ids=["plain", "mistral", "llama3 rope", "tied", "shards", "bfloat16", "other settings"],
)
@pytest.mark.slow
def test_a_llama_has_the_same_logits(config: dict[str, Any], tmp_path: Path) -> None:
    theirs = made(folder=tmp_path / "hf", **{"kind": "Llama"} | config).float()
    ended = command("import-weights", tmp_path / "hf", tmp_path / "step-0")
    assert (ended.code, ended.err) == (0, "")
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    assert torch.allclose(logits(tmp_path / "hf", tmp_path / "step-0"), expected, rtol=0, atol=1e-5)


def test_a_tied_llama_is_exported_as_one_tensor_that_transformers_ties(tmp_path: Path) -> None:
    import transformers

    theirs = made("Llama", tmp_path / "hf", tie_word_embeddings=True)
    assert command("import-weights", tmp_path / "hf", tmp_path / "step-0").code == 0
    assert command("export", tmp_path / "step-0", tmp_path / "out", "--format", "hf").code == 0
    before, after = (safetensors.torch.load_file(tmp_path / name / "model.safetensors") for name in ("hf", "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.tie_word_embeddings and again.lm_head.weight is again.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, theirs(TOKENS).logits)


@pytest.mark.parametrize("is_one", [True, False])
def test_two_tensors_of_a_checkpoint_are_exported_as_tied_only_if_they_are_equal(is_one: bool, tmp_path: Path) -> None:
    made("Llama", tmp_path / "hf")
    with torch.device("meta"):
        args = build_model_args(Model(config_path=str(tmp_path / "hf")), vocab_size=258, seq_len=48)
        model = Transformer(args)
    model.to_empty(device="cpu").init_weights(3)
    if is_one:
        model.output.weight = model.tok_embeddings.weight
    with CheckpointManager.for_loop(model=model, folder=tmp_path / "run", preemption_signals=()) as manager:
        manager.load()
        manager.save(1, force=True)
    config = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ("--format", "hf", "--config", tmp_path / "config.json", "--no-tokenizer")
    ended = command("export", tmp_path / "run", tmp_path / "out", *given)
    if not is_one:
        assert ended.code == 2 and "unexpected output.weight" in ended.err
        return
    assert ended.code == 0, ended.err
    assert "lm_head.weight" not in safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        ("Qwen2", {}, "found 'qwen2'"),
        ("Qwen3", {"head_dim": 16}, "found 'qwen3'"),
        (
            "Mixtral",
            {"num_local_experts": 2},
            "found 'mixtral'",
        ),
        (
            "GPT2",
            {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 300},
            "found 'gpt2'",
        ),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "of type 'linear'"),
        ("Mistral", {"sliding_window": 64}, "the Llama of this package has no sliding_window"),
        ("Llama", {"attention_bias": True}, "the Llama of this package has no attention_bias"),
        ("Llama", {"head_dim": 32}, "the Llama of this package has no head_dim 32"),
    ],
)
def test_what_is_not_our_llama_is_refused_by_name(
    kind: str, config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    made(kind, tmp_path / "hf", **config)
    ended = command("import-weights", tmp_path / "hf", tmp_path / "step-0")
    assert (ended.code, ended.out) == (2, "")
    assert reason in ended.err
    assert "a training loop of your own can take it with --names same" in ended.err
    assert not (tmp_path / "step-0").exists()


@pytest.mark.parametrize("kind", ["GPT2", "Qwen2"])
def test_another_model_starts_in_a_loop_of_its_own(kind: str, tmp_path: Path) -> None:
    config = {
        "GPT2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 300},
        "Qwen2": {"tie_word_embeddings": True},
    }
    theirs = made(kind, tmp_path / "hf", **config[kind])
    ended = command("import-weights", tmp_path / "hf", tmp_path / "start", "--names", "same")
    assert (ended.code, ended.err) == (0, "")
    assert "Note: tied embeddings: lm_head.weight is a copy of " in ended.out
    model = type(theirs)(theirs.config).eval()
    start = str(tmp_path / "start")
    with CheckpointManager.for_loop(
        model=model, folder=tmp_path / "run", initial_load_path=start, preemption_signals=()
    ) as manager:
        assert manager.load()
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, theirs(TOKENS).logits)
    assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21 reads it
def test_an_adapter_is_refused_with_the_call_that_trains_it_on(tmp_path: Path) -> None:
    import peft
    import transformers

    made("Llama", tmp_path / "hf")

    def base() -> Any:
        return transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")

    theirs = peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    theirs.save_pretrained(tmp_path / "adapter")
    call = f"PeftModel.from_pretrained(base, '{tmp_path / 'adapter'}', is_trainable=True)"
    for source in (tmp_path / "adapter", tmp_path / "adapter" / "adapter_model.safetensors"):
        ended = command("import-weights", source, tmp_path / "start", "--names", "same")
        assert ended.code == 2 and call in ended.err
    for start in range(2):
        model = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter", is_trainable=True).eval()
        if not start:
            expected = theirs.eval()(TOKENS).logits
            assert torch.equal(model(TOKENS).logits, expected)
        trained = [each for each in model.parameters() if each.requires_grad]
        with CheckpointManager.for_loop(
            model=model, folder=tmp_path / "run", save_trained_only=True, preemption_signals=()
        ) as manager:
            assert manager.load() is bool(start)
            if not start:
                with torch.no_grad():
                    trained[0].fill_(3.0)
                manager.save(1, force=True)
        assert (trained[0] == 3.0).all()


def test_a_gpt2_without_its_prefix_as_it_was_published_starts_by_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    theirs = made("GPT2", tmp_path / "hf", n_embd=16, n_layer=1, n_head=2, vocab_size=300)
    state = {name: tensor.contiguous() for name, tensor in theirs.transformer.state_dict().items()}
    state |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    safetensors.torch.save_file(state, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "of_gpt2.py").write_text("def prefixed(name):\n    return f'transformer.{name}'\n")
    monkeypatch.chdir(tmp_path)
    ended = command("import-weights", "hf", "start", "--name-map", "of_gpt2:prefixed")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[2:4] == [
        "Note: left out, because the model computes it: h.0.attn.masked_bias, h.0.attn.bias",
        "Note: tied embeddings: lm_head.weight is a copy of transformer.wte.weight",
    ]
    model = transformers.GPT2LMHeadModel(theirs.config).eval()
    load_model(model, tmp_path / "start")
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, theirs(TOKENS).logits)
