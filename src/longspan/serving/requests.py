"""What routes need from a request: the server it belongs to and its parsed body."""

from typing import TYPE_CHECKING, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from longspan.serving.errors import validation_error

if TYPE_CHECKING:
    from longspan.serving.server import Server

Body = TypeVar("Body", bound=BaseModel)


def server_of(request: Request) -> "Server":
    found: Server = request.app.state.server
    return found


async def parse(request: Request, kind: type[Body]) -> Body:
    """The body as `kind`. An empty body is an empty object."""
    try:
        return kind.model_validate_json(await request.body() or b"{}")
    except ValidationError as error:
        raise validation_error(error) from None
