"""TaskModel: a document can be cut anywhere, padding has no effect, and losses are those of the formulas."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.config import plain
from longspan.contract import LanguageModel
from longspan.errors import ConfigError
from longspan.reading import Reading
from longspan.text_model import TextModel
from longspan.tokenizers import ByteTokenizer
from longspan.transfer.batches import collate
from longspan.transfer.embed import embed
from longspan.transfer.features import ScalarMix, combine
from longspan.transfer.formats import Format
from longspan.transfer.heads import Pool
from longspan.transfer.model import TaskConfig, TaskModel
from longspan.transfer.predict import Predictor
from longspan.transfer.tagger import BiLSTMCRF
from longspan.transfer.tasks import Example
from tests.support import build

BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer-xl": ("transformer-xl", {"heads": 2, "inner": 24, "memory": 40, "segment": 8}),
    "same-length": ("transformer-xl", {"heads": 2, "inner": 24, "memory": 6, "same_length": True, "segment": 8}),
    "longspan-xl": ("longspan-xl", {"heads": 2, "inner": 24, "memory": 40, "segment": 8}),
    "awd-lstm": ("awd-lstm", {"segment": 8}),
}


def wrap(base: LanguageModel, name: str, **values: Any) -> TaskModel:
    torch.manual_seed(1)
    model = TaskModel(TaskConfig(base_family=name, base=plain(base.config), **values)).to(torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.reading = base.reading
    return model.eval()


def make(name: str, **values: Any) -> TaskModel:
    family, shape = BASES[name]
    return wrap(build(family, {"vocabulary": 256, "layers": 2, "width": 16} | shape), family, **values)


def read(model: TaskModel, tokens: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    state = model.open_document(len(tokens))
    for begin, end in zip([0, *cuts], [*cuts, tokens.shape[1]], strict=True):
        state = model.read(tokens[:, begin:end], state)
    return model.document_scores(state)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("pooling", ["last", "mean", "concat"])
def test_a_document_can_be_cut_anywhere(name: str, pooling: str) -> None:
    model = make(name, pooling=pooling, labels=("a", "b", "c"))
    tokens = torch.randint(256, (3, 31))
    whole = read(model, tokens, [8, 16, 24])
    for cuts in ([], [1, 2, 30], [13], [5, 6, 20, 29]):
        torch.testing.assert_close(read(model, tokens, cuts), whole)
    # Rows can be reordered and reset in the middle of a document.
    state = model.read(tokens[:, :13], model.open_document(3)).rows([2, 0, 1]).reset(torch.tensor([True, False, False]))
    after = model.document_scores(model.read(tokens[[2, 0, 1], 13:], state))
    torch.testing.assert_close(after[1:], whole[[0, 1]])
    torch.testing.assert_close(after[:1], read(model, tokens[2:, 13:], [])[:1])


@pytest.mark.parametrize("name", ["transformer-xl", "awd-lstm"])
def test_padding_and_other_documents_have_no_effect(name: str) -> None:
    model = make(name, pooling="concat")
    tokens = torch.randint(256, (2, 20))
    valid = torch.arange(20) < torch.tensor([[20], [11]])
    found, _ = model.scores(tokens, valid)
    alone, _ = model.scores(tokens[1:, :11], valid[1:, :11])
    torch.testing.assert_close(found[1:], alone)


def test_pooling_by_hand() -> None:
    h, valid = torch.tensor([[[1.0], [5.0], [-2.0]], [[-4.0], [9.0], [9.0]]]), torch.tensor([[1, 1, 1], [1, 0, 0]]) > 0
    pool = Pool.empty(2, 1, h).add(h[:, :1], valid[:, :1], first=False).add(h[:, 1:], valid[:, 1:], first=False)
    torch.testing.assert_close(pool.vector("concat"), torch.tensor([[-2.0, 5.0, 4 / 3], [-4.0, -4.0, -4.0]]))
    first = Pool.empty(2, 1, h).add(h[:, :1], valid[:, :1], first=True).add(h[:, 1:], valid[:, 1:], first=True)
    assert first.vector("last").tolist() == [[1.0], [-4.0]]


def batch(model: TaskModel, examples: list[Example]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    layout = Format(ByteTokenizer(), model.config.kind, model.config.labels, model, symmetric=model.config.symmetric)
    made = collate(layout.encode(examples))
    return tuple(torch.from_numpy(array) for array in (made.tokens, made.targets, made.starts))


def loss(model: TaskModel, examples: list[Example]) -> torch.Tensor:
    tokens, targets, starts = batch(model, examples)
    return model.training_loss(tokens, targets, None, 0.0, starts)[0]


def alone(model: TaskModel, text: str) -> torch.Tensor:
    tokens = torch.tensor([list(text.encode())])
    return model.scores(tokens, torch.ones_like(tokens, dtype=torch.bool))[0][0]


def test_the_loss_of_classes() -> None:
    model = make("transformer-xl", labels=("a", "b"))
    found = loss(model, [Example(("one two",), "b"), Example(("three",), "a")])
    scores = torch.stack([alone(model, "one two\n"), alone(model, "three\n")])
    torch.testing.assert_close(found, F.cross_entropy(scores, torch.tensor([1, 0])))


def test_the_loss_of_a_similarity_sums_both_orders() -> None:
    values: dict[str, Any] = {"kind": "similarity", "labels": (), "low": 1.0, "high": 5.0}
    model = make("transformer-xl", texts=("text_a", "text_b"), **values)
    found = loss(model, [Example(("one", "three"), 4.0)])
    bias = model.classifier[-1].bias
    predicted = alone_pool(model, "one\nthree\n") + alone_pool(model, "three\none\n") - bias
    torch.testing.assert_close(found, ((predicted - 0.75) ** 2).mean())
    paraphrase = make("transformer-xl", texts=("text_a", "text_b"), kind="pair", symmetric=True, labels=("0", "1"))
    found = loss(paraphrase, [Example(("one", "three"), "1")])
    bias = paraphrase.classifier[-1].bias
    scores = alone_pool(paraphrase, "one\nthree\n") + alone_pool(paraphrase, "three\none\n") - bias
    torch.testing.assert_close(found, F.cross_entropy(scores[None], torch.tensor([1])))
    single = make("transformer-xl", texts=("text",), **values)
    found = loss(single, [Example(("one",), 4.0), Example(("three",), 1.0)])
    predicted = torch.cat([alone_pool(single, "one\n"), alone_pool(single, "three\n")])
    torch.testing.assert_close(found, ((predicted - torch.tensor([0.75, 0.0])) ** 2).mean())


def alone_pool(model: TaskModel, text: str) -> torch.Tensor:
    tokens = torch.tensor([list(text.encode())])
    return read(model, tokens, list(range(8, tokens.shape[1], 8)))[0]


def test_the_loss_of_a_choice_compares_the_choices() -> None:
    model = make("transformer-xl", kind="choice", labels=())
    found = loss(model, [Example(("so", "one", "three"), 1)])
    scores = torch.cat([alone_pool(model, "so\none\n"), alone_pool(model, "so\nthree\n")])
    torch.testing.assert_close(found, F.cross_entropy(scores[None], torch.tensor([1])))


def test_the_loss_of_tags_and_of_the_language_model() -> None:
    model = make("transformer-xl", kind="tags", labels=("O", "X"), lm_weight=0.5)
    found = loss(model, [Example(("ab", "c"), ("X", "O")), Example(("d",), ("O",))])
    first, second = torch.tensor([list(b" ab c\n ab c\n")]), torch.tensor([list(b" d\n d\n")])
    tags, lm, count = [], torch.zeros(()), 0
    for tokens, marks in ((first, [8, 10]), (second, [4])):
        scores = model.scores(tokens, torch.ones_like(tokens, dtype=torch.bool))[0][0]
        tags.append(scores[marks].float())
        state = model.initial_state(1, Reading(segment=64, memory=64))
        lm = lm + model.base.losses(tokens[:, :-1], tokens[:, 1:], state)[0].sum()
        count += tokens.shape[1] - 1
    expected = F.cross_entropy(torch.cat(tags), torch.tensor([1, 0, 0])) + 0.5 * lm / count
    torch.testing.assert_close(found.double(), expected.double(), atol=1e-6, rtol=1e-6)


def test_combinations_of_layers() -> None:
    hidden = tuple(torch.full((1, 1, 2), float(k)) for k in range(6))
    expected = {"embedding": 0, "last": 5, "second-to-last": 4, "sum": 15, "sum-last-four": 14}
    for how, value in expected.items():
        assert combine(hidden, how).tolist() == [[[value, value]]]
    assert combine(hidden, "concat-last-four").tolist() == [[[2, 2, 3, 3, 4, 4, 5, 5]]]
    mix = ScalarMix(6)
    with torch.no_grad():
        mix.scores.copy_(torch.tensor([0.0, 0, 0, 0, 0, 1]))
        mix.gamma.fill_(2.0)
    e = torch.e
    assert mix(hidden)[0, 0, 0].item() == pytest.approx(2 * (0 + 1 + 2 + 3 + 4 + 5 * e) / (5 + e))


def test_normalised_layers_have_equal_weight() -> None:
    """By hand: [1, 3, 5] and [40, 10, 10] become [-1.22, 0, 1.22] and [1.41, -0.71, -0.71]. Their sum is normalised
    again."""
    rows = [5.0, 5.0, 5.0], [1.0, 3.0, 5.0], [40.0, 10.0, 10.0]
    hidden = [torch.tensor([[row]], dtype=torch.float64) for row in rows]
    plain, normalised = (make("longspan-xl", normalised=flag) for flag in (False, True))
    assert plain.features_of(hidden, "sum").flatten().tolist() == [41, 13, 15]
    first, second = 1.5**0.5, 0.5**0.5
    total = np.array([2 * second - first, -second, first - second])
    expected = {
        "embedding": [0, 0, 0],
        "second-to-last": [-first, 0, first],
        "last": [2 * second, -second, -second],
        "sum": list(total / total.std()),
    }
    for how, values in expected.items():
        found = normalised.features_of(hidden, how).flatten()
        torch.testing.assert_close(found, torch.tensor(values, dtype=torch.float64), atol=1e-4, rtol=0)
    documents = torch.randint(256, (2, 20))
    assert not torch.allclose(read(plain, documents, []), read(normalised, documents, []))
    torch.testing.assert_close(read(normalised, documents, []), read(normalised, documents, [7, 9]))


@pytest.mark.parametrize(
    ("name", "shape", "features", "width"),
    [
        ("awd-lstm", {"inner": 24}, "second-to-last", 24),
        ("awd-lstm", {"inner": 24}, "last", 16),
        ("universal", {"heads": 2, "layers": 1, "steps": 5}, "concat-last-four", 64),
        ("universal", {"heads": 2, "layers": 1, "steps": 3}, "mix", 16),
    ],
)
def test_features_have_the_width_of_their_layers(name: str, shape: dict, features: str, width: int) -> None:
    base = build(name, {"vocabulary": 256, "layers": 2, "width": 16, "segment": 32} | shape)
    model = wrap(base, name, features=features)
    assert model.width == width
    assert loss(model, [Example(("one",), "0")]).isfinite()


def test_texts_are_embedded_with_the_features_of_the_task() -> None:
    """With the weights of a mix, which other models do not have. A bidirectional model reads a text between its special
    tokens, or what stands for them, and a long one in windows."""
    base = build("bert", {"vocabulary": 256, "layers": 2, "width": 16, "heads": 2, "positions": 128})
    model = wrap(base, "bert", features="mix").float()

    def between_ends(text: bytes) -> list[torch.Tensor]:
        hidden, _ = model.base.encode(torch.tensor([list(b"\n" + text + b"\n")]))
        return [h[:, 1:-1] for h in hidden]

    hidden = between_ends(b"some")
    weights = model.mix.scores.exp() / model.mix.scores.exp().sum()
    expected = model.mix.gamma * sum(w * h for w, h in zip(weights, hidden, strict=True))
    (found,) = embed(TextModel(model, ByteTokenizer()), ["some"], "mix", "none")
    np.testing.assert_allclose(found, expected[0].detach(), rtol=0, atol=1e-6)
    plain_model = TextModel(model.base, ByteTokenizer())
    with pytest.raises(ConfigError, match="features=mix"):
        embed(plain_model, ["some"], "mix")
    np.testing.assert_allclose(embed(plain_model, ["some"], "1", "none")[0], hidden[1][0].detach(), rtol=0, atol=1e-6)
    model.base.reading = replace(model.base.reading, segment=6)
    windows = torch.cat([between_ends(part)[1] for part in (b"some", b" tex", b"t")], dim=1)[0].detach()
    np.testing.assert_allclose(embed(plain_model, ["some text"], "1", "none")[0], windows, rtol=0, atol=1e-6)
    np.testing.assert_allclose(embed(plain_model, ["some text"], "1")[0], windows.mean(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["longformer", "bigbird"])
def test_an_encoder_by_its_config_reads_a_text_between_special_tokens(name: str) -> None:
    shape = {"vocabulary": 256, "layers": 2, "width": 16, "heads": 2}
    for causal, after in ((True, b""), (False, b"\n\n")):
        model = build(name, {**shape, "causal": causal})
        hidden, _ = model.eval().encode(torch.tensor([list(b"some" + after)]))
        (found,) = embed(TextModel(model, ByteTokenizer()), ["some"], "2", "none")
        np.testing.assert_allclose(found, hidden[2][0, :4].detach(), rtol=0, atol=1e-6)
        assert wrap(model, name).causal == causal


def test_a_backward_run_embeds_texts_from_their_end() -> None:
    base = build("awd-lstm", {"vocabulary": 256, "layers": 2, "width": 16, "inner": 24})
    model = wrap(base, "awd-lstm", reverse=True).float().eval()
    hidden, _ = model.base.encode(torch.tensor([list(b"emos")]))
    per_token, last = (embed(TextModel(model, ByteTokenizer()), ["some"], "1", way)[0] for way in ("none", "last"))
    np.testing.assert_allclose(per_token, hidden[1][0].detach().flip(0), rtol=0, atol=1e-6)
    np.testing.assert_allclose(last, hidden[1][0, -1].detach(), rtol=0, atol=1e-6)


def test_embedded_features_are_normalised_as_in_training() -> None:
    model = make("transformer-xl", features="sum", normalised=True)
    text_model = TextModel(model, ByteTokenizer())
    layers = [embed(text_model, ["some"], str(k), "none")[0] for k in range(3)]
    wanted = [(h - h.mean(-1, keepdims=True)) / h.std(-1, keepdims=True) for h in layers]
    total = wanted[1] + wanted[2]
    total /= total.std(-1, keepdims=True)
    for how, expected in {"embedding": wanted[0], "last": wanted[2], "sum": total}.items():
        np.testing.assert_allclose(embed(text_model, ["some"], how, "none")[0], expected, rtol=0, atol=1e-3)


def test_features_of_layers_of_different_widths() -> None:
    base = build("awd-lstm", {"vocabulary": 256, "layers": 3, "width": 16, "inner": 24, "segment": 8})
    model = TextModel(base.eval(), ByteTokenizer())
    assert [embed(model, ["some text"], layer)[0].shape for layer in ("0", "1", "second-to-last")] == [
        (16,),
        (24,),
        (24,),
    ]
    for layer in ("sum", "concat-last-four"):
        with pytest.raises(ConfigError, match="one width"):
            embed(model, ["some text"], layer)


def test_a_frozen_model_trains_the_classifier_only() -> None:
    model = make("awd-lstm", frozen=True, features="mix").train()
    assert not model.base.training
    loss(model, [Example(("one",), "0"), Example(("two",), "1")]).backward()
    trained = {name.split(".")[0] for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {"classifier", "mix"}


def test_the_operations_of_a_crf_loss_do_not_depend_on_the_rows() -> None:
    """A step that looks at every row on its own waits for the GPU as often."""
    tagger = BiLSTMCRF(8, 4, 3, 0.0)
    counts = []
    for rows in (2, 6):
        targets = torch.tensor([[-1, 0, 2, -1, 1]]).expand(rows, -1)
        with Operations() as seen:
            tagger.loss(torch.randn(rows, 5, 8), targets)
        counts.append(seen.names)
    assert counts[0] == counts[1]


class Operations(TorchDispatchMode):
    """Counts the operations of torch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


def test_a_crf_tagger_ignores_padding_and_decodes_what_it_scores_best() -> None:
    model = make("awd-lstm", kind="tags", labels=("O", "X", "Y"), crf=5, features="mix")
    examples = [Example(("ab", "c", "de"), ("X", "O", "Y")), Example(("d",), ("O",))]
    together = loss(model, examples)
    first, second = (loss(model, [example]) for example in examples)
    torch.testing.assert_close(together, (3 * first + second) / 4)
    for example, found in zip(examples, Predictor(model, ByteTokenizer()).predict(examples), strict=True):
        every = itertools.product(model.config.labels, repeat=len(example.texts))
        losses = {tags: loss(model, [Example(example.texts, tags)]).item() for tags in every}
        assert found.label == min(losses, key=losses.__getitem__)
