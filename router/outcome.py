"""How a request can end: one closed list, which is also the metric label, and the errors a client is told."""

from typing import Literal

import msgspec

Outcome = Literal[
    "ok",  # answered to its end
    "invalid",  # 400, 405, 408: the request itself
    "unauthorized",  # 401
    "not_found",  # 404
    "too_large",  # 413
    "over_budget",  # 429 at once: the class's queue is full or its wait too long
    "queue_deadline",  # 429 after waiting in the class's queue
    "overloaded",  # 429: the cluster itself refused
    "no_cluster",  # 503: no healthy cluster
    "draining",  # 503, or a framed error: this router is going down
    "deadline",  # 504, or a framed error: the time for a request ran out
    "broken",  # framed error: the cluster was lost after tokens had gone out
    "failed",  # 500, or a framed error: a fault of ours
    "cancelled",  # the client went away
]

_TYPES: dict[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorDetail


class ApiError(Exception):
    """A request ends without its answer: status and body before the first byte, a framed error object after it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        outcome: Outcome,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.outcome: Outcome = outcome
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> ErrorBody:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return ErrorBody(error=ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code))


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400, naming the field."""
    return ApiError(400, message, outcome="invalid", param=param, code=code)


def unsupported(param: str, what: str) -> ApiError:
    """400 for a field that is known but not served: never silence."""
    return invalid(param, f"{param}: {what} is not supported by this server.", "unsupported_parameter")
