"""An upload to S3 that can be cut: the parts that the store has are not sent again.

The client of the rest, obstore, gives up an upload that fails, and has no handle for its parts: up to 0.12.1 neither
`put` nor `open_writer` takes or shows the id of an upload, and nothing lists parts. boto3 continues an upload, also
from another process, by the id that the store gave it, so it stays, in this module alone. Parts as objects of their own
would need no id. But plain `dcp.load` through fsspec, and a copy of the bucket to a disk, open a file by its name.
Without boto3, and in other stores, a file that was cut is sent again from its beginning.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any

from torchtitan_lite.bucket import naming
from torchtitan_lite.bucket.object_upload import part_bytes_of
from torchtitan_lite.bucket.objects import StoreUnavailable, meaning
from torchtitan_lite.config.address import Address, parse_address
from torchtitan_lite.disk.block_writer import FileSource
from torchtitan_lite.distributed.environment import variable_value
from torchtitan_lite.log import logger

AT_A_TIME = 3
"""Parts under way, which a cut loses."""
_CONNECT_SECONDS = 10.0
_READ_SECONDS = 60.0
_TRIES = 4
_ONLY_OBSTORE = (
    *("AWS_SKIP_SIGNATURE", "AWS_SERVER_SIDE_ENCRYPTION", "AWS_SSE_KMS_KEY_ID", "AWS_SSE_BUCKET_KEY_ENABLED"),
    "AWS_SSE_CUSTOMER_KEY_BASE64",
)
"""What the other client takes from the environment, and this one does not."""


def s3_parts_at(address: str) -> S3Parts | None:
    """Return what uploads below `address` in parts that stay; None where that is not possible."""
    where = parse_address(address)
    if where.scheme != "s3" or any(map(variable_value, _ONLY_OBSTORE)):
        return None
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError:
        return None
    endpoint = (
        variable_value("AWS_ENDPOINT_URL_S3")
        or variable_value("AWS_ENDPOINT_URL")
        or variable_value("AWS_ENDPOINT")
        or None
    )
    region = variable_value("AWS_REGION") or variable_value("AWS_DEFAULT_REGION") or "us-east-1"
    virtual = variable_value("AWS_VIRTUAL_HOSTED_STYLE_REQUEST").lower() in ("1", "true") or endpoint is None
    config = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"total_max_attempts": _TRIES, "mode": "standard"},
        s3={"addressing_style": "virtual" if virtual else "path"},
        # Stores that are compatible need not know checksums that S3 has had since 2024.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        return S3Parts(boto3.client("s3", endpoint_url=endpoint, region_name=region, config=config), where)
    except (BotoCoreError, ValueError) as error:
        # A profile that is not there, which the other client does not look for.
        logger.warning("Interrupted uploads of files will start again from their first byte: %s", error)
        return None


class S3Parts:
    """Uploads below `address` through `client`. Errors of the store are raised as those of `Objects`."""

    def __init__(self, client: Any, address: Address) -> None:
        self._client, self._address = client, address

    def upload(self, key: str, source: FileSource) -> None:
        """Write the object `key` from `source`; continue an upload of it that was cut. No other process writes it."""
        part_bytes = part_bytes_of(source.num_bytes)
        object_key = self._object(key)
        with self._translated(key):
            upload_id = self._cut(key) or self._client.create_multipart_upload(**object_key)["UploadId"]
            done = self._parts(key, upload_id)
        sizes = {number: min(part_bytes, source.num_bytes - begin) for number, begin in _begins(source, part_bytes)}
        tags = {number: tag for number, (tag, size) in done.items() if sizes.get(number) == size}

        def send(number: int, data: memoryview) -> tuple[int, str]:
            of_part = {"UploadId": upload_id, "PartNumber": number, "Body": bytes(data)}
            return number, self._client.upload_part(**object_key, **of_part)["ETag"]

        with self._translated(key), ThreadPoolExecutor(AT_A_TIME) as pool:
            under_way: set[Future[tuple[int, str]]] = set()
            for number, begin in _begins(source, part_bytes):
                if number in tags:
                    continue
                while len(under_way) >= AT_A_TIME:
                    under_way = _settled(under_way, tags)
                under_way.add(pool.submit(send, number, source.kept(begin, begin + sizes[number])))
            while under_way:
                under_way = _settled(under_way, tags)
            whole = {"Parts": [{"PartNumber": number, "ETag": tags[number]} for number in sorted(tags)]}
            try:
                self._client.complete_multipart_upload(**object_key, UploadId=upload_id, MultipartUpload=whole)
            except self._client.exceptions.NoSuchUpload:
                # The client sends it again where its answer is lost.
                with suppress(self._client.exceptions.ClientError):
                    if self._client.head_object(**object_key)["ContentLength"] == source.num_bytes:
                        return
                raise

    def remove_all_but(self, kept: str) -> None:
        """Give up the uploads of checkpoints below the address that were cut, but those of the checkpoint `kept`.

        Their parts cost money. A store may list none of them, and remove them by a rule of its own.
        """
        with self._translated(""):
            prefix = f"{self._address.prefix}/"
            for key, upload_id in self._under_way(prefix):
                found = naming.split_object_key(key.removeprefix(prefix))
                # Below the folder there may be one of another run.
                if found is not None and found[0] != kept:
                    where = {"Bucket": self._address.bucket, "Key": key}
                    self._client.abort_multipart_upload(**where, UploadId=upload_id)

    def _cut(self, key: str) -> str:
        """Return the id of the latest upload of `key` that is not complete; the empty string if there is none."""
        whole = self._object(key)["Key"]
        return next((upload_id for found, upload_id in reversed(self._under_way(whole)) if found == whole), "")

    def _under_way(self, prefix: str) -> list[tuple[str, str]]:
        """Return key and id of each upload that is not complete, of keys with `prefix`, the oldest first."""
        found = []
        pages = self._client.get_paginator("list_multipart_uploads")
        for page in pages.paginate(Bucket=self._address.bucket, Prefix=prefix):
            found += page.get("Uploads", ())
        return [(each["Key"], each["UploadId"]) for each in sorted(found, key=lambda each: each["Initiated"])]

    def _parts(self, key: str, upload_id: str) -> dict[int, tuple[str, int]]:
        """Return tag and size of each part of `upload_id` in the store, by number."""
        found: dict[int, tuple[str, int]] = {}
        for page in self._client.get_paginator("list_parts").paginate(**self._object(key), UploadId=upload_id):
            found |= {each["PartNumber"]: (each["ETag"], each["Size"]) for each in page.get("Parts", ())}
        return found

    def _object(self, key: str) -> dict[str, str]:
        return {"Bucket": self._address.bucket, "Key": f"{self._address.prefix}/{key}"}

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError) as error:
            raise _meaning(error, f"{self._address}/{key}") from None


def _begins(source: FileSource, part_bytes: int) -> list[tuple[int, int]]:
    """Return the number and the first byte of each part."""
    return list(enumerate(range(0, source.num_bytes, part_bytes), start=1))


def _settled(under_way: set[Future[tuple[int, str]]], tags: dict[int, str]) -> set[Future[tuple[int, str]]]:
    """Wait for one of `under_way`; add the tags of those that are over, and return the others. Raises their errors."""
    over, rest = wait(under_way, return_when=FIRST_COMPLETED)
    tags.update(future.result() for future in over)
    return rest


def _meaning(error: Exception, key: str) -> OSError:
    """Return `error` of boto3 as `Objects` raises it."""
    response = getattr(error, "response", None) or {}  # None in what botocore raises of its connections.
    code = str(response.get("Error", {}).get("Code", ""))
    if not code:
        kind = type(error).__name__
        if kind in ("NoCredentialsError", "PartialCredentialsError"):
            return PermissionError(errno.EACCES, "there are no credentials", key)
        return StoreUnavailable(errno.ETIMEDOUT, f"no usable answer from the store ({kind})", key)
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", "")
    return meaning(OSError(f"status code: {status} <Code>{code}</Code>"), key)
