"""POST /v1/score: losses of a text of any length, per token, per word and per document."""

import asyncio
import json
import math
import re
import threading
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from longspan.errors import DataError, LongspanError
from longspan.scoring.losses import sliding_losses, stream_losses
from longspan.scoring.score import default_method
from longspan.serving.errors import RATE_LIMIT, ApiError
from longspan.serving.feed import disconnected
from longspan.serving.models import Served
from longspan.serving.openai_types import ScoreRequest
from longspan.serving.requests import parse, server_of

router = APIRouter()
WORD = re.compile(rb"\s*\S+\s*\Z|\s*\S+")
"""A word with the white space before it; the last one also with the white space after it."""


@router.post("/v1/score")
async def score(request: Request) -> Response:
    server = server_of(request)
    asked = await parse(request, ScoreRequest)
    served = server.models.find(asked.model)
    texts = _texts(asked.text, served)
    if server.scoring >= server.settings.max_scoring:
        raise ApiError(
            429,
            f"{server.scoring} texts are being scored, as many as this server allows; try again later",
            type=RATE_LIMIT,
            code="queue_full",
            retry_after=server.settings.retry_after,
        )
    server.scoring += 1
    stop = threading.Event()
    work = asyncio.ensure_future(asyncio.to_thread(_score_all, served, texts, asked, stop))
    work.add_done_callback(lambda _: _leave(server))
    gone = asyncio.ensure_future(disconnected(request))
    try:
        timeout = server.settings.request_timeout
        await asyncio.wait({work, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return Response(work.result(), media_type="application/json")
        if gone.done():
            return Response(status_code=499)
        raise ApiError(408, f"the text was not scored within {timeout:g} seconds", code="timeout")
    except LongspanError as error:
        raise ApiError(400, f"text: {error}", param="text", code="invalid_value") from None
    finally:
        stop.set()
        gone.cancel()


def _leave(server: Any) -> None:
    server.scoring -= 1


def _texts(given: Any, served: Served) -> list[list[int]]:
    """Token ids of the documents, at least two each: the first token has no loss."""
    try:
        found = served.prompts(given)
    except ApiError as error:
        raise ApiError(400, error.message.replace("prompt", "text", 1), param="text", code=error.code) from None
    if any(len(ids) < 2 for ids in found):
        raise ApiError(400, "text: a document needs at least 2 tokens", param="text", code="invalid_value")
    return found


def _score_all(served: Served, texts: list[list[int]], asked: ScoreRequest, stop: threading.Event) -> bytes:
    """The answer as JSON, made in the thread that scores: it may have millions of numbers."""
    documents = [_score(served, np.array(ids), asked, stop) for ids in texts]
    nats, scored = (sum(document[key] for document in documents) for key in ("nats", "scored"))
    size = sum(document["bytes"] for document in documents)
    answer = {
        "object": "score",
        "model": served.name,
        "documents": documents,
        "scored": scored,
        "nats": nats,
        "bits_per_token": nats / scored / math.log(2),
        "bits_per_byte": nats / size / math.log(2) if size else None,
    }
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def _score(served: Served, ids: Any, asked: ScoreRequest, stop: threading.Event) -> dict[str, Any]:
    """One document. Its first token has no loss."""
    model, reading = served.text.model, served.text.reading
    method = default_method(model, reading)
    chunks = (sliding_losses if method == "sliding" else stream_losses)(model, ids, reading)
    losses = np.empty(len(ids) - 1, np.float32)
    for chunk in chunks:
        if stop.is_set():
            raise DataError("the client disconnected")
        losses[chunk.begin : chunk.begin + len(chunk.losses)] = chunk.losses
    if not np.isfinite(losses).all():
        raise DataError("the losses are not finite: the weights are damaged, or too large for this precision")
    pieces = [served.text.tokenizer.decode_bytes([token]) for token in ids]
    nats, size = float(losses.sum(dtype=np.float64)), sum(len(piece) for piece in pieces[1:])
    found: dict[str, Any] = {
        "tokens": len(ids),
        "scored": len(losses),
        "bytes": size,
        "method": method,
        "nats": nats,
        "bits_per_token": nats / len(losses) / math.log(2),
        "bits_per_byte": nats / size / math.log(2) if size else None,
    }
    values = [None, *(round(float(loss), 6) for loss in losses)]
    if asked.tokens:
        found["token_losses"] = values
    if asked.words:
        found["words"] = words(pieces, values)
    return found


def words(pieces: list[bytes], losses: list[float | None]) -> list[dict[str, Any]]:
    """The loss of every word: the sum over the tokens that begin in it. The white space before a word belongs to it."""
    text = b"".join(pieces)
    found: list[dict[str, Any]] = [
        {"text": match[0].decode("utf-8", errors="replace"), "begin": match.start(), "end": match.end(), "nats": 0.0}
        for match in WORD.finditer(text)
    ]
    place = index = 0
    for piece, loss in zip(pieces, losses, strict=True):
        while index + 1 < len(found) and found[index]["end"] <= place:
            index += 1
        if found:
            found[index]["nats"] += loss or 0.0
        place += len(piece)
    return found
