"""Uploads, as a process that a test kills.

python tests/bucket/uploading.py FOLDER ADDRESS
"""

from __future__ import annotations

import sys

from torchtitan_lite.store.retention import KeepLatest
from torchtitan_lite.uploading.uploader import UploadJob, upload_all

if __name__ == "__main__":
    source, address = sys.argv[1:]
    upload_all(UploadJob(source, address, "run0", KeepLatest(2), lease_timeout_seconds=10.0), lambda state: None)
