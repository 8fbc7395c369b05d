"""Likelihoods against the model's own losses; features against its hidden states."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import longspan
from longspan.errors import ConfigError
from longspan.text_model import TextModel
from longspan.transfer import likelihood
from longspan.transfer.embed import embed, save_features
from longspan.transfer.likelihood import (
    NEUTRAL,
    Likelihood,
    blimp,
    copa,
    evaluate_tasks,
    lambada,
    likelihoods,
    spaced,
    wikitext2,
)
from longspan.transfer.model import TaskConfig, TaskModel
from longspan.transfer.tasks.wikitext import articles

LONG = "It was late, and the lamp was out. " * 3


def test_likelihoods_are_sums_of_losses(model: TextModel) -> None:
    pairs = [("", "a cat"), (LONG, " and so on"), ("x", "y")]
    for found, (context, continuation) in zip(likelihoods(model, pairs), pairs, strict=True):
        losses = model.score(f"\n{context}{continuation}").losses
        assert found.log_probability == pytest.approx(-float(losses[-len(continuation) :].sum()), abs=1e-3)


def test_a_model_without_memory_reads_a_segment() -> None:
    model = longspan.init("vanilla", layers=1, width=16, heads=2, reading={"segment": 8}, device="cpu")
    (found,) = likelihoods(model, [("one two three four ", "five")])
    assert found.log_probability == pytest.approx(-float(model.score("four five").losses[-4:].sum()), abs=1e-4)


def test_greedy(model: TextModel) -> None:
    context = "late"
    state = model.model.initial_state(1, trainable=False)
    tokens = torch.tensor([list(f"\n{context}".encode())])
    with torch.no_grad():
        likely = model.model(tokens, state)[0][0, -1].argmax().item()
    right, wrong = likelihoods(model, [(context, chr(likely)), (context, chr(likely ^ 1))])
    assert (right.greedy, wrong.greedy) == (True, False)


def test_tasks_by_hand(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"good": "ab", "bad": "abcdefghij", "paradigm": "p"}, {"good": "abcdefghij", "bad": "ab", "paradigm": "q"}]
    rows.append({"good": "ab", "bad": "ab", "paradigm": "q"})
    # Longer texts are less probable.
    found = blimp(model, rows)
    assert found["paradigms"] == {"p": 1.0, "q": 0.25}
    assert (found["accuracy"], found["accuracy_at_start"]) == (0.625, 0.625)
    questions = [{"premise": "a", "choice1": "bcdefghij", "choice2": "b", "label": 1}] * 2
    assert copa(model, questions)["accuracy"] == 1.0
    passages = [{"text": "one two", "target": "three"}, {"text": "a", "target": "b"}]
    nats = [-one.log_probability for one in likelihoods(model, [("one two", " three"), ("a", " b")])]
    assert lambada(model, passages)["perplexity"] == pytest.approx(math.exp(sum(nats) / 2))


WIKITEXT = """
 = Robert @-@ <unk> =~

 Robert , who was 21 @.@ 5 years old ( in 1 @,@ 999 ) , said : " Well @-@ known . " It 's Keats ' poem .

 = = Career = =~

 It isn 't long ; 5 % of $ 3 .
 = Second =~

 Short .
