"""A trainer as far as a keeper sees one, without torch: `python trainer.py FOLDER RUNTIME ACT`.

In its first attempt it keeps an image of 64 MiB and then acts: `wait`s, `raise`s, is `killed`, or takes memory until
the system ends it (`grow`). In a later one, or with `look`, it prints what is held and ends.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from torchtitan_lite.memory.keeper.client import Keeper

IMAGE_BYTES = 64 << 20
GROWTH_BYTES = 8 << 20


def main(folder: str, runtime: str, act: str) -> None:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    rank = os.environ.get("RANK", "0")
    keeper = Keeper(Path(folder), 600.0, runtime=Path(runtime))
    if act == "look" or attempt != "0":
        say("unmapped", keeper.wait_until_unmapped(60.0, attempt))
        for held in keeper.held(attempt):
            content = os.pread(held.arena_fd, IMAGE_BYTES, 0)
            say("held", held.name, held.is_mapped, content == _image(held.name))
        return
    keeper.start()
    keeper.join(attempt)
    arena, mark = os.memfd_create("arena"), os.memfd_create("mark")
    os.write(arena, _image(rank))
    keeper.keep(rank, (arena, mark))
    say("kept", rank)
    _act(act, Path(runtime) / f"kept {rank}")


def say(*words: object) -> None:
    """Print a line in one write: all ranks of a launcher have one pipe, and its Python does not buffer."""
    os.write(sys.stdout.fileno(), f"{' '.join(map(str, words))}\n".encode())


def _image(name: str) -> bytes:
    return name.encode().ljust(IMAGE_BYTES, b".")


def _act(act: str, done: Path) -> None:
    done.touch()
    match act:
        case "raise":
            raise RuntimeError("as a trainer does")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "grow":
            taken = []
            while True:
                taken.append(bytearray(os.urandom(1) * GROWTH_BYTES))
        case _:
            signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
