"""A path handler for s3:// on boto3: ranged reads, multipart uploads, no cache.

Owns: the client, how its errors are told apart. Credentials come from the environment alone and are in no message.
Works with any server that speaks S3 (AWS_ENDPOINT_URL).
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ParamValidationError
from botocore.parsers import ResponseParserError
from iopath.common.file_io import PathHandler, PathManager

from checkpoint_utils.object_store.retrying import with_retries

PART_BYTES = 16 << 20
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 60.0
SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
# How the environment says who this is: keys, or a role that the machine or the cluster gives it.
IDENTITIES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def has_credentials() -> bool:
    return any(os.environ.get(name) for name in IDENTITIES)


def path_manager() -> tuple[PathManager, S3Handler]:
    """A PathManager of its own that knows s3://, and its handler."""
    manager, handler = PathManager(), S3Handler(make_client())
    manager.register_handler(handler)
    return manager, handler


def make_client() -> Any:
    env = os.environ
    keys = {}
    if env.get("AWS_ACCESS_KEY_ID"):
        keys = {
            "aws_access_key_id": env["AWS_ACCESS_KEY_ID"],
            "aws_secret_access_key": env.get("AWS_SECRET_ACCESS_KEY"),
            "aws_session_token": env.get("AWS_SESSION_TOKEN"),
        }
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": 4},  # of one part; retrying.py is for the whole
        max_pool_connections=8,
    )
    client = boto3.client(
        "s3", config=config, region_name=env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION"), **keys
    )
    client.meta.events.register_last("before-call.s3", _ask_nothing_before)
    return client


def _ask_nothing_before(params: dict, **_: Any) -> None:
    """No `Expect: 100-continue`: where a connection breaks off within that answer botocore reads on for ever."""
    params["headers"].pop("Expect", None)


def passes_by_itself(error: Exception) -> bool:
    """Whether another try may go well: the connection, or the server's trouble; not what it refuses."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or status in (0, 408, 429)
    if isinstance(error, (NoCredentialsError, ParamValidationError)):
        return False
    return isinstance(error, (BotoCoreError, ResponseParserError, ConnectionError, TimeoutError, EOFError))


def words_of(error: Exception) -> str:
    """The error in a few words, without anything secret."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    for name in SECRETS:
        if os.environ.get(name):
            text = text.replace(os.environ[name], "***")
    return f"{type(error).__name__}: {text}"


def is_missing(error: Exception) -> bool:
    return isinstance(error, ClientError) and error.response.get("Error", {}).get("Code") in (
        "404",
        "NoSuchKey",
        "NotFound",
    )


class S3Handler(PathHandler):
    """s3://bucket/key for a PathManager: open for reading, copy_from_local, ls (keys below a prefix), exists, rm."""

    def __init__(self, client: Any) -> None:
        super().__init__()
        self._client = client

    def _get_supported_prefixes(self) -> list[str]:
        return ["s3://"]

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> Any:
        self._check_kwargs(kwargs)
        if mode not in ("r", "rb"):
            raise ValueError(f"{path}: objects are opened for reading; write one with copy_from_local")
        file = io.BufferedReader(_Object(self._client, path), PART_BYTES)
        return file if mode == "rb" else io.TextIOWrapper(file, encoding="utf-8")

    def _copy_from_local(self, local_path: str, dst_path: str, overwrite: bool = False, **kwargs: Any) -> bool:
        """The object appears whole or not at all. overwrite: must be true, since a look before would promise nothing."""
        self._check_kwargs(kwargs)
        if not overwrite:
            raise ValueError(f"{dst_path}: an object is always replaced; say overwrite=True")
        bucket, key = split(dst_path)
        parts = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=4)
        with open(local_path, "rb") as file:
            self._client.upload_fileobj(file, bucket, key, Config=parts)
        return True

    def _exists(self, path: str, **kwargs: Any) -> bool:
        self._check_kwargs(kwargs)
        bucket, key = split(path)
        try:
            self._client.head_object(Bucket=bucket, Key=key)
        except ClientError as error:
            if is_missing(error):
                return False
            raise
        return True

    _isfile = _exists

    def _ls(self, path: str, **kwargs: Any) -> list[str]:
        """URLs of the objects below `path`."""
        self._check_kwargs(kwargs)
        bucket, prefix = split(path)
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix.rstrip('/')}/")
        return [f"s3://{bucket}/{found['Key']}" for page in pages for found in page.get("Contents", [])]

    def _rm(self, path: str, **kwargs: Any) -> None:
        self._check_kwargs(kwargs)
        bucket, key = split(path)
        self._client.delete_object(Bucket=bucket, Key=key)

    def abort_uploads(self, path: str, of: Callable[[str], bool]) -> None:
        """Throw away the parts of unfinished uploads below `path`, those whose URL `of` takes."""
        bucket, prefix = split(path)
        answer = self._client.list_multipart_uploads(Bucket=bucket, Prefix=f"{prefix.rstrip('/')}/")
        for upload in answer.get("Uploads", []):
            if of(f"s3://{bucket}/{upload['Key']}"):
                self._client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])


def split(url: str) -> tuple[str, str]:
    """(bucket, key)."""
    parts = urlsplit(url)
    return parts.netloc, parts.path.lstrip("/")


class _Object(io.RawIOBase):
    """An object as a file to read: ranges, each tried again by itself. One version of it, or an error."""

    def __init__(self, client: Any, url: str) -> None:
        self._client, self._url, self._at = client, url, 0
        self._bucket, self._key = split(url)
        self._length, self._etag = self._retried(self._head)

    def _retried(self, do: Any) -> Any:
        return with_retries(do, f"reading {self._url}", passes_by_itself)

    def _head(self) -> tuple[int, str]:
        head = self._client.head_object(Bucket=self._bucket, Key=self._key)
        if "ContentLength" not in head or "ETag" not in head:
            raise EOFError("the answer broke off within its headers")
        return head["ContentLength"], head["ETag"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._at + len(view), self._length)
        if self._at >= end:
            return 0
        data = self._retried(lambda: self._range(self._at, end))
        view[: len(data)] = data
        self._at = end
        return len(data)

    def _range(self, begin: int, end: int) -> bytes:
        answer = self._client.get_object(
            Bucket=self._bucket, Key=self._key, Range=f"bytes={begin}-{end - 1}", IfMatch=self._etag
        )
        data = answer["Body"].read()
        if len(data) != end - begin:
            raise EOFError(f"{len(data)} of {end - begin} bytes came")
        return data
