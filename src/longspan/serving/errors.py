"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

INVALID, AUTHENTICATION, NOT_FOUND = "invalid_request_error", "authentication_error", "not_found_error"
RATE_LIMIT, CONFLICT, SERVER = "rate_limit_error", "conflict_error", "server_error"


class ApiError(Exception):
    """A refused request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return JSONResponse(self.body(), self.status, headers)


def validation_error(error: ValidationError) -> ApiError:
    """The first problem of a request body, with the name of the parameter."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    param = str(first["loc"][0])[:64] if first["loc"] else None
    if first["type"] == "extra_forbidden":
        name = ".".join(map(str, first["loc"]))[:64]  # it may be inside another, such as stream_options
        return ApiError(
            400, f"the parameter {name!r} is not supported; leave it out", param=name, code="unsupported_parameter"
        )
    return ApiError(400, f"{param or 'the body'}: {first['msg']}", param=param, code="invalid_value")
