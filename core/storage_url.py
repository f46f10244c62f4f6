"""The shape of ``cache.storage_url``, checked where the config is read and not by each worker."""

import re

_BUCKETS = ("s3", "gs", "az")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
KINDS = "file:///absolute/folder, memory:///, s3://bucket, gs://bucket or az://container"


def checked_storage_url(url: str) -> str:
    """Return ``url``, whose shape names a storage; whether that is there is not looked at.

    Raises:
        ValueError: it names none; the message says what to write instead.
    """
    fix = _fix(url)
    if fix is not None:
        raise ValueError(fix)
    return url


def _fix(url: str) -> str | None:
    scheme, colon, rest = url.partition(":")
    if not url.strip():
        return f"names no storage: leave it out, or write {KINDS}"
    if url != url.strip() or any(mark in url for mark in "?#\\") or not url.isprintable():
        return "has space around it, ?, #, a backslash or a control character: leave that out"
    if not colon or "/" in scheme:
        return f"is a path and no URL: write {_folder_url(url)}"
    return _scheme_fix(scheme, rest)


def _scheme_fix(scheme: str, rest: str) -> str | None:
    if scheme == "file":
        is_folder = rest.startswith("///") and rest.strip("/")
        return None if is_folder else f"a folder's URL is absolute: write {_file_url(rest)}"
    if scheme == "memory":
        return None if rest == "///" else "write memory:///"
    if scheme in _BUCKETS:
        return _bucket_fix(scheme, rest)
    return f"{scheme}: is not known: write {KINDS}"


def _folder_url(path: str) -> str:
    """Return what names the folder ``path``; a relative one would differ between workers."""
    folder = path.strip("/")
    return f"file:///{folder}" if path.startswith("/") and folder else "file:///absolute/folder"


def _file_url(rest: str) -> str:
    """Return the URL that was most likely meant by ``file:`` and ``rest``."""
    return _folder_url(
        "/" + rest.removeprefix("//localhost").lstrip("/") if rest[:1] == "/" else ""
    )


def _bucket_fix(scheme: str, rest: str) -> str | None:
    bucket = rest.removeprefix("//").partition("/")[0]
    noun = "container" if scheme == "az" else "bucket"
    if rest.startswith("//") and _BUCKET.fullmatch(bucket):
        return None
    if "@" in bucket:
        return "credentials come from the workers' environment: leave them out"
    return f"names no {noun}: write {scheme}://{noun} or {scheme}://{noun}/prefix"
