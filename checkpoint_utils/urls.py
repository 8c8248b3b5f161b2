"""What is a URL and no path, and whether checkpoints can be kept under it."""

from __future__ import annotations

import importlib.util
import os
import re
from urllib.parse import urlsplit


def is_url(path: str | os.PathLike | None) -> bool:
    return bool(path) and re.match(r"[a-z][a-z0-9+.-]*://", os.fspath(path)) is not None


def url_problem(url: str) -> str | None:
    """Why objects cannot be kept under this URL, as a sentence; None where they can, as far as can be seen from here."""
    parts = urlsplit(url)
    if parts.scheme != "s3":
        return f"{parts.scheme}:// is not offered: a folder, or s3://bucket/prefix"
    if "@" in parts.netloc:
        return "credentials in a URL end up in logs and checkpoints: put them into the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
    if not parts.netloc or not parts.path.strip("/") or parts.query or parts.fragment:
        return f"{url} must be s3://bucket/prefix"
    missing = [name for name in ("boto3", "iopath") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} must be installed for it: pip install 'fairtrain[s3]'"
    return None
