"""Request bodies: bytes to a validated request, or one error that names field, value and fix."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from core.errors import RequestError
from router.protocol import GenerationRequest
from router.unsupported import refuse_unsupported

Request = TypeVar("Request", bound=GenerationRequest)
_MAX_SHOWN_CHARS = 80


def parse_request(body: bytes, kind: type[Request]) -> Request:
    """Return the request in ``body``.

    Raises:
        RequestError: not JSON (NaN, lone surrogates and the like included), not an object, or a
            field is missing, of the wrong type, out of range or not supported.
    """
    content = _parse_json(body)
    refuse_unsupported(content)
    present = {field: value for field, value in content.items() if value is not None}
    try:
        return kind.model_validate(present)
    except ValidationError as error:
        problem = _most_specific(error.errors(include_url=False, include_context=False))
        raise RequestError(_describe(problem), field=_field(problem)) from error


def _parse_json(body: bytes) -> Mapping[str, Any]:
    try:
        content: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is not valid JSON: {reason}") from error
    if not isinstance(content, dict):
        raise RequestError(f"the body must be a JSON object, not {type(content).__name__}")
    return content  # pyright: ignore[reportUnknownVariableType]


def _most_specific(problems: list[ErrorDetails]) -> ErrorDetails:
    """Return the problem that went deepest: of a union, the member that nearly fitted."""
    return max(problems, key=lambda problem: len(problem["loc"]))


def _field(problem: ErrorDetails) -> str | None:
    path = ""
    for part in problem["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(("str", "list[", "int", "function-", "tuple[")) or not path:
            path += f".{part}" if path else part
    return path or None


def _describe(problem: ErrorDetails) -> str:
    field = _field(problem)
    message = problem["msg"].removeprefix("Value error, ")
    if field is None:
        return message
    if problem["type"] == "missing":
        return f"{field}: this field is required"
    shown = repr(problem["input"])
    if len(shown) > _MAX_SHOWN_CHARS:
        shown = f"{shown[:_MAX_SHOWN_CHARS]}..."
    return f"{field}: {message} (got {shown})"
