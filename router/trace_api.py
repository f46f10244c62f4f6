"""What operators ask about one request over HTTP."""

from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from core.ids import Attempt, RequestId
from core.trace import TraceEvent
from router.failures import TraceNotFoundError
from router.observed import request_id_of
from router.prepare import Prepared
from router.trace_control import ProcessTrace, TraceControl


@dataclass(frozen=True, slots=True)
class TraceAPI:
    """Records a request's arrival, and answers ``GET /v1/trace/{name}``."""

    control: TraceControl

    def begin(self, request: Request, prepared: Prepared, *, arrived_at: float) -> None:
        """``request`` arrived at ``arrived_at`` and was turned into ``prepared`` just now."""
        requests = tuple(spec.request_id for spec in prepared.specs)
        names = (prepared.response_id, request_id_of(request.scope))
        self.control.names.add(names, requests)
        recorder = self.control.recorder
        for spec in prepared.specs:
            owner = (spec.request_id, Attempt(0))
            recorder.record_at(arrived_at, owner, "arrived")
            recorder.record(owner, "tokenized", tokens=len(spec.prompt_token_ids))

    async def show(self, name: str) -> Response:
        """Tell what every process recorded of a request, on one clock.

        ``name`` is the ``id`` of a response or its ``x-request-id``; for another choice than the
        first, one of what the answer names in ``choices``. Times are seconds from the arrival.

        Raises:
            TraceNotFoundError: the router never saw it, or has forgotten it.
        """
        requests = self.control.names.requests(name)
        chosen = next((request for request in requests if request == name), requests[0])
        processes = await self.control.collect(chosen)
        if not processes:
            raise TraceNotFoundError(
                f"request {name!r:.150} is unknown here, or forgotten: the router keeps the last "
                f"{self.control.recorder.max_requests} (trace_requests)"
            )
        start_s = processes[0].events[0].at_s
        return JSONResponse(
            {
                "request_id": chosen,
                "choices": list[RequestId](requests),
                "processes": [_described(process, start_s) for process in processes],
            }
        )


def _described(process: ProcessTrace, start_s: float) -> dict[str, object]:
    return {
        "name": process.name,
        "role": process.role,
        "incarnation": process.incarnation,
        "status": _status(process),
        "uncertainty_s": round(process.uncertainty_s, 7),
        "events": [_entry(event, start_s) for event in process.events],
    }


def _status(process: ProcessTrace) -> str:
    if not process.is_reached:
        return "unreachable"
    return "ok" if process.events else "unknown"


def _entry(event: TraceEvent, start_s: float) -> dict[str, object]:
    return {
        "at_s": round(event.at_s - start_s, 7),
        "event": event.event,
        "attempt": event.attempt,
        "values": event.values,
    }
