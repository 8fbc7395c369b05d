"""The analyses of the page as jobs, and their results as JSON."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from longspan.decoding.session import TextStream
from longspan.experiments.attention_links import AttentionLinks
from longspan.experiments.memory_gain import Gain, MemoryComparison, with_memory
from longspan.models.families import name_of
from longspan.scoring.running import RunningScore
from longspan.serving.models import Served
from longspan.serving.page.jobs import Job
from longspan.text_model import TextModel

POINTS = 240
"""Points of a curve, at most."""
POINT_BYTES = 48
"""Bytes per point, at least: fewer are noise."""
FAR = 32
"""Tokens back from which attention is called far."""
RANKED = 25
PASSAGES = 12
AROUND = 32
"""Bytes shown before and after a place in a text."""


def describe(served: Served) -> dict[str, Any]:
    """What the page says about a model."""
    text = served.text
    return {
        "id": served.name,
        "family": name_of(text.model),
        "parameters": text.parameter_count,
        "unit": text.tokenizer.unit,
        "reading": asdict(text.reading),
        "remembers": text.has_memory(),
        "memory_can_change": "memory" in text.model.settings,
        "state_bytes": text.initial_state(1, trainable=False, filled=True).nbytes_per_row(),
    }


def token_texts(text: TextModel, ids: Sequence[int]) -> list[str]:
    """The text that each token completes: a token inside a character gives an empty string."""
    stream = TextStream()
    found = [stream.push(text.tokenizer.decode_bytes([token])) for token in ids]
    if found:
        found[-1] += stream.close()
    return found


def look(served: Served, content: str, memory: int | None, most: int) -> Job:
    text = served.text
    ids = text.tokenizer.encode(content)[:most]
    reading = None if memory is None else with_memory(text.model, memory)
    links = AttentionLinks(text.model, ids, reading)
    pieces = token_texts(text, ids.tolist())

    def steps() -> Iterator[int]:
        yield from links.read()
        if links.has_attention:
            yield from (len(ids) + done for done in links.prepare())

    def view(finished: bool) -> dict[str, Any]:
        count = links.read_tokens
        return {
            "tokens": pieces if finished else pieces[:count],
            "complete": count == len(ids),
            "bits": [None, *_rounded(links.nats[1:count] / math.log(2))],
            "layers": links.layers,
            "heads": links.heads,
            "segment": text.reading.segment,
            "memory": links.reading.memory,
            "family": name_of(text.model),
            "remembers": text.has_memory(),
        }

    total = len(ids) * 2 - 1 if links.has_attention else len(ids)
    return Job("look", steps(), total, view, subject=(served, links))


def look_at(served: Served, links: AttentionLinks, token: int, layer: int | None, head: int | None) -> dict[str, Any]:
    """The candidates of a token, the weights of the tokens before it, and what it got from later ones."""
    found: dict[str, Any] = {"token": token, "earlier": None, "later": None, "far": None}
    if links.has_attention:
        found["earlier"] = _rounded(links.earlier(token, layer, head), 7)
        found["far"] = _rounded(links.far_shares(token, FAR))
        if links.read_tokens == len(links.ids) and (links.is_prepared(layer, head) or layer is not None):
            found["later"] = _rounded(links.later(token, layer, head), 7)
    chances = zip(links.candidates[token].tolist(), links.probabilities[token].tolist(), strict=True)
    found["candidates"] = [
        {"text": served.name_of(one), "probability": round(chance, 6), "is_actual": one == int(links.ids[token])}
        for one, chance in (chances if token else ())
        if one < served.vocabulary
    ]
    return found


def compare(ways: Sequence[tuple[Served, int | None]], content: str) -> Job:
    """Ways to read: a model, and its memory if it is not the model's own."""
    readings = [
        (served.text, served.text.reading if memory is None else with_memory(served.text.model, memory))
        for served, memory in ways
    ]
    comparison = MemoryComparison(content.encode(), readings)
    scores, text = comparison.scores, ways[0][0].text

    def view(finished: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"ways": [_way(score, *way) for score, way in zip(scores, ways, strict=True)]}
        if finished:
            data, others = scores[0].data, range(1, len(ways))
            found["tokens"] = token_texts(text, scores[0].ids.tolist())
            found["helped_words"] = [_gains(comparison.helped_words(k, RANKED), data) for k in others]
            if comparison.same_tokens:
                found["gains"] = [_rounded(comparison.gains(k)) for k in others]
                found["helped_tokens"] = [_gains(comparison.helped_tokens(k, RANKED), data) for k in others]
        return found

    return Job("compare", comparison.read(), comparison.total, view)


def memory_curve(served: Served, content: str, memories: Sequence[int], sample: int) -> Job:
    """Bits against memory length, from the middle of a text."""
    data = content.encode()
    begin = max(0, (len(data) - sample) // 2)
    part = data[begin : begin + sample].decode(errors="ignore")
    job = compare([(served, memory) for memory in memories], part)
    inner = job.view
    job.kind, job.view = "memory", lambda _: {**inner(False), "bytes": len(part.encode())}
    return job


def measure(served: Served, content: str) -> Job:
    text = served.text
    score = RunningScore(text.model, text.tokenizer, text.tokenizer.encode(content), text.reading)

    def view(_: bool) -> dict[str, Any]:
        places, bits = score.curve(max(2, min(POINTS, len(score.data) // POINT_BYTES)))
        return {
            "bytes": len(score.data),
            "bytes_read": score.bytes_read if score.scored else 0,
            "tokens": len(score.ids),
            "bits_per_byte": _number(score.bits_per_byte),
            "bits_per_token": _number(score.nats / max(score.scored, 1) / math.log(2)),
            "method": score.method,
            "curve": {"places": places.tolist(), "bits": _rounded(bits)},
            "passages": [
                {**_place(score.data, one.begin, one.end), "bits_per_byte": round(one.bits_per_byte, 4)}
                for one in score.passages(PASSAGES)
            ],
        }

    steps = (score.bytes_read for _ in score.read())
    return Job("measure", steps, len(score.data), view)


def _way(score: RunningScore, served: Served, memory: int | None) -> dict[str, Any]:
    places, bits = score.running_bits(POINTS)
    return {
        "model": served.name,
        "memory": memory,
        "reading": asdict(score.reading),
        "method": score.method,
        "bits_per_byte": _number(score.bits_per_byte if score.scored else math.nan),
        "places": places.tolist(),
        "bits": _rounded(bits),
    }


def _gains(found: Sequence[Gain], data: bytes) -> list[dict[str, Any]]:
    return [
        {**_place(data, one.begin, one.end), "before": round(one.before, 3), "after": round(one.after, 3)}
        for one in found
    ]


def _place(data: bytes, begin: int, end: int) -> dict[str, Any]:
    """A part of a text with what is around it."""
    return {
        "begin": begin,
        "end": end,
        "left": data[max(0, begin - AROUND) : begin].decode(errors="ignore"),
        "text": data[begin:end].decode(errors="replace"),
        "right": data[end : end + AROUND].decode(errors="ignore"),
    }


def _rounded(values: Any, digits: int = 4) -> list[Any]:
    found: list[Any] = np.asarray(values, np.float64).round(digits).tolist()
    return found


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
