"""Measure `torchtitan-lite export`: time and memory, next to the raw disk, in one run.

    python scripts/bench_export.py --rounds 5

Writes a float32 checkpoint of 1.9 GB with two tensors of 500 MB, and exports it as bfloat16, a process each time, with
the checkpoint out of the page cache. The time begins after the imports. It is compared with reading the checkpoint,
writing the result and reading it again directly, with as many threads; the memory is the process's peak less what it
had after `import torch`. Every round measures everything once. A figure is a median, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from checkpoint_bench import disk
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from torchtitan_lite.models.llama.args import ModelArgs
from torchtitan_lite.models.llama.hugging_face import describe

ROOT = Path(__file__).resolve().parents[1]
LLAMA = ModelArgs(dim=4096, n_layers=1, n_heads=32, n_kv_heads=8, vocab_size=30_518, ffn_dim=15_104)
SHAPES = {name: place.shape for name, place in describe(LLAMA, {}, None, None).places.items()}
"""A Llama of 1.9 GB in float32, with two tensors of 500 MB."""

MEASURED = """
import re, sys, time
import torch, safetensors, numpy
# Not ru_maxrss: on Linux it includes the peak of the process that started this one.
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before = peak()
from torchtitan_lite.cli.app import main
from torchtitan_lite.converting import exporting
if "hf" in sys.argv: import torchtitan_lite.hugging_face.writing, torchtitan_lite.cli.described_model
if "torch" in sys.argv or "dcp" in sys.argv: import torchtitan_lite.converting.layouts
if "dcp" in sys.argv: import torchtitan_lite.converting.dcp_folder
if "torch" in sys.argv: import torchtitan_lite.converting.torch_file
begun = time.perf_counter()
code = main(sys.argv[1:])
sys.stderr.write(f"{code} {time.perf_counter() - begun} {peak() - before}")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", default="safetensors,hf,torch,dcp")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure (default: the temporary one)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        measure(folder, args.rounds, args.formats.split(","))
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, rounds: int, formats: list[str]) -> None:
    """Print the figures of `rounds` rounds."""
    checkpoint = make_checkpoint(folder)
    num_bytes = sum(math.prod(shape) * 4 for shape in SHAPES.values())
    raw = disk.Raw(disk.Touched(num_bytes // 2))
    times: dict[str, list[float]] = {name: [] for name in ("raw", *formats)}
    peaks: dict[str, list[float]] = {name: [] for name in formats}
    for _ in range(rounds):
        written = timed(lambda: raw.write(folder))
        times["raw"].append(written + sum(timed(lambda: raw.read(folder, warm=False)) for _ in range(3)))
        for name in formats:
            disk.make_cold(checkpoint)
            seconds, peak = export(checkpoint, folder / f"out.{name}", name)
            times[name].append(seconds)
            peaks[name].append(peak)
    print(f"{num_bytes / 1e9:.2f} GB of float32 to bfloat16, {rounds} rounds")
    print(f"raw: read, write half, read it again   {spread(times['raw'])} s")
    for name in formats:
        ratios = [own / raw for own, raw in zip(times[name], times["raw"], strict=True)]
        memory = spread([peak / 2**20 for peak in peaks[name]])
        print(f"{name:12} {spread(times[name])} s, {spread(ratios)} x raw, {memory} MiB above import torch")


def export(checkpoint: Path, out: Path, name: str) -> tuple[float, float]:
    """Export in a process of its own; return its seconds and its peak memory in bytes, both without the imports."""
    command = ["export", str(checkpoint), str(out), "--format", name, "--dtype", "bfloat16", "--json"]
    command += ["--config", str(checkpoint.parent / "config.json"), "--no-tokenizer"] if name == "hf" else []
    ended = subprocess.run(
        [sys.executable, "-c", MEASURED, *command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    code, seconds, peak = ended.stderr.split()[-3:]
    if code != "0":
        raise RuntimeError(ended.stderr)
    assert json.loads(ended.stdout)["tensors"] == len(SHAPES)
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    return float(seconds), float(peak)


def make_checkpoint(folder: Path) -> Path:
    """Write the checkpoint, with digests, as ours."""
    state = {"model": {name: torch.randn(shape) for name, shape in SHAPES.items()}}
    (folder / "config.json").write_text(json.dumps(describe(LLAMA, {}, None, None).config))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp_save(state, checkpoint_id=folder / "plain", no_dist=True)
    checkpoint = folder / "step-1"
    command = ["convert", str(folder / "plain"), str(checkpoint), "--layout", "ours", "--json"]
    subprocess.run(
        [sys.executable, "-m", "torchtitan_lite.cli", *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    shutil.rmtree(folder / "plain")
    return checkpoint


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
