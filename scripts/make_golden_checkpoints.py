"""Write tests/golden/format-N/: small checkpoints that pin the format of this version.

    python scripts/make_golden_checkpoints.py
    python scripts/make_golden_checkpoints.py --torch    # tests/golden/torch-X.Y/ of the torch at hand

Without --torch, only the folder of the current format version is written; the folders of older versions do not change.
The same code and the same torch write the same bytes, because run id, time and dump folder are set to fixed values
after the save. tests/golden/README.md lists the version that wrote each folder.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed, multiprocessing

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # tests/ is not installed with the package.

from tests.checkpoint.format import golden_of_torch, golden_run  # noqa: E402  # after the line above
from torchtitan_lite.store import layout  # noqa: E402  # of this clone


def main() -> None:
    """Replace the folder of the current version, or that of the torch at hand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="store_true", help="write the folder of this torch")
    if torch.cuda.is_available():
        sys.exit("The random generator of a GPU would be saved too. Set CUDA_VISIBLE_DEVICES to the empty string.")
    if parser.parse_args().torch:
        _write_folder_of_torch()
    else:
        _write_folder_of_format()


def _write_folder_of_format() -> None:
    latest = max(golden_run.WRITTEN.values())
    target = golden_run.GOLDEN / f"format-{latest}"
    for name, world_size in golden_run.WRITERS.items():
        if golden_run.WRITTEN.get(name) != latest:
            continue
        shutil.rmtree(target / name, ignore_errors=True)
        if world_size == 1:
            golden_run.save(target / name, writer=name)
        else:
            with tempfile.TemporaryDirectory() as rendezvous:
                arguments = (world_size, target / name, Path(rendezvous, "file"), name)
                multiprocessing.spawn(_save_as_rank, arguments, nprocs=world_size)
        for identity in (target / name).glob(f"*/{layout.FOLDER_ID}"):
            identity.unlink()  # Random, and no part of a checkpoint.
        for folder in sorted((target / name).glob("*/step-*")):
            golden_run.fix(folder)
            sizes = sum(path.stat().st_size for path in folder.iterdir())
            print(f"{folder.relative_to(golden_run.GOLDEN)}: {sizes} bytes")


def _write_folder_of_torch() -> None:
    target = golden_of_torch.folder_of(torch.__version__)
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as rendezvous:
        multiprocessing.spawn(_write_as_rank, (target, Path(rendezvous, "file")), nprocs=2)
    (target / "ours" / layout.FOLDER_ID).unlink(missing_ok=True)  # Random, and no part of a checkpoint.
    golden_run.fix(target / "ours" / f"step-{golden_run.STEP}")
    sizes = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"{target.relative_to(golden_run.GOLDEN)}: {sizes} bytes")


def _write_as_rank(rank: int, target: Path, rendezvous: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    golden_of_torch.write(target, init_device_mesh("cpu", (2,)))
    distributed.destroy_process_group()


def _save_as_rank(rank: int, world_size: int, target: Path, rendezvous: Path, writer: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    golden_run.save(target, init_device_mesh("cpu", (world_size,)), writer)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
