"""The Llama: names, shapes, mathematics."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.models.llama.args import ModelArgs
from torchtitan_lite.models.llama.model import Transformer, num_params, rotary_table, rotate

ARGS = ModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=50, ffn_dim=88, max_seq_len=16)


def build(args: ModelArgs = ARGS, seed: int = 0) -> Transformer:
    with torch.device("meta"):
        model = Transformer(args)
    model.to_empty(device="cpu")
    model.init_weights(seed)
    return model


def tokens(rows: int = 2, length: int = 16) -> Tensor:
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(0))


def test_parameters_have_the_names_of_torchtitan() -> None:
    block = ["attention.wq", "attention.wk", "attention.wv", "attention.wo"]
    block += ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "attention_norm", "ffn_norm"]
    expected = {f"layers.{i}.{name}.weight" for i in range(2) for name in block}
    expected |= {"tok_embeddings.weight", "norm.weight", "output.weight"}
    assert set(build().state_dict()) == expected


def test_tied_embeddings_are_one_parameter_with_the_gradients_of_both() -> None:
    tied, untied = build(dataclasses.replace(ARGS, tie_word_embeddings=True)), build()
    assert set(build().state_dict()) - set(tied.state_dict()) == {"output.weight"}
    assert num_params(untied) - num_params(tied) == 50 * 32
    untied.load_state_dict(dict(tied.state_dict()) | {"output.weight": tied.tok_embeddings.weight})
    for model in (tied, untied):
        F.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten()).backward()
    weight = untied.output.weight
    assert tied.tok_embeddings.weight.grad is not None and untied.tok_embeddings.weight.grad is not None
    torch.testing.assert_close(tied.tok_embeddings.weight.grad, untied.tok_embeddings.weight.grad + weight.grad)
    assert tied.tok_embeddings.weight.std().item() == pytest.approx(32**-0.5, rel=0.1)


def test_logits_are_batch_by_sequence_by_vocabulary() -> None:
    assert build()(tokens()).shape == (2, 16, 50)
    assert build()(tokens(length=5)).shape == (2, 5, 50)


def test_a_token_changes_only_the_logits_from_its_position_on() -> None:
    model, before = build(), tokens()
    after = before.clone()
    after[:, 9] = (after[:, 9] + 1) % 50
    same = (model(before) == model(after)).all(dim=-1)
    assert same[:, :9].all()
    assert not same[:, 9:].any()


def test_the_same_seed_gives_the_same_parameters_and_another_seed_others() -> None:
    first, second, third = build(seed=1).state_dict(), build(seed=1).state_dict(), build(seed=2).state_dict()
    assert all(torch.equal(first[fqn], second[fqn]) for fqn in first)
    assert not any(torch.equal(first[fqn], third[fqn]) for fqn in first if "norm" not in fqn)


def test_initial_parameters_have_the_standard_deviations_of_torchtitan() -> None:
    args = dataclasses.replace(ARGS, dim=128, ffn_dim=352, vocab_size=400)
    state = build(args).state_dict()
    expected = {
        "tok_embeddings.weight": 1.0,
        "output.weight": 128**-0.5,
        "layers.0.attention.wq.weight": 0.02,
        "layers.1.feed_forward.w1.weight": 0.02,
        "layers.0.attention.wo.weight": 0.02 / 2**0.5,
        "layers.1.attention.wo.weight": 0.02 / 4**0.5,
        "layers.1.feed_forward.w2.weight": 0.02 / 4**0.5,
        "layers.1.feed_forward.w3.weight": 0.02 / 4**0.5,
    }
    for fqn, std in expected.items():
        assert state[fqn].std().item() == pytest.approx(std, rel=0.03), fqn
    assert state["output.weight"].abs().max().item() <= 3 * 128**-0.5 * (1 + 1e-6)
    assert all((value == 1).all() for fqn, value in state.items() if "norm" in fqn)


def test_the_rotary_table_is_filled_and_in_no_state_dict() -> None:
    model = build()
    assert "freqs_cis" not in model.state_dict()
    assert torch.equal(model.freqs_cis, rotary_table(8, 16, ARGS.rope_theta))
    assert model.freqs_cis[0].eq(1).all()


def test_rotation_keeps_lengths_and_makes_products_depend_on_distance_only() -> None:
    table = rotary_table(8, 16, 10000.0)
    q, k = (torch.randn(8, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    turned_q, turned_k = (rotate(x.expand(1, 1, 16, 8), table)[0, 0] for x in (q, k))
    assert torch.allclose(turned_q.norm(dim=-1), q.norm().expand(16), atol=1e-5)
    products = turned_q @ turned_k.T
    assert torch.allclose(products.diagonal(-3), products[3, 0].expand(13), atol=1e-4)


def test_grouped_heads_equal_full_heads_with_repeated_weights() -> None:
    grouped = build()
    full = build(dataclasses.replace(ARGS, n_kv_heads=4))
    state = grouped.state_dict()
    for fqn in [name for name in state if name.endswith(("wk.weight", "wv.weight"))]:
        state[fqn] = state[fqn].view(2, 1, 8, 32).expand(2, 2, 8, 32).reshape(32, 32)
    full.load_state_dict(state)
    assert torch.allclose(grouped(tokens()), full(tokens()), atol=1e-6)


def test_a_block_is_the_published_formula() -> None:
    model = build()
    block = model.layers["0"]
    x = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(0))

    def norm(h: Tensor) -> Tensor:
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + ARGS.norm_eps)

    def weight(name: str) -> Tensor:
        return model.get_parameter(f"layers.0.{name}.weight")

    q, k, v = ((norm(x) @ weight(f"attention.{n}").T).view(1, 16, -1, 8).transpose(1, 2) for n in ("wq", "wk", "wv"))
    k, v = (h.repeat_interleave(2, dim=1) for h in (k, v))
    scores = rotate(q, model.freqs_cis) @ rotate(k, model.freqs_cis).transpose(-1, -2) / 8**0.5
    causal = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), float("-inf")).softmax(-1)
    h = x + (causal @ v).transpose(1, 2).reshape(1, 16, 32) @ weight("attention.wo").T
    gate, up = (norm(h) @ weight(f"feed_forward.{n}").T for n in ("w1", "w3"))
    expected = h + (F.silu(gate) * up) @ weight("feed_forward.w2").T
    assert torch.allclose(block(x, model.freqs_cis), expected, atol=1e-5)


def test_dropout_acts_in_training_only() -> None:
    model = build(dataclasses.replace(ARGS, dropout=0.5))
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))
    assert torch.equal(model(tokens()), build()(tokens()))


def test_every_parameter_gets_a_gradient() -> None:
    model = build()
    model(tokens()).float().logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_parameters_are_counted_once_each() -> None:
    assert num_params(build()) == sum(value.numel() for value in build().state_dict().values())
    assert num_params(nn.Linear(3, 4, bias=False)) == 12
