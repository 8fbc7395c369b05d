"""longspan models in lm-eval, the evaluation harness of EleutherAI, with tasks for local JSONL files.

lm-eval finds no models of other packages, so this module calls its `simple_evaluate`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longspan.decoding.sampling import Sampling
from longspan.errors import ConfigError, DataError, UnknownNameError
from longspan.interop.hf.reading import Inputs, read
from longspan.scoring.score import score
from longspan.text_model import TextModel

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
try:
    import lm_eval
    import lm_eval.evaluator
    import yaml
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
except ImportError:
    raise ConfigError("lm-eval is not installed; install it with: pip install 'longspan[lm-eval]'") from None

TEMPLATES = Path(__file__).parent / "lm_eval_tasks"
Request = tuple[tuple[str, str], list[int], list[int]]


class LongspanLM(TemplateLM):  # type: ignore[misc]
    """A TextModel for lm-eval.

    A text without context begins with a newline, or with the token that ends documents. Rolling likelihoods are read
    as one stream through memory; without memory, in windows of a segment that do not overlap, as lm-eval's own models
    read them.
    """

    def __init__(self, model: TextModel, *, batch_size: int = 8) -> None:
        super().__init__()
        model.model.require_next_token()
        self.model, self.batch_size = model, batch_size

    @property
    def eot_token_id(self) -> int:
        tokenizer = self.model.tokenizer
        if tokenizer.document_end_id is not None:
            return tokenizer.document_end_id
        newline = tokenizer.encode("\n")
        if not len(newline):
            raise DataError("this tokenizer has no newline, which texts without context start with; use another model")
        return int(newline[0])

    @property
    def device(self) -> torch.device:
        return self.model.device

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:  # noqa: ARG002
        ids: list[int] = self.model.tokenizer.encode_prompt(string).tolist()
        return ids

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Request],
        disable_tqdm: bool = False,  # noqa: ARG002
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether greedy decoding would give it. Texts of similar length
        are read together. They are filled up at the end, which no earlier token sees."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda k: -len(requests[k][1]) - len(requests[k][2]))
        for begin in range(0, len(order), self.batch_size):
            chosen = order[begin : begin + self.batch_size]
            for k, result in zip(chosen, self._score([requests[k] for k in chosen]), strict=True):
                found[k] = result
        return found

    def _score(self, requests: Sequence[Request]) -> Iterator[tuple[float, bool]]:
        texts = [[*context, *continuation] for _, context, continuation in requests]
        width = max(len(text) for text in texts) - 1
        tokens = torch.zeros(len(texts), width, dtype=torch.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text) - 1] = torch.tensor(text[:-1])
        first = min(len(context) for _, context, _ in requests) - 1
        model = self.model.model
        with torch.inference_mode():
            state = model.initial_state(len(texts), trainable=False)
            logits = read(model, Inputs(tokens.to(self.device), keep=width - first), state).logits
            assert logits is not None
            for row, (_, context, continuation) in enumerate(requests):
                place = len(context) - 1 - first
                scores = logits[row, place : place + len(continuation)].float().log_softmax(-1)
                wanted = torch.tensor(continuation, device=scores.device)
                total = float(scores.gather(-1, wanted[:, None]).double().sum())
                yield total, bool((scores.argmax(-1) == wanted).all())

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
        model, totals = self.model.model, []
        stride = 1 if model.has_memory() else model.reading.segment
        for request in requests:
            ids = np.array([self.eot_token_id, *self.tok_encode(request.args[0])], self.model.tokenizer.dtype)
            found = score(model, ids, stride=stride) if len(ids) > 1 else None
            totals.append(0.0 if found is None else -found.nats * found.scored)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, options: Mapping[str, Any]) -> str:
        """Text after the context, until one of the strings in `until`, which is not part of it."""
        until = options.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        sampled = bool(options.get("do_sample", float(options.get("temperature", 0.0)) > 0))
        sampling = Sampling(
            float(options.get("temperature", 1.0)) if sampled else 0.0,
            int(options.get("top_k", 0)),
            float(options.get("top_p", 1.0)),
        )
        session = self.model.session(context)
        self.model.echo(session, context)
        text = ""
        for piece in self.model.stream(session, int(options.get("max_gen_toks", 256)), sampling):
            text += piece
            ends = [text.find(stop) for stop in stops if stop in text]
            if ends:
                return text[: min(ends)]
        return text


def local_task(name: str, path: Path) -> dict[str, Any]:
    """The task `name` for a local JSONL file: blimp, lambada or wikitext."""
    known = {file.stem: file for file in TEMPLATES.glob("*.yaml")}
    if name not in known:
        raise UnknownNameError(
            "task for local files", name, known, otherwise="or use --include with your own YAML tasks"
        )
    if not path.is_file():
        raise DataError(f"{name}={path} is not a file; use a JSONL file")
    task: dict[str, Any] = yaml.safe_load(known[name].read_text(encoding="utf-8"))
    return task | {"dataset_kwargs": {"data_files": {"test": str(path.resolve())}}}


@contextmanager
def without_commit(evaluator: Any) -> Iterator[None]:
    """lm-eval does not ask git for the commit of the current folder: it is of no use, and outside of a repository git
    prints `fatal: ...`."""
    name = "get_git_commit_hash"
    before = vars(evaluator).get(name)
    setattr(evaluator, name, lambda: None)
    try:
        yield
    finally:
        if before is None:
            delattr(evaluator, name)
        else:
            setattr(evaluator, name, before)


def evaluate(
    model: TextModel,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    batch_size: int = 8,
    include: str | Path | None = None,
) -> dict[str, Any]:
    """The results of lm-eval. A task is the name of one of lm-eval, or NAME=FILE.jsonl for a local file with the name
    blimp, lambada or wikitext. `include` is a folder with further YAML tasks."""
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit} must be at least 1")
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1")
    chosen: list[Any] = []
    for task in tasks:
        name, equals, path = task.partition("=")
        chosen.append(local_task(name, Path(path)) if equals else name)
    # The thousands of tasks of lm-eval take a while to list, so only if one of them is named.
    named = any(isinstance(task, str) for task in chosen)
    manager = TaskManager(include_path=None if include is None else str(include), include_defaults=named)
    for task in chosen:
        if isinstance(task, str) and not manager.match_tasks([task]):
            raise ConfigError(f"lm-eval has no task called {task!r}; for a local file write {task}=FILE.jsonl")
    with without_commit(lm_eval.evaluator):
        results: dict[str, Any] | None = lm_eval.simple_evaluate(
            LongspanLM(model, batch_size=batch_size),
            tasks=chosen,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=False,
        )
    return results or {}
