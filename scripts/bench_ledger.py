"""Measure what the ledger adds to a step of the debug run: `python scripts/bench_ledger.py --docs docs/watching.md`.

One process trains, and each step has the ledger or has not, by a coin with a fixed seed, so both kinds meet the same
weather; logged steps are compared with logged ones. The steps are short, because what the ledger does in one does not
depend on its length; the difference is then set against a step of the debug run. All is measured in the process's own
CPU time, in one thread, so that other processes of the machine add little noise. Next to the difference is the cost
of the calls by themselves, repeated and added up.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan_lite import log
from torchtitan_lite.config.manager import parse_config
from torchtitan_lite.distributed.process_group import process_group
from torchtitan_lite.metrics.run_metrics import BEAT_SECONDS
from torchtitan_lite.trainer import Trainer

BEGIN, END = "<!-- overhead: written by scripts/bench_ledger.py -->\n", "<!-- end of overhead -->\n"
SKIPPED_STEPS = 5
ROUNDS = 2000


@dataclass
class Coin:
    """Whether the step under way has the ledger, and the seconds of each step, by (has the ledger, is logged)."""

    log_freq: int
    seed: int
    is_on: bool = True
    step: int = 0
    began: float = 0.0
    seconds: dict[tuple[bool, bool], list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def toss(self) -> None:
        """End a step and begin the next one."""
        now = time.process_time()
        if self.step > SKIPPED_STEPS:
            self.seconds.setdefault((self.is_on, self.step % self.log_freq == 0), []).append(now - self.began)
        self.step += 1
        self.is_on = self._random.random() < 0.5
        self.began = time.process_time()


def measure(arguments: list[str], seed: int) -> tuple[Coin, dict[str, float]]:
    """Train, and return the seconds of the steps, and the cost in seconds of each call."""
    config = parse_config(arguments)
    with process_group(config.comm) as world:
        trainer: Any = Trainer(config, world)
        coin = Coin(config.metrics.log_freq, seed)
        _install(trainer, coin)
        costs: dict[str, float] = {}
        end = trainer._completed

        def completed() -> int:
            coin.is_on = True
            trainer.metrics._heartbeat.close()  # It would beat during the calls that are timed.
            costs.update(_costs(trainer))
            return end()

        trainer._completed = completed
        trainer.run()
    return coin, costs


def _install(trainer: Any, coin: Coin) -> None:
    """Take the ledger out of the steps that the coin says."""
    metrics: Any = trainer.metrics
    ledger: Any = metrics.ledger
    part, step, tags, beat = metrics.part, ledger.step, ledger.tags, ledger.beat
    metrics.part = lambda name: part(name) if coin.is_on else _nothing()
    ledger.step = lambda number: step(number) if coin.is_on else _nothing()
    ledger.tags = lambda: tags() if coin.is_on else {"goodput(%)": 0.0}
    ledger.beat = lambda: beat() if coin.is_on else None
    next_batch = trainer._next_batch

    def tossed() -> Any:
        coin.toss()
        return next_batch()

    trainer._next_batch = tossed


def _nothing() -> AbstractContextManager[None]:
    return nullcontext()


def _costs(trainer: Any) -> dict[str, float]:
    metrics: Any = trainer.metrics
    step = trainer.train_state.step

    def one_step() -> None:
        for name in ("waiting_for_data", "saving", "saving"):
            with metrics.part(name):
                pass
        with metrics.ledger.step(step):
            pass

    return {
        "step": _seconds_of(one_step, ROUNDS),
        "logged": _seconds_of(lambda: metrics._files.log(step, metrics.ledger.tags()), ROUNDS // 4),
        "beat": _seconds_of(metrics.ledger.beat, ROUNDS // 10),
    }


def _seconds_of(call: Callable[[], Any], rounds: int) -> float:
    began = time.process_time()
    for _ in range(rounds):
        call()
    return (time.process_time() - began) / rounds


def difference(coin: Coin) -> tuple[float, float, float]:
    """Return how many seconds longer a step is with the ledger, and the interval that holds it with 95 %."""
    drawn = random.Random(coin.seed)
    found = sorted(_longer(coin, lambda values: drawn.choices(values, k=len(values))) for _ in range(1000))
    return _longer(coin, lambda values: values), found[25], found[974]


def _longer(coin: Coin, sample: Callable[[list[float]], list[float]]) -> float:
    total = {True: 0.0, False: 0.0}
    for (is_on, is_logged), values in coin.seconds.items():
        weight = 1 / coin.log_freq if is_logged else 1 - 1 / coin.log_freq
        total[is_on] += weight * statistics.median(sample(values))
    return total[True] - total[False]


def report(coin: Coin, costs: dict[str, float], step_seconds: float) -> str:
    """Return the paragraph for the docs."""
    calls = costs["step"] + costs["logged"] / coin.log_freq + costs["beat"] * step_seconds / BEAT_SECONDS
    longer, low, high = difference(coin)
    of_step = [100 * seconds / step_seconds for seconds in (calls, longer, low, high)]
    num_steps = sum(map(len, coin.seconds.values()))
    return (
        f"A step of the debug run takes {1000 * step_seconds:.0f} ms of CPU time (8 sequences of 256 tokens, one "
        f"process and thread, torch {torch.__version__.partition('+')[0]}, {platform.machine()}).\n"
        f"The ledger's calls take {1e6 * costs['step']:.0f} µs in each step, {1e6 * costs['logged']:.0f} µs in a "
        f"logged one, of ten, to write its tags, and {1e6 * costs['beat']:.0f} µs for a beat: "
        f"together {of_step[0]:.3f} % of a step.\n"
        f"Over {num_steps} short steps, with and without the ledger in turn, a step with it takes {1e6 * longer:+.0f} "
        f"µs longer (95 %: {1e6 * low:+.0f} to {1e6 * high:+.0f} µs), which is {of_step[1]:+.3f} % of a step of the "
        f"debug run (95 %: {of_step[2]:+.3f} % to {of_step[3]:+.3f} %).\n"
        f"CPU time leaves out waits for a disk: the ledger writes into the page cache and syncs nothing.\n"
        f"From `python scripts/bench_ledger.py --docs docs/watching.md`.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000, help="short steps")
    parser.add_argument("--debug-steps", type=int, default=40, help="steps of the debug run")
    parser.add_argument("--docs", type=Path, help="page to write the result into")
    options = parser.parse_args()
    log.setup()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        shared = ["--job.config_file=llama_debug.toml", "--checkpoint.interval_type=none"]
        debug = [*shared, f"--job.dump_folder={folder}/debug", f"--training.steps={options.debug_steps}"]
        whole, _ = measure(debug, seed=0)
        short = [*shared, f"--job.dump_folder={folder}/short", f"--training.steps={options.steps}"]
        coin, costs = measure([*short, "--training.batch_size=1", "--training.seq_len=32"], seed=0)
    text = report(coin, costs, statistics.median(whole.seconds[False, False]))
    print(text)
    if options.docs:
        page = options.docs.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        _, _, after = rest.partition(END)
        options.docs.write_text(before + BEGIN + text + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
