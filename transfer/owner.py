"""Whose KV moves: one attempt of one request. Another attempt is another owner."""

from typing import TypeAlias

from core.ids import Attempt, RequestId

Owner: TypeAlias = tuple[RequestId, Attempt]