""".replace("~", " ")


@pytest.mark.parametrize(("count", "limit"), [(10, 6), (10, 3), (10, 10), (10, 99), (10, None), (67, 40)])
def test_a_limit_uses_rows_from_start_to_end(count: int, limit: int | None) -> None:
    found = [row["k"] for row in spaced([{"k": k} for k in range(count)], limit)]
    wanted = min(limit or count, count)
    assert len(set(found)) == wanted
    gaps = np.diff([*found, count])
    assert gaps.min() >= count // wanted
    assert gaps.max() <= -(-count // wanted)


def test_wikitext_as_prose(model: TextModel) -> None:
    """By hand, with headings as in lm-eval. Words are tokens with an end of each line, empty ones too."""
    first, second = articles(WIKITEXT)
    expected = [
        "= Robert-<unk> =",
        "",
        "Robert, who was 21.5 years old (in 1,999), said: \"Well-known.\" It's Keats' poem.",
        "",
        "== Career ==",
        "",
        "It isn't long; 5% of $3.",
    ]
    assert first["text"].splitlines() == expected
    assert second == {"text": "= Second =\n\nShort.", "words": 4 + 1 + 3}
    assert first["words"] + second["words"] == sum(len(line.split()) + 1 for line in WIKITEXT.splitlines())
    found = wikitext2(model, [first, second])
    nats = [-one.log_probability for one in likelihoods(model, [("", row["text"]) for row in (first, second)])]
    assert found["perplexity"] == pytest.approx(math.exp(sum(nats) / found["words"]), rel=1e-5)
    size = len(first["text"].encode()) + len(second["text"].encode())
    assert found["bits_per_byte"] == pytest.approx(sum(nats) / math.log(2) / size, rel=1e-5)


def test_wikitext_without_memory_is_read_in_windows(model: TextModel) -> None:
    plain = longspan.init("vanilla", layers=1, width=16, heads=2, reading={"segment": 8}, device="cpu")
    rows, nats = [{"text": "abcdefghijklmno", "words": 3}], 0.0
    found = wikitext2(plain, rows)
    for text, new in (("\nabcdefgh", 8), ("defghijkl", 4), ("ghijklmno", 3)):
        nats += float(plain.score(text).losses[-new:].sum())
    assert found["stride"] == 4
    assert math.log(found["perplexity"]) * 3 == pytest.approx(nats, rel=1e-5)
    every = wikitext2(plain, rows, stride=1)
    assert math.log(every["perplexity"]) * 3 == pytest.approx(plain.score("\nabcdefghijklmno").losses.sum(), rel=1e-5)
    assert every["perplexity"] != found["perplexity"]
    assert "stride" not in wikitext2(model, rows)
    for loaded, tasks, stride in ((plain, "wikitext2", 9), (model, "wikitext2", 4), (plain, "copa", 4)):
        with pytest.raises(ConfigError, match=f"stride={stride}"):
            evaluate_tasks(loaded, [tasks], stride=stride)


def test_a_masked_language_model_has_no_likelihoods() -> None:
    shape = {"layers": 1, "width": 16, "heads": 2, "positions": 16}
    bert = longspan.init("bert", device="cpu", reading={"segment": 16}, **shape)
    task = TaskModel(TaskConfig(base_family="bert", base=shape))
    for model in (bert, TextModel(task.eval(), bert.tokenizer)):
        with pytest.raises(ConfigError, match="next token"):
            likelihoods(model, [("a", "b")])
        with pytest.raises(ConfigError, match="next token"):
            wikitext2(model, [{"text": "a", "words": 1}])


def test_features_of_layers(model: TextModel, tmp_path: Path) -> None:
    hidden = model.hidden_states(LONG)
    for layer, wanted in (("0", hidden[0]), ("last", hidden[-1]), ("-2", hidden[-2]), ("sum", hidden[1] + hidden[2])):
        np.testing.assert_allclose(embed(model, [LONG], layer, "none")[0], wanted.numpy(), atol=1e-5)
        np.testing.assert_allclose(embed(model, [LONG], layer, "mean")[0], wanted.numpy().mean(0), atol=1e-5)
    save_features(tmp_path / "f.npy", embed(model, ["a", "bc"]))
    assert np.load(tmp_path / "f.npy").shape == (2, 32)
    save_features(tmp_path / "f.safetensors", embed(model, ["a", "bc"], pooling="none"))
    assert {name: array.shape for name, array in load_file(tmp_path / "f.safetensors").items()} == {
        "0": (1, 32),
        "1": (2, 32),
    }
    for bad in ({"layer": "9"}, {"layer": "lats"}, {"layer": "sum-last-four"}, {"pooling": "max"}):
        with pytest.raises(ConfigError):
            embed(model, ["a"], **bad)
    with pytest.raises(ConfigError, match="npz"):
        save_features(tmp_path / "f.npz", [np.zeros(2, np.float32)])


def test_each_task_is_announced(model: TextModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = {"premise": "a", "choice1": "bcdefghij", "choice2": "b", "label": 1}
    (tmp_path / "dev.jsonl").write_text(f"{json.dumps(row)}\n" * 5)
    monkeypatch.setattr(likelihood, "install", lambda *_: tmp_path)
    lines = list[str]()
    found = evaluate_tasks(model, ["copa"], limit=3, announce=lines.append)
    assert found == {"copa": {"accuracy": 1.0, "questions": 3}}
    assert lines == ["scoring copa: 3 rows"]


def test_sentences_of_blimp_stand_after_another_one(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[list[tuple[str, str]]]()

    def recorded(_: TextModel, pairs: list[tuple[str, str]], reading: Any = None) -> list[Likelihood]:
        given.append(pairs)
        return [Likelihood(1.0 if "bad" in text else 2.0 * bool(context), False) for context, text in pairs]

    monkeypatch.setattr(likelihood, "likelihoods", recorded)
    found = blimp(model, [{"good": "A good one.", "bad": "A bad one.", "paradigm": "p"}])
    assert given[0] == [(NEUTRAL, " A good one."), (NEUTRAL, " A bad one.")]
    assert given[1] == [("", "A good one."), ("", "A bad one.")]
    assert (found["accuracy"], found["accuracy_at_start"]) == (1.0, 0.0)
