"""Reading a request's body, no more of it than is allowed."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from core.errors import RequestError, RequestTooLargeError

BODY_TIMEOUT_S = 60.0


async def read_body(request: Request, *, max_nbytes: int) -> bytes:
    """Return the body.

    Raises:
        RequestTooLargeError: it is larger than ``max_nbytes``, told as soon as that is known.
        RequestError: it did not come in time, or the client left.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_nbytes:
        raise _too_large(max_nbytes)
    parts: list[bytes] = []
    nbytes = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                nbytes += len(part)
                if nbytes > max_nbytes:
                    raise _too_large(max_nbytes)
                parts.append(part)
    except TimeoutError as error:
        raise RequestError(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from error
    except ClientDisconnect as error:
        raise RequestError("the client left while sending the body") from error
    return b"".join(parts)


def _too_large(max_nbytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"the body is larger than {max_nbytes / 2**20:g} MiB; send a shorter prompt"
    )
