"""Measure `torchtitan-lite import-weights`: time and memory, next to the raw disk, in one run.

    python scripts/bench_import.py --rounds 3

Writes a Llama of 0.5 billion parameters in bfloat16, with embeddings of 120,000 tokens, in each form of weights, and
imports it as float32: 2 GB with two tensors of 490 MB. Each import is a process of its own, with the source out of the
page cache. The time begins after the imports; the memory is the process's peak less what it had after `import torch`.
The raw disk reads the source, writes the result and reads it again directly. A figure is a median, with the lowest and
the highest value.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import safetensors.torch
import torch
from checkpoint_bench import disk

from torchtitan_lite.models.llama.args import ModelArgs
from torchtitan_lite.models.llama.hugging_face import describe

ROOT = Path(__file__).resolve().parents[1]
ARGS = ModelArgs(dim=1024, n_layers=16, n_heads=16, n_kv_heads=8, ffn_dim=4096, vocab_size=120_000)
PARAMS = {
    **{"dim": 1024, "n_layers": 16, "n_heads": 16, "n_kv_heads": 8, "vocab_size": 120_000, "multiple_of": 4096},
    **{"norm_eps": 1e-5, "rope_theta": 500000.0},
}
NUM_FILES = 2
MOST_MEMORY_MIB = 128 + 8
"""128 MiB and one slice of the largest tensor."""

MEASURED = """
import re, sys, time
import torch
# Not ru_maxrss: on Linux it includes the peak of the process that started this one.
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before = peak()
from torchtitan_lite.cli.app import main
import torchtitan_lite.models.llama.imported
begun = time.perf_counter()
code = main(sys.argv[1:])
sys.stderr.write(f"{code} {time.perf_counter() - begun} {peak() - before}")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forms", default="safetensors,bin,meta")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure (default: the temporary one)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        sys.exit(0 if measure(folder, args.rounds, args.forms.split(",")) else 1)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, rounds: int, forms: list[str]) -> bool:
    """Print the figures of `rounds` rounds; return whether the memory of each import was within the limit."""
    sources = {form: MAKERS[form](folder / form) for form in forms}
    num_bytes = 4 * sum(tensor.numel() for tensor in tensors("cpu", empty=True).values())
    raw = disk.Raw(disk.Touched(num_bytes))
    times: dict[str, list[float]] = {name: [] for name in ("raw", *forms)}
    peaks: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        written = timed(lambda: raw.write(folder))
        # Half of the bytes are read from the source, and all of them from the result.
        times["raw"].append(written + 1.5 * timed(lambda: raw.read(folder, warm=False)))
        for form in forms:
            disk.make_cold(sources[form])
            seconds, peak = imported(sources[form], folder / "step-0")
            times[form].append(seconds)
            peaks[form].append(peak / 2**20)
    print(f"{num_bytes / 1e9:.2f} GB of float32 from bfloat16, {rounds} rounds")
    print(f"raw: read half, write, read it again   {spread(times['raw'])} s")
    for form in forms:
        ratios = [own / raw for own, raw in zip(times[form], times["raw"], strict=True)]
        memory = spread(peaks[form])
        print(f"{form:12} {spread(times[form])} s, {spread(ratios)} x raw, {memory} MiB above import torch")
    return max(peak for of_form in peaks.values() for peak in of_form) <= MOST_MEMORY_MIB


def imported(source: Path, out: Path) -> tuple[float, float]:
    """Import in a process of its own; return its seconds and its peak memory in bytes, both without the imports."""
    command = ["import-weights", str(source), str(out), "--json"]
    ended = subprocess.run(
        [sys.executable, "-c", MEASURED, *command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    code, seconds, peak = ended.stderr.split()[-3:]
    if code != "0":
        raise RuntimeError(ended.stderr)
    assert json.loads(ended.stdout)["tensors"] == len(describe(ARGS, {}, None, None).places)
    shutil.rmtree(out)
    return float(seconds), float(peak)


def tensors(device: str, *, empty: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of the model in Hugging Face's names, in bfloat16."""
    make = torch.empty if empty else torch.randn
    places = describe(ARGS, {}, None, None).places.values()
    return {place.name: make(place.shape, dtype=torch.bfloat16, device="meta" if empty else device) for place in places}


def make_safetensors(folder: Path) -> Path:
    """Write it as a folder of Hugging Face's with shards of safetensors."""
    _with_config(folder)
    places: dict[str, str] = {}
    for number, shard in enumerate(_halves(tensors("cpu")), 1):
        name = f"model-{number:05}-of-{NUM_FILES:05}.safetensors"
        safetensors.torch.save_file(shard, folder / name)
        places |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def make_bin(folder: Path) -> Path:
    """Write it as a folder of Hugging Face's with one file of `torch.save`."""
    _with_config(folder)
    torch.save(tensors("cpu"), folder / "pytorch_model.bin")
    return folder


def make_meta(folder: Path) -> Path:
    """Write it in Meta's layout, in two parts."""
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(PARAMS))
    places = describe(ARGS, {}, None, None).places
    for number in range(NUM_FILES):
        part = {}
        for name, place in places.items():
            dim = 1 if name.endswith(("wo.weight", "w2.weight")) else 0
            is_cut = len(place.shape) == 2
            shape = [size // NUM_FILES if is_cut and at == dim else size for at, size in enumerate(place.shape)]
            part[name] = torch.randn(shape, dtype=torch.bfloat16)
        torch.save(part, folder / f"consolidated.{number:02}.pth")
    return folder


MAKERS: dict[str, Callable[[Path], Path]] = {"safetensors": make_safetensors, "bin": make_bin, "meta": make_meta}


def _with_config(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(describe(ARGS, {}, None, None).config))


def _halves(whole: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    names = list(whole)
    for number in range(NUM_FILES):
        yield {name: whole[name] for name in names[number::NUM_FILES]}


def timed(work: Callable[[], None]) -> float:
    """Return the seconds that `work` takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def spread(values: list[float]) -> str:
    """Return the median with the lowest and the highest value."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
