"""Errors of the HTTP interface, in OpenAI's form."""

from collections.abc import Iterable
from typing import Any

from jaxllm.server.model_client import ModelError

RETRY_AFTER_S = 2
_ANTHROPIC_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
                    413: "request_too_large", 429: "rate_limit_error",
                    503: "overloaded_error"}  # fmt: skip


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

    def format(self, path: str) -> dict[str, Any]:
        """Return the body of the answer to a request for a path."""
        return self.as_anthropic() if "/messages" in path else self.body

    def as_anthropic(self) -> dict[str, Any]:
        """Return the body in the form of Anthropic's interface."""
        other = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(self.status, other)
        return {"type": "error", "error": {"type": kind, "message": str(self)}}

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


def unknown_model(name: str, known: Iterable[str]) -> ApiError:
    """Return the error of a request for a model that is not served."""
    message = f"the model {name!r:.80} does not exist; there are: {', '.join(known)}"
    return ApiError(404, message, type="not_found_error", param="model", code="model_not_found")


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
