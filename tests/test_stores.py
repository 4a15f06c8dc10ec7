"""A folder that the system refuses: the advice fits the cause."""

from __future__ import annotations

import errno
import os
import pickle

import pytest

from torchtitan_lite.errors import FolderUnusable
from torchtitan_lite.stores import usable

FILE_SYSTEM = "The cause is its file system, not a permission: "
ADVICE = {
    "Give this user the permissions for it": ("EACCES", "EPERM"),
    "Mount it so that it can be written": ("EROFS",),
    "Make room there": ("ENOSPC", "EDQUOT"),
    "Make it a folder": ("ENOTDIR", "ENOENT", "EEXIST", "ELOOP"),
    "Raise the limit of open files": ("EMFILE",),
    f"{FILE_SYSTEM}mount one there that can do this": ("EINVAL", "EXDEV", "ENOTSUP", "ENOSYS"),
    f"{FILE_SYSTEM}start the same command again once it works": (
        *("EIO", "ESTALE", "ENOLCK", "ENOTEMPTY", "ETIMEDOUT", "ENOTCONN", "EHOSTDOWN"),
    ),
}


def refused(error: OSError, folder: str = "outputs/checkpoint", key: str = "") -> FolderUnusable:
    with pytest.raises(FolderUnusable) as caught, usable(folder, key):
        raise error
    return caught.value


@pytest.mark.parametrize(("name", "advice"), [(name, fix) for fix, names in ADVICE.items() for name in names])
def test_the_advice_fits_the_error_of_the_system(name: str, advice: str) -> None:
    code = getattr(errno, name)
    error = refused(OSError(code, os.strerror(code), "outputs/checkpoint/lease"))
    assert str(error) == (
        f"outputs/checkpoint cannot be used for checkpoints: [Errno {code}] {os.strerror(code)}: "
        f"'outputs/checkpoint/lease'. {advice}, or set another --job.dump_folder."
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_folder_of_uploads_is_named_by_its_key() -> None:
    error = refused(OSError(errno.ESTALE, "gone"), key="--checkpoint.upload_folder")
    assert str(error).endswith("once it works, or set another --checkpoint.upload_folder.")


def test_without_a_code_of_the_system_or_a_disk_only_another_folder_is_advised() -> None:
    assert str(refused(OSError("odd"))).endswith(" odd. Set another --job.dump_folder if that cannot be put right.")
    no_disk = refused(OSError(errno.EACCES, "no key"), "s3://bucket/run")
    assert str(no_disk).endswith(" no key. Set another --checkpoint.folder if that cannot be put right.")
