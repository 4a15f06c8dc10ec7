"""Sources that lie, are cut off or would run code: each is refused by name, and nothing in it is run."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchtitan_lite.checkpoint.untrusted.safetensors_header import read_header
from torchtitan_lite.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointUnreadable,
    CheckpointUnsafe,
    ConfigError,
)
from torchtitan_lite.importing.weights_source import open_source


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def with_header(path: Path, header: object, data: bytes = bytes(8), length: int | None = None) -> Path:
    """Write a safetensors file with this header: text, or an object to write as JSON."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "finding"),
    [
        ({"a": entry(offsets=(0, 4))}, "a is float32 [2], of 8 bytes, and has 4"),
        ({"a": entry(shape=(1 << 62, 4), offsets=(0, 8))}, "of 73786976294838206464 bytes, and has 8"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, "b overlaps the tensor before it, at byte 4"),
        ({"a": entry(), "b": entry(offsets=(0, 8))}, "b overlaps the tensor before it, at byte 0"),
        ({"a": entry(shape=(1,), offsets=(4, 8))}, "a follows a gap, at byte 4"),
        ({"a": entry(shape=(1,), offsets=(0, 4))}, "its tensors have 4 bytes, and 8 follow the header"),
        ({"a": entry(shape=(4,), offsets=(0, 16))}, "its tensors have 16 bytes, and 8 follow the header"),
        ({"a": entry(offsets=(8, 0))}, "a is float32 [2], of 8 bytes, and has -8"),
        ({"a": entry(offsets=(-8, 0))}, "a: [-8, 0] are no offsets"),
        ({"a": entry(offsets=(0, 8.0))}, "a: [0, 8.0] are no offsets"),
        ({"a": entry(offsets=(0, 8, 8))}, "are no offsets"),
        ({"a": entry(shape=(-2,))}, "a: [-2] is no shape"),
        ({"a": entry(shape=(True, 2))}, "a: [True, 2] is no shape"),
        ({"a": entry(shape=(1,) * 65 + (2,))}, "is no shape"),
        ({"a": entry(shape="2")}, "a: '2' is no shape"),
        ({"a": entry(dtype="F128")}, "a: the dtype 'F128' is unknown"),
        ({"a": entry(dtype=["F32"])}, "is unknown"),
        ({"a": entry() | {"more": 1}}, "a: expected dtype, shape and data_offsets"),
        ({"a": 7}, "a: expected dtype, shape and data_offsets"),
        ('{"a": 1, "a": 2}', "a name occurs twice"),
        ("[1]", "it does not begin with a brace"),
        ("{", "its header is not that of a safetensors file"),
        ('{"a": ' + "[" * 100_000, "its header is not that of a safetensors file"),
        ('{"a": \xff}', "its header is not that of a safetensors file"),
    ],
)
def test_a_header_that_lies_is_refused(header: object, finding: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamaged) as raised:
        open_source(with_header(tmp_path / "w.safetensors", header))
    assert finding in str(raised.value)
    assert "w.safetensors" in str(raised.value)


@pytest.mark.parametrize("length", [0, 9, 1 << 40, (1 << 64) - 1])
def test_a_header_of_another_length_is_refused(length: int, tmp_path: Path) -> None:
    path = with_header(tmp_path / "w.safetensors", {"a": entry()}, length=length)
    with pytest.raises(CheckpointDamaged):
        open_source(path)


