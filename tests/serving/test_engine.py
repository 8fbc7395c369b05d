"""The decode loop without HTTP: byte-equality under load, queues, cancellation and failures."""

import os
import random
from typing import Any

import pytest
import torch

from longspan.decoding.choosing import Choosing, Draws
from longspan.serving.engine import Closed, Engine, QueueFull
from longspan.serving.work import Finished, Piece, Work, choice
from longspan.text_model import TextModel
from tests.serving.conftest import tiny

TORTURE = bool(os.environ.get("LONGSPAN_TORTURE"))
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "memory": ("transformer-xl", {"memory": 20, "same_length": True}),
    "no memory": ("transformer-xl", {"memory": 0}),
    "recurrent": ("rotary", {"memory": 12}),
}


class Job:
    """A random request and what it produced."""

    def __init__(self, number: int, longest: int = 30) -> None:
        source = random.Random(number)
        self.prompt = [source.randrange(256) for _ in range(source.choice([1, 2, 15, 16, 17, 40, 61]))]
        self.settings = {
            "choosing": Choosing(
                temperature=source.choice([0.0, 0.7, 1.3]),
                top_p=source.choice([1.0, 0.8]),
                presence_penalty=source.choice([0.0, 0.5]),
                bias=source.choice([{}, {65: 3.0}]),
            ),
            "seed": source.randrange(10**9),
            "max_tokens": source.randrange(longest // 2, longest),
            "logprobs": source.choice([None, 2]),
        }
        self.events: list[Any] = []
        self.number = number

    def work(self) -> Work:
        self.events = []
        return Work(self.prompt, [choice(self.events.append, **self.settings)])  # type: ignore[arg-type]

    @property
    def output(self) -> list[Any]:
        return [(e.token, e.text, e.logprob) for e in self.events if isinstance(e, Piece)]

    @property
    def finished(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Finished)


def alone(engine: Engine, job: Job) -> list[Any]:
    assert engine.idle()
    engine.submit(job.work())
    while engine.step():
        pass
    assert job.finished
    return job.output


@pytest.mark.parametrize("name", FAMILIES)
def test_output_under_load_equals_output_alone(name: str) -> None:
    """Jobs arrive at random steps, wait, share batches, move between them and are cancelled; every token, text and
    log-probability is equal to that of the engine with nothing else."""
    family, reading = FAMILIES[name]
    text = tiny(3, family, **reading)
    count = 60 if TORTURE else 12 if name == "memory" else 5
    jobs = [Job(number, 30 if TORTURE or name == "memory" else 10) for number in range(count)]
    empty = Engine(text, width=4, rows=8)
    expected = [alone(empty, job) for job in jobs]
    engine, source, waiting = Engine(text, width=4, rows=10 if TORTURE else 6, queue=100), random.Random(1), list(jobs)
    cancelled = set()
    while waiting or not engine.idle():
        while waiting and source.random() < 0.5:
            job = waiting.pop()
            work = job.work()
            engine.submit(work)
            if source.random() < 0.15:
                cancelled.add(job.number)
                work.cancel()
        engine.step()
    for job, wanted in zip(jobs, expected, strict=True):
        assert job.finished
        if job.number not in cancelled:
            assert job.output == wanted
    assert len(cancelled) < count
    assert all(not batch.active for batch in engine.batches)


def script(number: int) -> list[dict[str, Any]]:
    """Three turns of a session: some end at a stop string, some with the step before not yet read."""
    source = random.Random(number)
    return [
        {
            "prompt": [source.randrange(256) for _ in range(source.choice([1, 15, 30]))],
            "choosing": Choosing(
                temperature=source.choice([0.0, 0.8, 1.2]),
                top_p=source.choice([1.0, 0.8]),
                presence_penalty=0.5 if source.random() < 0.1 else 0.0,
            ),
            "stops": ["a", "e"] if source.random() < 0.5 else [],
            "max_tokens": source.randrange(1, 25),
            "logprobs": 2 if source.random() < 0.1 else None,
        }
        for _ in range(3)
    ]


def play(engine: Engine, numbers: list[int]) -> dict[int, list[Any]]:
    """Sessions at the same time; every turn continues the stream that the last one returned."""
    output: dict[int, list[Any]] = {number: [] for number in numbers}
    turns = {number: iter(script(number)) for number in numbers}
    events: dict[int, list[Any]] = {number: [] for number in numbers}
    draws = {number: Draws(number) for number in numbers}
    last: dict[int, Finished] = {}
    waiting, source = set(numbers), random.Random(7)
    while waiting or not engine.idle():
        for number in [number for number in numbers if number in waiting and source.random() < 0.5]:
            waiting.remove(number)
            body = next(turns[number], None)
            if body is not None:
                before = last.get(number)
                prompt = [*([before.pending] if before else []), *body.pop("prompt")]
                own = choice(events[number].append, draws=draws[number], keep=True, **body)
                engine.submit(Work(prompt, [own], stream=before.stream if before else None))
        engine.step()
        for number, found in events.items():
            if found and isinstance(found[-1], Finished):
                last[number] = end = found[-1]
                assert end.stream is not None
                output[number] += [(e.token, e.text, e.logprob) for e in found if isinstance(e, Piece)]
                output[number].append((end.reason, end.pending, end.held, end.stream.read, draws[number].count))
                found.clear()
                waiting.add(number)
    return output


FORMS = {
    "same length": ("transformer-xl", {"memory": 20, "same_length": True}, "cpu"),
    "convolution": ("longspan-xl", {"memory": 12}, "cpu"),
    "graph": ("transformer-xl", {"memory": 20, "same_length": True}, "cuda"),
    "graph with convolution": ("longspan-xl", {"memory": 12}, "cuda"),
}


@pytest.mark.parametrize(
    "form", [pytest.param(name, marks=[pytest.mark.gpu] if FORMS[name][2] == "cuda" else []) for name in FORMS]
)
def test_steps_launched_ahead_change_nothing(form: str) -> None:
    """The next step is launched before the tokens of the last one are known. Streams that have ended by then return
    to where they were: tokens, log-probabilities, random numbers, and everything in later turns."""
    family, reading, device = FORMS[form]
    text = tiny(3, family, **({"convolution": 3} if "convolution" in form else {}), **reading)
    text.model.to(device)
    numbers = list(range(24 if TORTURE else 5))
    engine = Engine(text, width=4, rows=4)
    engine.ahead = False
    expected = {number: play(engine, [number])[number] for number in numbers}
    engine = Engine(text, width=4, rows=10)
    assert engine.ahead == (device == "cuda")
    engine.ahead = True
    assert play(engine, numbers) == expected
    assert all(not batch.active for batch in engine.batches)


def test_batches_are_emptied_into_others(text: TextModel) -> None:
    """Nine streams need three batches of four. When most have ended, the rest share one."""
    engine = Engine(text, width=4, rows=12)
    events: list[Any] = []
    lengths = [3, 3, 3, 30, 3, 3, 3, 30, 30]
    for n, length in enumerate(lengths):
        engine.submit(Work([n, 1, 2], [choice(events.append, seed=n, max_tokens=length)]))
    while engine.statistics.generated_tokens < 40:
        engine.step()
    assert sorted(batch.active for batch in engine.batches) == [0, 0, 3]


def test_a_long_prompt_does_not_block_others(text: TextModel) -> None:
    engine = Engine(text, width=4, rows=8)
    long, short = [], []  # type: ignore[var-annotated]
    engine.submit(Work([1] * 16 * 50, [choice(long.append, max_tokens=1)]))
    engine.submit(Work([1] * 3, [choice(short.append, max_tokens=5)]))
    for _ in range(8):
        engine.step()
    assert isinstance(short[-1], Finished)
    assert not long


def test_the_queue_is_limited(text: TextModel) -> None:
    engine = Engine(text, width=2, rows=2, queue=3)
    works = [Work([1], [choice(lambda _: None, max_tokens=2)]) for _ in range(5)]
    for work in works:
        engine.submit(work)
    with pytest.raises(QueueFull):
        engine.submit(Work([1], [choice(lambda _: None)]))
    assert engine.load == 5
    while engine.step():
        pass
    assert engine.load == 0
    # All or nothing: a request with more choices than rows and queue is refused, and leaves nothing.
    with pytest.raises(QueueFull):
        engine.submit(*(Work([1], [choice(lambda _: None)]) for _ in range(6)))
    assert engine.idle()


def test_more_choices_than_rows(text: TextModel) -> None:
    engine, events = Engine(text, width=2, rows=3, queue=50), []  # type: ignore[var-annotated]
    engine.submit(Work([1, 2], [choice(events.append, seed=n, max_tokens=4) for n in range(11)]))
    while engine.step():
        pass
    assert sum(isinstance(event, Finished) for event in events) == 11


def test_cancelled_work_stops_within_one_step(text: TextModel) -> None:
    """In the queue, in the prompt and in the stream."""
    engine, events = Engine(text, width=2, rows=2, queue=20), []  # type: ignore[var-annotated]
    running = [Work([1] * 3, [choice(events.append, max_tokens=1000)]) for _ in range(2)]
    reading = Work([1] * 500, [choice(events.append, max_tokens=1000)])
    queued = Work([1] * 5, [choice(events.append, max_tokens=1000)])
    engine.submit(running[0], reading)
    for _ in range(3):
        engine.step()
    engine.submit(running[1], queued)
    assert engine.running
    assert engine.reading
    for work in (*running, reading, queued):
        work.cancel()
    before = len([event for event in events if isinstance(event, Piece)])
    engine.step()
    assert engine.idle()
    assert not engine.running
    assert len([event for event in events if isinstance(event, Piece)]) == before
    assert all(not batch.active for batch in engine.batches)


def test_a_failure_is_told(text: TextModel) -> None:
    """Every stream ends with an error, the engine refuses work, and it says that it is not alive."""
    engine, events = Engine(text, width=2, rows=2), []  # type: ignore[var-annotated]
    engine._launch = lambda *_: 1 / 0  # type: ignore[assignment, return-value, method-assign]
    engine.submit(*(Work([1], [choice(events.append)]) for _ in range(4)))
    with pytest.raises(ZeroDivisionError):
        engine._run()
    ended = [event for event in events if isinstance(event, Finished)]
    assert [event.reason for event in ended] == ["error"] * 4
    assert "ZeroDivisionError" in ended[0].message
    assert not engine.alive
    with pytest.raises(Closed):
        engine.submit(Work([1], [choice(events.append)]))


def test_a_failure_while_a_prompt_is_read_is_told(text: TextModel) -> None:
    engine, events = Engine(text, width=2, rows=2), []  # type: ignore[var-annotated]
    engine.batches[0].prefill = lambda *_: 1 / 0  # type: ignore[assignment, return-value, method-assign]
    engine.submit(*(Work([1, 2], [choice(events.append)]) for _ in range(3)))
    with pytest.raises(ZeroDivisionError):
        engine._run()
    assert [event.reason for event in events] == ["error"] * 3


def test_logits_that_are_not_finite_end_one_stream() -> None:
    text = tiny(5)
    with torch.no_grad():
        text.model.embedding.tables[0][7] = torch.nan  # type: ignore[union-attr, operator, index]
    engine, good, bad = Engine(text, width=2, rows=2), [], []  # type: ignore[var-annotated]
    engine.submit(
        Work([1, 2], [choice(good.append, max_tokens=5, choosing=Choosing(temperature=0.0, bias={7: -1000.0}))]),
        Work([1, 7], [choice(bad.append, max_tokens=5)]),
    )
    while engine.step():
        pass
    assert bad[-1].reason == "error"


def test_the_width_does_not_change_the_text(text: TextModel) -> None:
    """Rounding differs, the text of a greedy choice does not."""
    job = Job(3)
    job.settings["choosing"] = Choosing(temperature=0.0)
    tokens = [[token for token, _, _ in alone(Engine(text, width=width), job)] for width in (1, 4, 8)]
    assert tokens[0] == tokens[1] == tokens[2]


def test_closing_finishes_or_stops(text: TextModel) -> None:
    engine, events = Engine(text, width=2, rows=2), []  # type: ignore[var-annotated]
    engine.start()
    short = Work([1, 2], [choice(events.append, max_tokens=3)])
    endless = Work([1, 2], [choice(events.append, max_tokens=10**9, keep=True)])
    engine.submit(short, endless)
    engine.close(timeout=0.2)
    ended = [event for event in events if isinstance(event, Finished)]
    assert [event.reason for event in ended] == ["length", "length"]
    assert ended[-1].stream is not None
    assert not engine.alive
