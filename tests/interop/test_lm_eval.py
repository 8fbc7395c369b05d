"""lm-eval gives the scores of longspan, on local files and offline."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.decoding.sampling import Sampling
from longspan.errors import ConfigError, DataError
from longspan.text_model import TextModel
from longspan.tokenizers import ByteTokenizer
from tests.support import build

pytest.importorskip("lm_eval")
pytest.importorskip("datasets")

PAIRS = [("The cat sees itself.", "The cat sees himself."), ("Boys play.", "Boys plays."), ("A b c.", "A b d.")]
PASSAGES = ["She went to the gate and opened the gate", "one two three two one"]
TEXTS = ["Über den Bergen war es still, und der Mond schien auf das Dach. " * 2, "short"]


@pytest.fixture(scope="module")
def model() -> TextModel:
    values = {"vocabulary": 256, "layers": 2, "width": 16, "heads": 2, "memory": 20, "segment": 16}
    return TextModel(build("longspan-xl", values), ByteTokenizer())


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows: dict[str, list[dict[str, Any]]] = {
        "blimp": [{"sentence_good": good, "sentence_bad": bad} for good, bad in PAIRS],
        "lambada": [{"text": text} for text in PASSAGES],
        "wikitext": [{"text": text} for text in TEXTS],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {name: tmp_path / f"{name}.jsonl" for name in rows}


def nats(model: TextModel, text: str | bytes) -> np.ndarray:
    found = model.score(text).losses
    assert found is not None
    return found.astype(np.float64)


def test_scores_equal_ours(model: TextModel, files: dict[str, Path]) -> None:
    from longspan.interop.lm_eval import evaluate

    results = evaluate(model, [f"{name}={path}" for name, path in files.items()], batch_size=2)["results"]
    better = [nats(model, "\n" + good).sum() < nats(model, "\n" + bad).sum() for good, bad in PAIRS]
    assert results["blimp"]["acc,none"] == pytest.approx(np.mean(better))
    words = [len((" " + text.split(" ")[-1]).encode()) for text in PASSAGES]
    last = [nats(model, text)[-count:].sum() for text, count in zip(PASSAGES, words, strict=True)]
    assert results["lambada"]["perplexity,none"] == pytest.approx(math.exp(np.mean(last)), rel=1e-5)
    total = sum(nats(model, "\n" + text).sum() for text in TEXTS)
    size = sum(len(text.encode()) for text in TEXTS)
    assert results["wikitext"]["bits_per_byte,none"] == pytest.approx(total / size / math.log(2), rel=1e-6)


def test_without_memory_texts_are_read_in_the_windows_of_lm_eval(files: dict[str, Path]) -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    from longspan.interop.lm_eval import evaluate

    values = {"vocabulary": 256, "layers": 1, "width": 16, "heads": 2, "segment": 16}
    model = TextModel(build("vanilla", values), ByteTokenizer())
    found = evaluate(model, [f"wikitext={files['wikitext']}"])["results"]["wikitext"]["bits_per_byte,none"]
    total = 0.0
    for data in (text.encode() for text in TEXTS):
        for window in get_rolling_token_windows(list(data), 10, 16, 1):
            context, new = make_disjoint_window(window)
            total += nats(model, bytes([*context, *new]))[-len(new) :].sum()
    assert found == pytest.approx(total / sum(len(text.encode()) for text in TEXTS) / math.log(2), rel=1e-6)


def test_generation_stops_before_the_first_stop_string(model: TextModel) -> None:
    from longspan.interop.lm_eval import LongspanLM

    adapter = LongspanLM(model)
    text = model.generate("Once", 40, temperature=0)
    assert adapter._generate("Once", {"max_gen_toks": 40}) == text
    stop = text[10:12]
    assert adapter._generate("Once", {"max_gen_toks": 40, "until": [stop, "never"]}) == text[: text.index(stop)]


def test_a_greedy_continuation_is_recognised(model: TextModel) -> None:
    from longspan.interop.lm_eval import LongspanLM

    ids = list(model.session("Once").write(5, Sampling(0.0)))
    other = [*ids[:4], (ids[4] + 1) % 256]
    context = list(b"Once")
    found = LongspanLM(model)._loglikelihood_tokens([(("", ""), context, ids), (("", ""), context, other)])
    assert [greedy for _, greedy in found] == [True, False]
    assert found[0][0] > found[1][0]


def test_wrong_tasks_are_one_sentence(model: TextModel, files: dict[str, Path]) -> None:
    from longspan.interop.lm_eval import evaluate

    with pytest.raises(ConfigError, match="blimb"):
        evaluate(model, ["blimb=x.jsonl"])
    with pytest.raises(DataError, match="nowhere"):
        evaluate(model, ["blimp=nowhere.jsonl"])
    with pytest.raises(ConfigError, match="limit=0"):
        evaluate(model, ["blimp"], limit=0)
