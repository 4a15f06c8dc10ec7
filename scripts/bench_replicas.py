"""Measure steps of a training on two hosts with and without replicas of its images at the other host.

    python scripts/bench_replicas.py --rounds 5
    python scripts/bench_replicas.py --rounds 5 --shared

The hosts are network namespaces of this machine (root only). Replicas take a network of their own, limited to `--rate`;
with `--shared` that of the training, limited to the same, and at most 5 % of it. Each round trains once with images
alone and once with replicas, in turn. Prints the medians of the rounds' mean steps, and of their ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # tests/ is not installed with the package.

from tests.hosts import network, torchrun  # noqa: E402  # after the line above
from tests.processes import read_lines  # noqa: E402

WITH, WITHOUT = "with replicas", "images alone"
SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8}
FIXED = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 260, "rms_norm_eps": 1e-5}
MORE = {"rope_theta": 500000.0, "max_position_embeddings": 8192}
FIRST = 15
"""Steps that are not measured: memory is made in them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each (5)")
    parser.add_argument("--steps", type=int, default=60, help="of each training (60)")
    parser.add_argument("--interval", type=int, default=10, help="memory_interval (10)")
    parser.add_argument("--rate", type=int, default=1000, help="megabits per second of the network (1000)")
    parser.add_argument("--shared", action="store_true", help="replicas take the network of the training")
    options = parser.parse_args(arguments)
    found: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    replicas = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for which in random.Random(number).sample((WITH, WITHOUT), 2):
                step, count = _trained(Path(folder) / f"{number}-{which == WITH}", options, has_replicas=which == WITH)
                found[which].append(step)
                replicas += [count] if which == WITH else []
    for which, seconds in found.items():
        print(f"{which:16}{1000 * statistics.median(seconds):8.2f} ms a step")
    ratios = [a / b for a, b in zip(found[WITH], found[WITHOUT], strict=True)]
    print(f"{'ratio':16}{statistics.median(ratios):8.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    if not options.shared:
        print(f"sent            {statistics.median(replicas) / 1e6:8.1f} MB a host")
    return 0


def _trained(folder: Path, options: argparse.Namespace, *, has_replicas: bool) -> tuple[float, float]:
    """Return the mean seconds of a step, and the bytes that a host sent by the network of replicas."""
    folder.mkdir()
    (folder / "model.json").write_text(json.dumps({**SIZES, **FIXED, **MORE}))
    training = [
        *("--job.config_file=llama_debug.toml", f"--job.dump_folder={folder}", "--metrics.log_freq=1"),
        *(f"--model.config_path={folder}/model.json", "--metrics.no_enable_tensorboard"),
        *("--training.batch_size=2", "--training.seq_len=128", f"--training.steps={options.steps}"),
        *("--checkpoint.interval=100000", "--checkpoint.async_mode=async_with_pinned_mem"),
        f"--checkpoint.memory_interval={options.interval}",
    ]
    if has_replicas:
        training.append("--checkpoint.memory_peer_copies=1")
        if options.shared:
            training.append(f"--checkpoint.memory_peer_copy_max_mb_per_second={0.05 * options.rate / 8}")
    limited = "eth0" if options.shared else "eth1"
    with network(2) as hosts:
        pair = [hosts.add(), hosts.add()]
        for host in pair:
            host.limit(f"{options.rate}mbit", limited)
        before = pair[0].sent_bytes("eth1")
        for rank, host in enumerate(pair):
            command = torchrun("train.py", *training, nodes=2, rank=rank, master=pair[0])
            host.start(command, folder / "log", {"TORCHTITAN_LITE_REPLICA_INTERFACE": limited})
        if any(host.processes[0].wait() for host in pair):
            sys.exit((folder / "log").read_text())
        sent = pair[0].sent_bytes("eth1") - before
    steps = [line["time_metrics/end_to_end(s)"] for line in read_lines(folder / "metrics.jsonl")]
    return statistics.mean(steps[FIRST:]), sent


if __name__ == "__main__":
    sys.exit(main())
