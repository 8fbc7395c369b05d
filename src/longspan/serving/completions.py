"""POST /v1/completions in OpenAI's shapes."""

import math
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from longspan.decoding.choosing import Draws
from longspan.decoding.session import TextStream
from longspan.serving.errors import ApiError
from longspan.serving.feed import EventStream, Feed, submit, unless_disconnected
from longspan.serving.models import Served
from longspan.serving.openai_types import CompletionRequest, Sampled
from longspan.serving.requests import parse, server_of
from longspan.serving.sampling import make_choice, seed_of
from longspan.serving.text import incomplete
from longspan.serving.work import Event, Piece, Prompt, TokenLogprob, Work

router = APIRouter()


@dataclass
class Answer:
    """What has been generated for one choice."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: int = 0
    reason: str | None = None
    cut: bool = False
    """It ended at a stop string, whose tokens are not shown."""

    @property
    def mean_logprob(self) -> float:
        own = [one.logprob for one in self.logprobs if one.logprob is not None]
        return sum(own) / len(own) if own else -math.inf


class Waiting:
    """Log-probabilities of a stream with stop strings. Those of text that is held back wait until it is sent."""

    def __init__(self, served: Served, prompt: Sequence[int]) -> None:
        """`prompt` is what the text begins with: nothing, unless the prompt is echoed."""
        self.decode = served.text.tokenizer.decode_bytes
        self.stream, self.found = TextStream(), list[tuple[int, TokenLogprob]]()
        self.place = len(self.stream.push(self.decode(list(prompt))))

    def push(self, one: TokenLogprob) -> None:
        self.found.append((self.place, one))
        self.place += len(self.stream.push(self.decode([one.token])))

    def ready(self, sent: int | None) -> tuple[int, list[TokenLogprob]]:
        """The place of the first of those that begin before `sent` characters (None: of all), and they."""
        count = sum(sent is None or place < sent for place, _ in self.found)
        ready, self.found = self.found[:count], self.found[count:]
        return (ready[0][0] if ready else 0), [one for _, one in ready]


class Completion:
    """One request: its works, and its answer as a whole or as a stream."""

    request: Sampled

    def __init__(self, request: CompletionRequest, served: Served) -> None:
        self.request, self.served = request, served
        self.n = request.n or 1
        self.best_of = self.n if request.best_of is None else request.best_of
        self.prompts = served.prompts("" if request.prompt is None else request.prompt)
        self.name_and_check()
        self._check_choices()
        self.feed = Feed()
        seed = seed_of(request)
        ranked = self.best_of > self.n
        logprobs = 0 if ranked and request.logprobs is None else request.logprobs
        self.works = []
        for p, tokens in enumerate(self.prompts):
            held = incomplete(served.text.tokenizer.decode_bytes(tokens[-8:]))
            choices = [
                make_choice(
                    request,
                    served,
                    self.feed.emitter(p * self.best_of + i),
                    Draws(seed + (i << 64)),
                    held=held,
                    logprobs=logprobs,
                )
                for i in range(self.best_of)
            ]
            echoed = request.logprobs if request.echo else None
            self.works.append(Work(tokens, choices, prompt_logprobs=echoed))
        self.count = len(self.prompts) * self.best_of

    def name_and_check(self) -> None:
        request = self.request
        self.id, self.created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        if request.stream_options is not None and not request.stream:
            raise _invalid("stream_options", "stream_options needs stream=true")

    def _check_choices(self) -> None:
        request = self.request
        if self.best_of < self.n:
            raise _invalid("best_of", f"best_of={self.best_of} must be at least n={self.n}")
        if request.stream and self.best_of > self.n:
            raise _invalid("best_of", f"best_of={self.best_of} cannot be streamed; leave out stream or best_of")
        total, most = len(self.prompts) * self.best_of, self.served.settings.max_choices
        if total > most:
            raise _invalid("n", f"{total} choices (prompts times best_of) are more than the limit of {most}")

    def echo(self, index: int) -> str:
        """The text of a prompt, if it is to be returned."""
        if not getattr(self.request, "echo", False):
            return ""
        return TextStream().push(self.served.text.tokenizer.decode_bytes(self.prompts[index // self.best_of]))

    def _is_cut(self, index: int) -> bool:
        """A finished choice ended at a stop string."""
        return self.works[index // self.best_of].choices[index % self.best_of].text.stopped

    def _waiting(self) -> list[Waiting]:
        if not self.request.stop or self.request.logprobs is None:
            return []
        echo = getattr(self.request, "echo", False)
        return [Waiting(self.served, self.prompts[i // self.best_of] if echo else ()) for i in range(self.count)]

    def events(self) -> AsyncIterator[tuple[int, Event]]:
        return self.feed.events(self.count)

    async def whole(self) -> dict[str, Any]:
        answers = [Answer() for _ in range(self.count)]
        async for index, event in self.events():
            answer = answers[index]
            if isinstance(event, Prompt):
                answer.text.append(self.echo(index))
                answer.logprobs.extend(event.logprobs or ())
            elif isinstance(event, Piece):
                answer.text.append(event.text)
                answer.tokens += 1
                if event.logprob is not None:
                    answer.logprobs.append(event.logprob)
            else:
                answer.text.append(event.text)
                answer.reason = event.reason
                answer.cut = self._is_cut(index)
        choices = []
        for p in range(len(self.prompts)):
            group = answers[p * self.best_of : (p + 1) * self.best_of]
            if self.best_of > self.n:
                group = sorted(group, key=lambda answer: answer.mean_logprob, reverse=True)[: self.n]
            choices.extend(group)
        body = []
        for i, answer in enumerate(choices):
            text = "".join(answer.text)
            logprobs = self._logprobs(answer.logprobs, 0, len(text) if answer.cut else None)
            body.append(self._choice(i, text, logprobs, answer.reason))
        return {**self._head(), "choices": body, "usage": self._usage(sum(a.tokens for a in answers))}

    async def stream(self) -> AsyncIterator[dict[str, Any]]:
        wants_usage = self.request.stream_options is not None and self.request.stream_options.include_usage
        extra: dict[str, Any] = {"usage": None} if wants_usage else {}
        offsets, generated, waiting = [0] * self.count, 0, self._waiting()
        async for index, event in self.events():
            reason, logprobs, begin = None, [], offsets[index]
            text = self.echo(index) if isinstance(event, Prompt) else event.text
            if isinstance(event, Prompt):
                logprobs = list(event.logprobs or ())
            elif isinstance(event, Piece):
                generated += 1
                logprobs = [] if event.logprob is None else [event.logprob]
            else:
                reason = event.reason
            if waiting and not isinstance(event, Prompt):
                for one in logprobs:
                    waiting[index].push(one)
                whole = reason is not None and not self._is_cut(index)
                begin, logprobs = waiting[index].ready(None if whole else offsets[index] + len(text))
            if text or logprobs or reason:
                shown = self._logprobs(logprobs, begin) if logprobs else None
                yield {**self._head(), "choices": [self._choice(index, text, shown, reason)], **extra}
            offsets[index] += len(text)
        if wants_usage:
            yield {**self._head(), "choices": [], "usage": self._usage(generated)}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.served.name}

    def _choice(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self, generated: int) -> dict[str, int]:
        prompt = sum(len(tokens) for tokens in self.prompts)
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def _logprobs(self, found: Sequence[TokenLogprob], offset: int, end: int | None = None) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        return logprobs_object(self.served, found, offset, end, top=self.request.logprobs > 0)


def logprobs_object(
    served: Served, found: Sequence[TokenLogprob], offset: int, end: int | None, *, top: bool
) -> dict[str, Any]:
    """OpenAI's four lists. Tokens that begin at `end` or later, those of a stop string, are left out."""
    shown: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [] if top else None, "text_offset": []}
    place, stream = offset, TextStream()
    for one in found:
        # `place` counts characters that are complete before this token.
        if end is not None and place >= end:
            break
        shown["tokens"].append(served.name_of(one.token))
        shown["token_logprobs"].append(one.logprob)
        shown["text_offset"].append(place)
        if top:
            likely = {served.name_of(token): value for token, value in one.top}
            if one.logprob is not None:
                likely.setdefault(served.name_of(one.token), one.logprob)
            shown["top_logprobs"].append(likely or None)
        place += len(stream.push(served.text.tokenizer.decode_bytes([one.token])))
    return shown


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    server = server_of(request)
    asked = await parse(request, CompletionRequest)
    completion = Completion(asked, server.models.find(asked.model))
    submit(completion.served.engine, completion.works, server.settings)
    if asked.stream:
        return EventStream(completion.stream(), completion.works, server.settings)
    whole = await unless_disconnected(request, completion.works, completion.whole(), server.settings)
    return JSONResponse(whole) if whole is not None else Response(status_code=499)
