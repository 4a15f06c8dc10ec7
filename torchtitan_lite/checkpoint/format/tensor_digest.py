"""A digest of a logical tensor that is the same for every way of sharding it.

Every rank digests its own chunks; the sum of the chunks' digests is the digest of the whole tensor,
so no tensor is gathered, and a checkpoint saved on one topology is checked on any other. The
definition below is part of the manifest's format and never changes; `finish` returns what is stored.

Definition. Lay the whole tensor out in row-major order, each element as it lies in memory on a
little-endian machine (complex: real part first), and read these bytes as unsigned 32-bit
little-endian words w(0), w(1) ..., the last one filled up with zero bytes. Lane l (0 or 1) is

    sum over i of  w(i) * table_l[i mod 8192] * multiplier_l[i div 8192]   modulo 2^64

where table_l[n] and multiplier_l[n] are output n (from 0) of SplitMix64 with the lane's two seeds
(`_SEEDS`), lowest bit set. A byte adds byte * 256^(offset mod 4) * coefficient(offset div 4)
whatever its neighbours are: that is why chunks may be cut anywhere.

What it finds. It always finds a change within one word (so of any one element of at most 4 bytes):
the difference is below 2^32 and the coefficient is odd. It always finds a swap of two different words
of one block: no two coefficients of a block agree modulo 2^33 in both lanes (a test compares all of
them). Words have 32 bits, not 64, because the top bit of a 64-bit word would add 2^63 under every odd
coefficient: negating two float64 would cancel. Any other fixed change escapes with a probability,
over the coefficients, of about 2^-126 if some word changed by an odd amount, of 2^-64 at worst
within one block, and of 2^-54 for the worst pattern known over several (sign bits in the same two
places of two blocks). It guards against accidents, not against forgers: it is linear. Zero bytes
add nothing: `finish` mixes in the shape, which says how many there are. The planner ensures that the
chunks cover the tensor exactly once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from torchtitan_lite.checkpoint.format.chunk_runs import is_inside
from torchtitan_lite.checkpoint.format.file_data import row_major_pieces

BLOCK_WORDS = 8192
"""Part of the definition. At this size both tables stay in the second-level cache, and each numpy call pays off."""
_WORD_BYTES = 4
_BLOCK_BYTES = BLOCK_WORDS * _WORD_BYTES
_SCRATCH_WORDS = 4 * BLOCK_WORDS
"""How many words are widened at a time: few enough for the second-level cache."""
_COPY_BYTES = 8 << 20
"""How much of a tensor is digested at a time, which is copied if it is not contiguous."""
_MOST_ROWS = 1 << 16
"""How many runs are processed at a time. A multiple of every period, because a period divides `_BLOCK_BYTES`."""
_ENOUGH_BYTES = 16 << 10
"""In a group of runs of at least this size, the work outweighs the cost of the numpy calls."""
_SEEDS = {  # the first fraction digits of pi, in order, so not chosen for any property
    "table": (0x243F6A8885A308D3, 0x13198A2E03707344),
    "multiplier": (0xA4093822299F31D0, 0x082EFA98EC4E6C89),
}
_LANE = 1 << 64

_Bytes = npt.NDArray[np.uint8]
_Words = npt.NDArray[np.uint64]
_Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TensorDigest:
    """Two unsigned 64-bit lanes; digests of disjoint chunks add up to the digest of their union.

    The default is that of no bytes, the start of a sum.
    """

    lane0: int = 0
    lane1: int = 0

    def to_hex(self) -> str:
        """Return 32 lower-case hexadecimal digits, lane 0 first."""
        return f"{self.lane0:016x}{self.lane1:016x}"

    def __add__(self, other: TensorDigest) -> TensorDigest:
        return TensorDigest((self.lane0 + other.lane0) % _LANE, (self.lane1 + other.lane1) % _LANE)


def digest_chunk(local: torch.Tensor, *, global_shape: Sequence[int], offsets: Sequence[int]) -> TensorDigest:
    """Return what the box `local`, at `offsets` in a tensor of `global_shape`, adds to the digest of that tensor.

    Any dtype and memory layout, on the CPU. Takes a few MiB of memory, 8 MiB more if `local` is not contiguous.
    Any thread: threads share only constants. Raises ValueError if the box is not inside the tensor.
    """
    if not is_inside(offsets, local.shape, global_shape):
        whole = list(global_shape)
        raise ValueError(f"a chunk of {list(local.shape)} at {list(offsets)} is not inside a tensor of {whole}")
    sums = np.zeros(2, np.uint64)
    if local.numel():
        for piece, at in row_major_pieces(local.detach(), 0, local.nbytes, _COPY_BYTES):
            inside = np.unravel_index(at // local.itemsize, local.shape)
            sums += _box_lanes(piece, global_shape, [a + int(b) for a, b in zip(offsets, inside, strict=True)])
    return TensorDigest(*map(int, sums))


def finish(digest: TensorDigest, dtype: torch.dtype, shape: Sequence[int]) -> TensorDigest:
    """Return the digest of the tensor from the sum over its chunks; it depends on dtype and shape, too.

    Adds the two little-endian halves of the 16-byte BLAKE2b of a text such as `float32[8, 4]`.
    """
    text = f"{str(dtype).removeprefix('torch.')}{[int(size) for size in shape]}"
    key = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return digest + TensorDigest(int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little"))


def _box_lanes(local: torch.Tensor, global_shape: Sequence[int], offsets: Sequence[int]) -> _Words:
    """Return the two lanes of a contiguous box, which is a list of equally long runs of the global byte stream."""
    sizes, itemsize = local.shape, local.element_size()
    strides = [math.prod(global_shape[dim + 1 :]) * itemsize for dim in range(len(sizes))]
    origin = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    inner = max(len(sizes) - 1, 0)  # the first dim of a run: all dims after it are whole
    while inner and sizes[inner] == global_shape[inner]:
        inner -= 1
    run_bytes = math.prod(sizes[inner:]) * itemsize
    runs: _Bytes = local.reshape(-1).view(torch.uint8).numpy().reshape(-1, run_bytes)
    rows, pitch = (sizes[inner - 1], strides[inner - 1]) if inner else (1, _BLOCK_BYTES)
    period = _BLOCK_BYTES // math.gcd(pitch, _BLOCK_BYTES)  # rows that far apart start at the same byte of a block
    alike = len(runs) == 1 or run_bytes * max(1, min(rows, _MOST_ROWS) // period) >= _ENOUGH_BYTES
    sums = np.zeros(2, np.uint64)
    for begin, end in (
        _grid_spans(len(runs), rows, _MOST_ROWS) if alike else _grid_spans(len(runs), len(runs), _MOST_ROWS)
    ):
        starts = origin + _row_offsets(begin, end, sizes[:inner], strides[:inner])
        if alike:
            for first in range(min(period, end - begin)):
                sums += _alike_runs(runs[begin + first : end : period], starts[first::period])
        else:
            sums += _mixed_runs(runs[begin:end], starts)
    return sums


def _grid_spans(total: int, grid: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut range(total) at every multiple of `grid`, and each of these parts into spans of at most `most`."""
    for first in range(0, total, grid):
        for begin in range(first, first + grid, most):
            yield begin, min(begin + most, first + grid)


