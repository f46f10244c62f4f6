"""A directory or an object store as a place for blocks, through ``obstore``."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Final, Protocol
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from core.errors import ConfigError, StorageError
from transfer.tiers.trimming import StoredObject

_MAX_RETRIES: Final = 2


class BlockStorage(Protocol):
    """Where blocks are kept by path. Every call may take for ever, and may be cancelled."""

    async def put(self, path: str, content: bytes) -> None:
        """Write an object, whole or not at all.

        Raises:
            StorageError: it may or may not be there.
        """
        ...

    async def get(self, path: str) -> memoryview | None:
        """Return an object's bytes; None where there is none.

        Raises:
            StorageError: nothing is known.
        """
        ...

    async def has(self, path: str) -> bool:
        """Return whether there is such an object.

        Raises:
            StorageError: nothing is known.
        """
        ...

    async def list_below(self, folder: str) -> list[StoredObject]:
        """Return the objects below ``folder``.

        Raises:
            StorageError: nothing is known.
        """
        ...

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; one that is gone already is no error.

        Raises:
            StorageError: some of them may be there still.
        """
        ...


class ObjectStorage:
    """``file:///dir``, ``s3://bucket/prefix``, ``gs://``, ``az://`` or ``memory:///``.

    Objects are written under another name and renamed, or put whole: a reader never sees half of
    one. Credentials and endpoints come from the environment, as the cloud's own tools take them
    (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT``, ...).
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Open the storage. A directory is made; nothing else is touched.

        Raises:
            ConfigError: the URL is of no known kind, or incomplete.
        """
        try:
            self._store = _open(url, timeout_s)
        except (BaseError, ValueError, OSError) as error:
            raise ConfigError(f"cache.storage_url: {url}: {_line(error)}") from error

    async def put(self, path: str, content: bytes) -> None:
        """See ``BlockStorage``."""
        try:
            await obstore.put_async(self._store, path, content)
        except (BaseError, OSError) as error:
            raise StorageError(f"put {path}: {_line(error)}") from error

    async def get(self, path: str) -> memoryview | None:
        """See ``BlockStorage``."""
        try:
            result = await obstore.get_async(self._store, path)
            return memoryview(await result.bytes_async())
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise StorageError(f"get {path}: {_line(error)}") from error

    async def has(self, path: str) -> bool:
        """See ``BlockStorage``."""
        try:
            await obstore.head_async(self._store, path)
        except FileNotFoundError:
            return False
        except (BaseError, OSError) as error:
            raise StorageError(f"head {path}: {_line(error)}") from error
        return True

    async def list_below(self, folder: str) -> list[StoredObject]:
        """See ``BlockStorage``."""
        found: list[StoredObject] = []
        try:
            # One overload of many is not typed, for a library that is not installed.
            listing = obstore.list(self._store, prefix=folder)  # pyright: ignore[reportUnknownMemberType]
            async for chunk in listing:
                found += [
                    StoredObject(meta["path"], meta["size"], meta["last_modified"])
                    for meta in chunk
                ]
        except (BaseError, OSError) as error:
            raise StorageError(f"list {folder}: {_line(error)}") from error
        return found

    async def delete(self, paths: Sequence[str]) -> None:
        """See ``BlockStorage``."""
        for path in paths:  # one by one: a directory stops a batch at the first that is gone
            try:
                await obstore.delete_async(self._store, path)
            except FileNotFoundError:
                continue
            except (BaseError, OSError) as error:
                raise StorageError(f"delete {path}: {_line(error)}") from error


def _open(url: str, timeout_s: float) -> ObjectStore:
    scheme = urlsplit(url).scheme
    if scheme == "file":
        return from_url(url, mkdir=True)
    if scheme == "memory":
        return from_url(url)
    timeout = timedelta(seconds=timeout_s)
    return from_url(
        url,
        # An endpoint without TLS is used only where the operator named one.
        client_options={"timeout": timeout, "connect_timeout": timeout, "allow_http": True},
        retry_config={"max_retries": _MAX_RETRIES, "retry_timeout": timeout},
    )


def _line(error: Exception) -> str:
    """Return the first line of a message: the library adds its own structs."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