@pytest.mark.parametrize("text", [b"", b"1234567"])
def test_a_file_without_a_header_is_refused(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(text)
    with pytest.raises(CheckpointDamaged, match=r"its header would have .* Download or copy it again"):
        open_source(tmp_path / "w.safetensors")


def test_a_pointer_of_git_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n")
    with pytest.raises(CheckpointDamaged, match="git's pointer to the weights, without them: run git lfs pull"):
        open_source(tmp_path / "w.safetensors")


def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.safetensors")
    with pytest.raises(CheckpointUnsafe, match="expected a file, found a pipe"):
        open_source(tmp_path / "w.safetensors")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_header_is_refused_or_describes_what_is_in_the_file(tmp_path: Path, data: st.DataObject) -> None:
    whole = safetensors.torch.save({"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.int16)})
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = whole[:at] + data.draw(st.binary(max_size=3)) + whole[at + data.draw(st.integers(0, 3)) :]
    path = tmp_path / "w.safetensors"
    path.write_bytes(changed)
    try:
        found = read_header(path)
    except CheckpointDamaged:
        return
    for held in found.values():
        elements = torch.empty(held.shape, dtype=getattr(torch, held.dtype.name))
        assert held.at + elements.nbytes <= len(changed)


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._call = call, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


@pytest.mark.parametrize(
    ("call", "arguments", "name"),
    [
        (os.system, ("touch {}",), r"(posix|nt)\.system"),
        (eval, ("open({!r}, 'w')",), r"(__builtin__|builtins)\.eval"),
        (open, ("{}", "w"), r"(io|_io)\.open"),
        (getattr, (os, "system"), r"(__builtin__|builtins)\.getattr"),
        (torch.load, ("{}",), r"torch\.serialization\.load"),
    ],
)
@pytest.mark.parametrize("where", ["value", "key_of_a_dict_below", "next to it"])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(
    call: Callable[..., Any], arguments: tuple[Any, ...], name: str, where: str, tmp_path: Path
) -> None:
    mark = tmp_path / "was-run"
    spelled = [each.format(str(mark)) if isinstance(each, str) else 7 for each in arguments]
    runs = Runs(call, *spelled)
    state: Any = {"value": {"w": runs}, "key_of_a_dict_below": {"w": torch.ones(1), "x": {(runs,): 1}}}.get(
        where, {"model": {"w": torch.ones(1)}, "other": [runs]}
    )
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(CheckpointUnsafe, match=f"it asks for {name}") as raised:
        open_source(tmp_path / "w.pt")
    assert "nothing in it was run" in str(raised.value)
    assert not mark.exists()


class Net(torch.nn.Linear):
    """A model of a person's own."""


def test_a_complete_pickled_model_is_refused_with_what_to_save_instead(tmp_path: Path) -> None:
    torch.save(Net(2, 2), tmp_path / "w.pt")
    with pytest.raises(CheckpointUnsafe, match=r"Net, .*made by torch\.save\(model\.state_dict\(\), FILE\)"):
        open_source(tmp_path / "w.pt")


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def rewritten(data: bytes, change: Callable[[str, bytes], bytes | None], method: int = zipfile.ZIP_STORED) -> bytes:
    """Return the archive `data` with the contents that `change` returns; None leaves an entry out."""
    new = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(new, "w", method) as out:
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None:
                out.writestr(name, content)
    return new.getvalue()


def reads_beyond(name: str, content: bytes) -> bytes:
    return content[:4] if "/data/" in name else content


@pytest.mark.parametrize("shape", [[8], [1, 8], [8, 1]])
def test_a_storage_that_is_too_short_is_refused(shape: list[int], tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(rewritten(saved({"w": torch.ones(shape)}), reads_beyond))
    with pytest.raises(CheckpointDamaged, match=rf"shape {re.escape(str(shape))} reaches beyond its storage"):
        open_source(tmp_path / "w.pt")


def test_a_storage_that_is_missing_is_refused(tmp_path: Path) -> None:
    data = rewritten(saved({"w": torch.ones(8)}), lambda name, content: None if "/data/" in name else content)
    (tmp_path / "w.pt").write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="its storage '0' is missing"):
        open_source(tmp_path / "w.pt")


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    data = rewritten(saved({"w": torch.ones(800)}), lambda name, content: content, zipfile.ZIP_DEFLATED)
    (tmp_path / "w.pt").write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="an entry is compressed"):
        open_source(tmp_path / "w.pt")


def test_few_elements_that_claim_to_be_many_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(1 << 40)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointDamaged):
        open_source(tmp_path / "w.pt")


def test_many_names_of_one_storage_are_refused(tmp_path: Path) -> None:
    tensor = torch.ones(1 << 14)
    torch.save({f"w{number}": tensor for number in range(1000)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointDamaged, match="cannot be in files of"):
        open_source(tmp_path / "w.pt")


def test_a_file_of_an_old_pytorch_is_refused_with_the_line_that_converts_it(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "w.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointUnreadable, match=r"PyTorch before 1\.6\. Save it again, .*name that file") as raised:
        open_source(tmp_path / "w.bin")
    [line] = re.findall(r"torch\.save\(.*\)", str(raised.value))
    exec(line)
    assert open_source(tmp_path / "w-new.pt").contents.tensors.keys() == {"w"}


def test_a_torchscript_program_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        archive.writestr("w/data.pkl", pickle.dumps({}, 2))
        archive.writestr("w/constants.pkl", pickle.dumps((), 2))
    with pytest.raises(CheckpointUnreadable, match="it is a TorchScript program"):
        open_source(tmp_path / "w.pt")


@pytest.mark.parametrize("text", [b"", b"PK\x03\x04", b"not an archive at all", pickle.dumps({"w": 1})])
def test_what_is_no_file_of_torch_is_refused(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"w\.pt"):
        open_source(tmp_path / "w.pt")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_file_of_torch_is_refused_or_describes_what_is_in_it(tmp_path: Path, data: st.DataObject) -> None:
    whole = saved({"model": {"w": torch.arange(6.0).reshape(2, 3).T, "b": torch.ones(2)}, "epoch": 1})
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = whole[:at] + data.draw(st.binary(max_size=3)) + whole[at + data.draw(st.integers(0, 3)) :]
    (tmp_path / "w.pt").write_bytes(changed)
    try:
        source = open_source(tmp_path / "w.pt")
    except (CheckpointError, ConfigError):
        return
    stream = source.stream()
    for name, tensor in source.contents.tensors.items():
        assert sum(map(len, stream.slices(name))) == tensor.nbytes


@pytest.mark.parametrize(
    ("files", "finding"),
    [
        ([], "there are no weights in it: expected model.safetensors, .*; it is empty"),
        (["readme.md"], "it has readme.md"),
        (
            ["a.safetensors", "b.safetensors"],
            r"several files of weights and no index .*\(a.safetensors, b.safetensors\)",
        ),
        (["adapter_model.safetensors", "adapter_config.json"], "an adapter of peft .* merge_and_unload"),
        ([".metadata", "__0_0.distcp"], "is a checkpoint already: start a run from it with --checkpoint.initial_load"),
        (["step-3/x", "step-12/x"], "holds checkpoints: start a run from it .*step-12"),
    ],
)
def test_a_folder_without_weights_is_refused_with_what_is_there(files: list[str], finding: str, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    with pytest.raises((CheckpointError, ConfigError), match=finding):
        open_source(folder)


@pytest.mark.parametrize("name", ["w.gguf", "config.json", "notes.txt", "__0_0.distcp"])
def test_a_file_of_another_kind_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=name):
        open_source(tmp_path / name)