def _row_offsets(begin: int, end: int, sizes: Sequence[int], strides: Sequence[int]) -> _Index:
    """Return where the rows `begin` to `end`, of all indices below `sizes` in row-major order, start."""
    rows = np.arange(begin, end, dtype=np.int64)
    offsets = np.zeros_like(rows)
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        rows, index = np.divmod(rows, size)
        offsets += index * stride
    return offsets


def _alike_runs(runs: _Bytes, starts: _Index) -> _Words:
    """Return the two lanes of runs [rows, bytes] that start at the same byte of a block: borders cut all alike."""
    num_rows, num_bytes = runs.shape
    head = min(int(-starts[0] % _BLOCK_BYTES), num_bytes)
    tail = num_bytes - (num_bytes - head) % _BLOCK_BYTES
    sums = np.zeros(2, np.uint64)
    for begin, end in ((0, head), (head, tail), (tail, num_bytes)):
        if begin < end:
            parts = max(1, (end - begin) // _BLOCK_BYTES)
            sums += _cell_lanes(runs[:, begin:end].reshape(num_rows, parts, -1), starts + begin)
    return sums


def _cell_lanes(cells: _Bytes, starts: _Index) -> _Words:
    """Return the two lanes of cells [rows, blocks, bytes]: each lies in one block, all start at the same byte of it."""
    num_rows, num_blocks, num_bytes = cells.shape
    lead, phase = int(starts[0]) % _WORD_BYTES, int(starts[0]) % _BLOCK_BYTES // _WORD_BYTES
    num_words = _num_words(lead + num_bytes)
    table = _tables()[:, None, None, phase : phase + num_words]
    some_blocks = min(num_blocks, _SCRATCH_WORDS // num_words)
    some_rows = min(num_rows, _SCRATCH_WORDS // (num_words * some_blocks))
    scratch = np.empty((some_rows, some_blocks, num_words), np.uint64)
    within = np.empty((2, num_rows, num_blocks), np.uint64)
    for row in range(0, num_rows, some_rows):
        for block in range(0, num_blocks, some_blocks):
            part = np.s_[row : row + some_rows, block : block + some_blocks]
            words = scratch[: cells[part].shape[0], : cells[part].shape[1]]
            np.copyto(words, _grid_words(cells[part], lead))
            for lane in (0, 1):
                np.einsum("rbw,rbw->rb", words, table[lane], out=within[lane][part])
    return _weighted_sums(within, starts[:, None] // _BLOCK_BYTES + np.arange(num_blocks))


def _mixed_runs(runs: _Bytes, starts: _Index) -> _Words:
    """Return the two lanes of short runs [rows, bytes] that start anywhere; gathers a table row for each."""
    some_rows = max(1, _SCRATCH_WORDS // _num_words(runs.shape[1]))
    sums = np.zeros(2, np.uint64)
    for row in range(0, len(runs), some_rows):
        part, where = runs[row : row + some_rows], starts[row : row + some_rows]
        for lead in np.unique(where % _WORD_BYTES).tolist():
            same = np.flatnonzero(where % _WORD_BYTES == lead)
            words = _grid_words(part[same], lead).astype(np.uint64)
            blocks, phases = np.divmod(where[same] // _WORD_BYTES, BLOCK_WORDS)
            tables = np.lib.stride_tricks.sliding_window_view(_tables(), words.shape[1], axis=1)[:, phases]
            beyond = np.arange(words.shape[1]) >= BLOCK_WORDS - phases[:, None]  # a run crosses at most one border
            for block, inside in ((blocks, ~beyond), (blocks + 1, beyond)):
                if inside.any():
                    sums += _weighted_sums(np.einsum("rw,lrw->lr", words * inside, tables), block)
    return sums


def _grid_words(cells: _Bytes, lead: int) -> npt.NDArray[np.uint32]:
    """Return the bytes of the last dim as words of the tensor's grid; the first word has `lead` bytes before them."""
    num_bytes = cells.shape[-1]
    if lead or num_bytes % _WORD_BYTES:
        padded = np.zeros((*cells.shape[:-1], _num_words(lead + num_bytes) * _WORD_BYTES), np.uint8)
        padded[..., lead : lead + num_bytes] = cells
        cells = padded
    return cells.view("<u4")


def _num_words(num_bytes: int) -> int:
    return -(-num_bytes // _WORD_BYTES)


def _weighted_sums(within: _Words, blocks: _Index) -> _Words:
    """Return the sum of inner sums [2, rows, blocks], each times the multiplier of its block."""
    multipliers = _coefficients(_SEEDS["multiplier"], blocks.reshape(-1))
    lanes: _Words = np.einsum("lb,lb->l", multipliers, within.reshape(2, -1))
    return lanes


@cache
def _tables() -> _Words:
    """Return both lanes' tables, [2, 2 * BLOCK_WORDS]: each twice, so that a window that wraps around is a slice."""
    return np.tile(_coefficients(_SEEDS["table"], np.arange(BLOCK_WORDS, dtype=np.int64)), 2)


def _coefficients(seeds: tuple[int, int], positions: _Index) -> _Words:
    """Return the outputs number `positions` of SplitMix64 with each seed, made odd, [2, positions].

    SplitMix64 is from Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (2014).
    """
    z = (positions + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.array(seeds, np.uint64)[:, None]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd: _Words = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return odd
