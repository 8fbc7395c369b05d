"""The sampling parameters of a request as the engine needs them."""

import secrets
from collections.abc import Callable

from longspan.decoding.choosing import Choosing, Draws
from longspan.serving import work
from longspan.serving.errors import ApiError
from longspan.serving.models import Served
from longspan.serving.openai_types import Sampled
from longspan.serving.work import Choice, Event

MOST_STOPS = 16
LONGEST_STOP = 1024


def choosing(request: Sampled, served: Served) -> Choosing:
    bias: dict[int, float] = {}
    for name, value in (request.logit_bias or {}).items():
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < served.vocabulary):
            raise ApiError(
                400,
                f"logit_bias: {name[:40]!r} is not a token id between 0 and {served.vocabulary - 1}",
                param="logit_bias",
                code="invalid_value",
            )
        bias[int(name)] = value
    temperature = 1.0 if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    return Choosing(temperature, top_p, request.presence_penalty or 0.0, request.frequency_penalty or 0.0, bias)


def stops(request: Sampled) -> list[str]:
    found = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(found) > MOST_STOPS or any(not 0 < len(stop) <= LONGEST_STOP for stop in found):
        raise ApiError(
            400,
            f"stop: must be at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters",
            param="stop",
            code="invalid_value",
        )
    return found


def max_tokens(request: Sampled, served: Served) -> int:
    count = 16 if request.max_tokens is None else request.max_tokens
    if count > served.settings.max_tokens:
        raise ApiError(
            400,
            f"max_tokens={count} is more than the limit of {served.settings.max_tokens}",
            param="max_tokens",
            code="invalid_value",
        )
    return count


def seed_of(request: Sampled) -> int:
    return secrets.randbits(63) if request.seed is None else request.seed


def make_choice(
    request: Sampled,
    served: Served,
    emit: Callable[[Event], None],
    draws: Draws,
    *,
    held: bytes = b"",
    logprobs: int | None = None,
    keep: bool = False,
) -> Choice:
    return work.choice(
        emit,
        choosing=choosing(request, served),
        draws=draws,
        stops=stops(request),
        held=held,
        max_tokens=max_tokens(request, served),
        logprobs=logprobs,
        keep=keep,
    )
