"""Llama 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Parameters have torchtitan's FQNs, whatever wraps the blocks. The rotary table is a buffer that is in no state dict. A
model is built on the meta device, materialised with `to_empty`, and filled by `init_weights`. Only that and the load of
a checkpoint set the values of parameters and buffers.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.models.init import Normal, init_parameters
from torchtitan_lite.models.llama.args import ModelArgs, RopeScaling


class Transformer(nn.Module):
    """Llama 3: tokens [batch, seq] to logits [batch, seq, vocab]."""

    freqs_cis: Tensor

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(args) for i in range(args.n_layers)})
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        tied = args.tie_word_embeddings
        self.output = TiedOutput() if tied else nn.Linear(args.dim, args.vocab_size, bias=False)
        table = torch.empty(args.max_seq_len, args.head_dim // 2, dtype=torch.complex64)
        self.register_buffer("freqs_cis", table, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits for the token after each of `tokens`, in the compute dtype."""
        h = self.tok_embeddings(tokens)
        for block in self.layers.values():
            h = block(h, self.freqs_cis)
        # Read here, where FSDP and tensor parallelism have the embedding as the other parameters of this forward.
        tied = (self.tok_embeddings.weight,) if self.args.tie_word_embeddings else ()
        logits: Tensor = self.output(self.norm(h), *tied)
        return logits

    def init_weights(self, seed: int, buffer_device: torch.device | None = None) -> None:
        """Set the parameters from `seed`, the same on every topology, and compute the rotary table.

        **Any rank**, no communication. Give `buffer_device` if parameters are offloaded: the table must be on the
        device that computes.
        """
        init_parameters(self, seed, self._initial)
        args = self.args
        table = rotary_table(args.head_dim, args.max_seq_len, args.rope_theta, args.rope_scaling)
        self.freqs_cis = table.to(buffer_device or self.freqs_cis.device)

    def _initial(self, fqn: str) -> Normal:
        """Return torchtitan's distribution for this parameter of Llama 3."""
        path = fqn.split(".")
        name = path[-2]
        if name.endswith("norm"):
            return Normal(std=0.0, mean=1.0)
        if name == "tok_embeddings" and not self.args.tie_word_embeddings:
            return Normal(std=1.0)
        if name in ("output", "tok_embeddings"):
            return Normal(std=self.args.dim**-0.5, cutoff=3.0)
        if name in ("wo", "w2", "w3"):
            return Normal(std=0.02 / (2 * (int(path[1]) + 1)) ** 0.5)  # By the depth of the block.
        return Normal(std=0.02)


class TiedOutput(nn.Module):
    """The output projection of tied embeddings: the embedding is its weight, and it has no parameter of its own."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return [batch, seq, vocab] for `x` [batch, seq, dim] and `weight` [vocab, dim]."""
        return F.linear(x, weight)


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each with a norm before it, dropout after it and a residual connection."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention = Attention(args)
        self.feed_forward = FeedForward(args)
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, [batch, seq, dim]."""
        h = x + self.dropout(self.attention(self.attention_norm(x), freqs_cis))
        out: Tensor = h + self.dropout(self.feed_forward(self.ffn_norm(h)))
        return out


class Attention(nn.Module):
    """Causal attention in which groups of query heads share a head of keys and values."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.group_size = args.n_heads // args.n_kv_heads
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, [batch, seq, dim]."""
        q, k, v = (self._heads(project(x)) for project in (self.wq, self.wk, self.wv))
        q, k = rotate(q, freqs_cis), rotate(k, freqs_cis)
        # Repeat heads here: the fast kernels of enable_gqa differ between devices and versions of torch.
        k, v = (h.repeat_interleave(self.group_size, dim=1) for h in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """Return [batch, seq, heads * head_dim] as [batch, heads, seq, head_dim]; `heads` are this rank's heads."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """The feed-forward network of a block, SwiGLU."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_dim, bias=False)
        self.w2 = nn.Linear(args.ffn_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, [batch, seq, dim]."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


def rotary_table(head_dim: int, length: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Return complex numbers of length 1, [length, head_dim / 2], on the CPU so that every device gets the same bits.

    They are complex also because FSDP's mixed precision casts real inputs of a block, and bfloat16 is too coarse for
    positions.
    """
    with torch.device("cpu"):
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        if scaling is not None:
            frequencies = _stretched(frequencies, scaling)
        angles = torch.outer(torch.arange(length).float(), frequencies)
        return torch.polar(torch.ones_like(angles), angles)


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return `frequencies` with the low ones divided by the factor, the high ones kept, and a ramp between them."""
    turns = frequencies * (scaling.original_length / (2 * math.pi))  # In the original length.
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def rotate(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Return `x` [batch, heads, seq, head_dim], each pair of neighbours rotated by its position's angle in float32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    rotated = torch.view_as_real(pairs * freqs_cis[: x.shape[2]])
    return rotated.flatten(-2).type_as(x)


def num_params(model: nn.Module) -> int:
    """Return the number of elements of all parameters, over all ranks."""
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_token(args: ModelArgs, num_params: int, seq_len: int) -> int:
    """Return the floating-point operations of forward and backward for one token, without recomputation.

    They are 6 for each parameter that multiplies (all but an embedding that is not tied), and 12 for each element of
    attention's two products, causal or not (PaLM, appendix B).
    """
    embedding = 0 if args.tie_word_embeddings else args.vocab_size * args.dim
    return 6 * (num_params - embedding) + 12 * args.n_layers * args.dim * seq_len
