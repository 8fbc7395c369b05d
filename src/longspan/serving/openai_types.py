"""The requests of the API. Unknown parameters are refused by name; values are not converted."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False


class Sampled(Strict):
    """What completions and sessions share."""

    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None


class CompletionRequest(Sampled):
    model: Annotated[str, Field(max_length=256)] | None = None
    prompt: Any = ""
    n: Annotated[int, Field(ge=1)] | None = 1
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = False


class ContinueRequest(Sampled):
    prompt: Any = ""


class CreateSession(Strict):
    model: Annotated[str, Field(max_length=256)] | None = None
    prompt: Any = ""
    seed: Seed | None = None


class ForkSession(Strict):
    seed: Seed | None = None


class Nothing(Strict):
    """A request without parameters."""


class ScoreRequest(Strict):
    model: Annotated[str, Field(max_length=256)] | None = None
    text: Any = ""
    tokens: bool = True
    """Return the loss of every token."""
    words: bool = False
    """Return the loss of every word."""


class TokenizeRequest(Strict):
    model: Annotated[str, Field(max_length=256)] | None = None
    prompt: str
    add_special_tokens: Literal[False] = False
    """Only false: no tokenizer here adds tokens to a prompt."""
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    model: Annotated[str, Field(max_length=256)] | None = None
    tokens: Any
