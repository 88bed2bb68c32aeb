"""Which URLs may name the storage of checkpoints."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from isotrain.language import tr

SCHEMES = ("s3", "gs", "gcs", "az", "abfs", "abfss", "oss", "hdfs", "file", "memory")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]*")


def storage_url_problem(url: str) -> str | None:
    """What is wrong with it. The URL is not repeated: it may hold a password."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        return tr(
            "is not a URL of a known store; use one of: {schemes}",
            schemes=", ".join(f"{s}://" for s in SCHEMES),
        )
    if "@" in rest or "?" in rest or "#" in rest or urlsplit(url).password:
        return tr(
            "has credentials or parameters in it; give them by the store's environment variables or files"
        )
    segments = rest.strip("/").split("/")
    if scheme == "hdfs":
        segments[0] = re.sub(r":[0-9]{1,5}$", "", segments[0])
    if not all(_SEGMENT.fullmatch(segment) for segment in segments):
        return tr(
            "has a part that is empty, begins with a dot or has unusual characters; use letters and digits"
        )
    return None
