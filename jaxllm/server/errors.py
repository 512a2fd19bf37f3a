"""Errors of the HTTP interface, in OpenAI's form."""

from typing import Any

from jaxllm.server.model_client import ModelError

RETRY_AFTER_S = 2


class ApiError(Exception):
    """An answer with an error: status, message and OpenAI's fields."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        **more: Any,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {"message": message, "type": type, "param": param, "code": code, **more}
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers for clients that try again."""
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}


def invalid(message: str, param: str | None = None) -> ApiError:
    """Return the error of a request that is malformed."""
    return ApiError(400, message, param=param)


def unsupported(what: str, param: str | None = None) -> ApiError:
    """Return the error of a request for what this server does not do."""
    return ApiError(400, f"{what} is not supported", param=param, code="not_supported")


def from_model(error: ModelError) -> ApiError:
    """Return the answer to a request that the model's process refused."""
    message = str(error)
    if error.kind == "invalid":
        return invalid(message)
    if error.kind == "context":
        kind, code = "exceed_context_size_error", "context_length_exceeded"
        return ApiError(400, message, type=kind, code=code, param=None, **error.numbers)
    if error.kind == "overload":
        return ApiError(429, message, type="rate_limit_error", code="queue_full")
    if error.kind == "unavailable":
        return ApiError(503, message, type="unavailable_error")
    return ApiError(500, message, type="server_error")
