"""The digest of a tensor does not depend on its sharding, and depends on everything else."""

import itertools
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchtitan_lite.checkpoint.format import tensor_digest
from torchtitan_lite.checkpoint.format.tensor_digest import BLOCK_WORDS, TensorDigest, digest_chunk, finish

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128,
]  # fmt: skip
MOD = 1 << 64


def whole(tensor: torch.Tensor) -> TensorDigest:
    return digest_chunk(tensor, global_shape=tensor.shape, offsets=[0] * tensor.dim())


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor of any bits, NaN payloads included; a bool is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def split_mix(seed: int, position: int) -> int:
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) % MOD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MOD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MOD
    return z ^ (z >> 31)


def by_definition(tensor: torch.Tensor) -> TensorDigest:
    """Compute the digest as the module's docstring defines it, in plain integers."""
    table_seeds = (0x243F6A8885A308D3, 0x13198A2E03707344)
    multiplier_seeds = (0xA4093822299F31D0, 0x082EFA98EC4E6C89)
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4)]
    lanes = [
        sum(
            word * (split_mix(table_seeds[lane], i % 8192) | 1) * (split_mix(multiplier_seeds[lane], i // 8192) | 1)
            for i, word in enumerate(words)
        )
        for lane in (0, 1)
    ]
    return TensorDigest(lanes[0] % MOD, lanes[1] % MOD)


def sum_over_boxes(tensor: torch.Tensor, cuts: list[list[int]], *, copy: bool) -> TensorDigest:
    """Return the sum over the grid of boxes between these cuts of each dim; a repeated cut makes empty boxes."""
    total = TensorDigest()
    for box in itertools.product(*[list(itertools.pairwise(dim_cuts)) for dim_cuts in cuts]):
        local = tensor[tuple(slice(begin, end) for begin, end in box)]
        local = local.clone(memory_format=torch.contiguous_format) if copy else local
        total += digest_chunk(local, global_shape=tensor.shape, offsets=[begin for begin, _ in box])
    return total


@st.composite
def sharded(draw: st.DrawFn) -> tuple[torch.Tensor, list[list[int]]]:
    shape: tuple[int, ...] = ()
    for _ in range(draw(st.integers(0, 4))):
        most = max(1, 40_000 // max(1, math.prod(shape)))
        shape += (min(most, draw(st.integers(0, 7) | st.integers(1, 300) | st.integers(1, 40_000))),)
    cuts = [sorted([0, size, *draw(st.lists(st.integers(0, size), max_size=3))]) for size in shape]
    return random_tensor(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))), cuts


@settings(max_examples=examples(150), deadline=None)
@given(sharded(), st.booleans())
def test_the_chunks_of_any_grid_of_shards_add_up_to_the_whole_tensor(case: tuple, copy: bool) -> None:
    tensor, cuts = case
    assert sum_over_boxes(tensor, cuts, copy=copy) == whole(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ((1003, 129), [[0, 334, 668, 1002, 1003, 1003], [0, 129]]),  # FSDP, uneven, an empty rank
        ((300, 192), [[0, 300], [0, 64, 128, 192]]),  # TP by columns, borders at whole words
        ((300, 193), [[0, 300], [0, 49, 98, 147, 193]]),  # the same, borders within words
        ((64, 3000), [[0, 17, 34, 51, 64], [0, 1500, 3000]]),  # FSDP x TP, runs that cross blocks
        ((3, 30_001), [[0, 3], [0, 29_000, 30_001]]),  # runs longer than a block
        ((5, 6, 7, 8), [[0, 2, 5], [0, 6], [0, 3, 7], [0, 8]]),  # experts: cut at dims 0 and 2
        ((9000, 3), [[0, 9000], [0, 1, 2, 3]]),  # runs of one element
        ((), []),
        ((0, 4), [[0, 0], [0, 2, 4]]),
    ],
)
def test_typical_shardings_add_up_in_every_dtype(shape: tuple[int, ...], cuts: list, dtype: torch.dtype) -> None:
    tensor = random_tensor(shape, dtype)
    assert sum_over_boxes(tensor, cuts, copy=False) == sum_over_boxes(tensor, cuts, copy=True) == whole(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_digest_is_what_the_definition_says(dtype: torch.dtype) -> None:
    tensor = random_tensor((2 * BLOCK_WORDS * 4 // dtype.itemsize + 37,), dtype)
    assert whole(tensor) == by_definition(tensor)


@pytest.mark.parametrize(
    ("tensor", "sums", "finished"),
    [
        (torch.tensor(1.0), "d3d69e5896800000dbecb1bbcf800000", "bdc5cc7448630ff14d32401ed3d6fb16"),
        (
            torch.arange(10, dtype=torch.bfloat16).reshape(2, 5),
            "4dbd15c47dd597c013147897b2d9ecc0",
            "bf29febdad8e9e7a6ad31c263d888aa1",
        ),
        (
            torch.arange(100_000, dtype=torch.int64),
            "cd28df8be74a25f60bafbeaf38f3cdd6",
            "00e2e6011574bdb644189f8b85e7dfa3",
        ),
        (torch.zeros(8, 4), "00000000000000000000000000000000", "5ecc4e51fa6401c1a41e7fddd9c111fa"),
    ],
    ids=["scalar", "bfloat16", "int64", "zeros"],
)
def test_digests_in_old_manifests_stay_valid(tensor: torch.Tensor, sums: str, finished: str) -> None:
    digest = whole(tensor)
    assert (digest.to_hex(), finish(digest, tensor.dtype, tensor.shape).to_hex()) == (sums, finished)


@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 2**32), st.integers(0, 7))
def test_a_flipped_bit_anywhere_changes_the_digest(dtype: torch.dtype, where: int, bit: int) -> None:
    tensor = random_tensor((211, 100), dtype)
    changed = tensor.clone()
    raw = changed.view(-1).view(torch.uint8)
    raw[where % raw.numel()] ^= 1 << bit
    assert whole(changed) != whole(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_negating_any_two_elements_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 41).to(dtype)
    seen = {whole(tensor)}
    for pair in itertools.combinations(range(40), 2):
        changed = tensor.clone()
        changed[list(pair)] *= -1
        seen.add(whole(changed))
    assert len(seen) == 1 + 40 * 39 // 2


@given(st.integers(0, 99), st.integers(0, 99))
def test_swapping_two_different_rows_changes_the_digest(first: int, second: int) -> None:
    tensor = random_tensor((100, 700), torch.bfloat16)
    swapped = tensor.clone()
    swapped[[first, second]] = tensor[[second, first]]
    assert (whole(swapped) != whole(tensor)) == (first != second)


def test_no_two_coefficients_of_a_block_agree_modulo_2_to_33_in_both_lanes() -> None:
    low = tensor_digest._tables()[:, :BLOCK_WORDS] % np.uint64(1 << 33)
    assert len(set(zip(*low.tolist(), strict=True))) == BLOCK_WORDS


def test_zero_and_minus_zero_differ() -> None:
    assert whole(torch.tensor([0.0])) != whole(torch.tensor([-0.0]))


def test_nans_with_other_payloads_differ() -> None:
    nans = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert len({whole(nan) for nan in nans}) == 3


def test_zeros_of_another_shape_or_dtype_have_another_digest() -> None:
    kinds = [(torch.float32, (8, 4)), (torch.float32, (4, 8)), (torch.int32, (8, 4)), (torch.float32, (32,))]
    digests = {finish(whole(torch.zeros(shape, dtype=dtype)), dtype, shape) for dtype, shape in kinds}
    assert len(digests) == len(kinds)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.T.contiguous().T,
        lambda t: torch.stack([t, t], dim=-1)[..., 0],
        lambda t: torch.cat([t, t], dim=1)[:, : t.shape[1]],
        lambda t: torch.cat([t[:1, :1].view(-1), t.reshape(-1)])[1:].view(t.shape),
        lambda t: t.clone().requires_grad_(),
    ],
    ids=["transposed", "strided", "narrowed", "unaligned", "requires grad"],
)
def test_the_layout_in_memory_does_not_matter(view, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(tensor_digest, "_COPY_BYTES", 5000)
    tensor = random_tensor((130, 257), torch.bfloat16)
    assert whole(view(tensor)) == whole(tensor)


def test_a_lazy_conjugate_is_digested_by_its_values() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert whole(tensor.conj()) == whole(tensor.conj().resolve_conj()) != whole(tensor)


def test_an_expanded_tensor_is_digested_by_its_values() -> None:
    assert whole(torch.ones(1, 5).expand(300, 5)) == whole(torch.ones(300, 5))


def test_rows_that_are_digested_in_parts_have_the_same_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random_tensor((1000, 64), torch.float32)
    expected = whole(tensor)
    monkeypatch.setattr(tensor_digest, "_MOST_ROWS", 128)
    monkeypatch.setattr(tensor_digest, "_SCRATCH_WORDS", 100)
    assert sum_over_boxes(tensor, [[0, 1000], [0, 13, 64]], copy=True) == expected


def test_the_input_is_not_changed() -> None:
    tensor = random_tensor((300, 193), torch.int16)
    before = tensor.clone()
    sum_over_boxes(tensor, [[0, 300], [0, 49, 193]], copy=False)
    assert torch.equal(tensor, before)


def test_many_threads_digest_at_once() -> None:
    tensors = [random_tensor((400, 301), torch.float32, seed) for seed in range(16)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(whole, tensors)) == [whole(tensor) for tensor in tensors]


def test_a_tensor_without_elements_digests_to_zero() -> None:
    assert whole(torch.empty(0, 5)) == TensorDigest()


@given(st.integers(0, MOD - 1), st.integers(0, MOD - 1))
def test_a_digest_is_32_digits_and_survives_pickle(lane0: int, lane1: int) -> None:
    digest = TensorDigest(lane0, lane1)
    assert pickle.loads(pickle.dumps(digest)) == digest
    text = digest.to_hex()
    assert len(text) == 32 and (int(text[:16], 16), int(text[16:], 16)) == (lane0, lane1)


@pytest.mark.parametrize(
    ("sizes", "shape", "offsets"), [((2,), (3,), (2,)), ((2,), (3,), (-1,)), ((2,), (3, 1), (0, 0)), ((2,), (3,), ())]
)
def test_a_chunk_outside_its_tensor_is_refused(sizes: tuple, shape: tuple, offsets: tuple) -> None:
    with pytest.raises(ValueError, match="is not inside a tensor of"):
        digest_chunk(torch.zeros(sizes), global_shape=shape, offsets=offsets)
