"""Losses with exactly c tokens of context: compared with one forward pass per target, and cached."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from longspan.contract import LanguageModel
from longspan.errors import ConfigError, DataError
from longspan.scoring import contexts as contexts_module
from longspan.scoring.contexts import Passage, Subject, choose_targets, context_losses, measure, reading_for
from tests.support import build

SMALL = {"vocabulary": 30, "layers": 2, "width": 16, "heads": 2, "inner": 16, "segment": 8, "dropout": 0.0}
FORMS = {
    "memory": ("transformer-xl", {"memory": 4}),
    "same length": ("transformer-xl", {"memory": 4, "same_length": True}),
    "clamp": ("transformer-xl", {"memory": 4, "clamp": 3}),
    "shaw": ("longspan-xl", {"memory": 4, "position": "shaw"}),
    "vanilla": ("vanilla", {"segment": 32}),
}


@pytest.fixture
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 30, 300).astype(np.uint8)


def make_model(form: str = "memory", seed: int = 0) -> LanguageModel:
    family, values = FORMS[form]
    torch.manual_seed(seed)
    made = build(family, SMALL | values).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("context", [1, 7, 8, 9, 27])
def test_each_target_sees_its_context_and_nothing_else(form: str, context: int, ids: np.ndarray) -> None:
    net, targets = make_model(form), choose_targets(len(ids), 27, 11)
    found = np.concatenate(list(context_losses(net, ids, targets, context)))
    reading = replace(net.reading, memory=64) if net.has_memory() else net.reading
    for target, loss in zip(targets, found, strict=True):
        with torch.no_grad():
            window = torch.from_numpy(ids[target - context : target].astype(np.int64))[None]
            logits, _ = net(window, net.initial_state(1, reading))
        assert loss == pytest.approx(-logits[0, -1].log_softmax(-1)[int(ids[target])].item(), abs=1e-4)


def test_the_batch_size_changes_nothing(ids: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    net, targets = make_model(), choose_targets(len(ids), 20, 17)
    expected = np.concatenate(list(context_losses(net, ids, targets, 20)))
    monkeypatch.setattr(contexts_module, "_TOKENS_PER_BATCH", 45)
    pieces = list(context_losses(net, ids, targets, 20))
    assert len(pieces) == 9
    np.testing.assert_allclose(np.concatenate(pieces), expected, atol=1e-5)


def test_the_memory_grows_to_the_context_and_the_model_does_not_change() -> None:
    net = make_model()
    before = net.reading
    assert reading_for(net, 99) == replace(before, memory=99)
    assert reading_for(net, 2) == net.reading == before
    vanilla = make_model("vanilla")
    assert reading_for(vanilla, 20) == vanilla.reading


class Counter:
    """Counts the tokens that a call had to process."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, done: int, total: int) -> None:
        self.tokens = done
        assert done <= total


def test_only_missing_losses_are_computed(ids: np.ndarray, tmp_path: Path) -> None:
    passage = Passage(ids, choose_targets(len(ids), 20, 10), "text")
    one, other = Subject("one", make_model(), "hash-1"), Subject("other", make_model(seed=1), "hash-2")

    def cost(subjects: list[Subject], contexts: list[int], text: Passage = passage) -> tuple[int, np.ndarray]:
        counter = Counter()
        table = measure(subjects, text, contexts, cache=tmp_path, progress=counter)
        return counter.tokens, table.losses

    first = cost([one], [5, 10])
    assert first[0] == 10 * 15
    again = cost([one], [5, 10])
    assert again[0] == 0
    np.testing.assert_array_equal(first[1], again[1])
    assert cost([one], [5, 10, 20])[0] == 10 * 20
    more = cost([one, other], [5, 10, 20])
    assert more[0] == 10 * 35
    assert not np.array_equal(more[1][0], more[1][1])
    assert cost([one], [5, 10], Passage(ids, passage.targets, "another text"))[0] == 10 * 15
    others = np.setdiff1d(np.arange(20, 300), passage.targets)[:10]
    assert cost([one], [5, 10], Passage(ids, others, "text"))[0] == 10 * 15
    assert cost([Subject("one", one.model)], [5, 10])[0] == 10 * 15
    passages = [passage, Passage(ids, others, "text"), Passage(ids, passage.targets, "another text"), passage]
    tables = [measure([one], each, [5, 10], cache=tmp_path).passage for each in passages]
    assert (len(set(tables)), tables[0]) == (3, tables[3])
    one.model.reading = replace(one.model.reading, clamp=3)
    clamped = cost([one], [5, 10])
    assert clamped[0] == 10 * 15
    assert not np.array_equal(clamped[1], first[1])


def test_a_longer_context_or_more_targets_reuse_cached_losses(ids: np.ndarray, tmp_path: Path) -> None:
    """The longest context bounds the first target; targets behind that bound are kept."""
    one = Subject("one", make_model(), "hash")

    def cost(contexts: list[int], targets: int) -> tuple[int, Passage, np.ndarray]:
        counter, passage = Counter(), Passage(ids, choose_targets(len(ids), contexts[-1], targets), "text")
        table = measure([one], passage, contexts, cache=tmp_path, progress=counter)
        return counter.tokens, passage, table.losses

    _, before, _ = cost([5, 20], 30)
    tokens, after, longer = cost([5, 20, 60], 30)
    new = len(np.setdiff1d(after.targets, before.targets))
    assert 0 < new == (before.targets < 60).sum() < 10
    assert tokens == new * 25 + 30 * 60
    np.testing.assert_allclose(longer, measure([Subject("one", one.model)], after, [5, 20, 60]).losses, atol=1e-5)
    assert cost([5, 20, 60], 40)[0] == 10 * 85
    assert cost([5, 20], 30)[0] == 0


def test_concurrent_calls_lose_no_cached_loss(ids: np.ndarray, tmp_path: Path) -> None:
    one, targets = Subject("one", make_model(), "hash"), choose_targets(len(ids), 20, 10)

    def meanwhile(done: int, total: int) -> None:
        if done == 5 * 10:
            measure([one], Passage(ids, targets[5:], "text"), [5, 20], cache=tmp_path)

    measure([one], Passage(ids, targets[:5], "text"), [10, 20], cache=tmp_path, progress=meanwhile)
    counter = Counter()
    measure([one], Passage(ids, targets, "text"), [10, 20], cache=tmp_path, progress=counter)
    assert counter.tokens == 5 * 10


def test_a_damaged_cache_file_is_replaced(ids: np.ndarray, tmp_path: Path) -> None:
    passage, one = Passage(ids, choose_targets(len(ids), 20, 10), "text"), Subject("one", make_model(), "hash")
    before = measure([one], passage, [5, 20], cache=tmp_path).losses
    files = sorted((tmp_path / "contexts").iterdir())
    assert len(files) == 2
    files[0].write_bytes(files[0].read_bytes()[:-3])
    files[1].write_bytes(b"")
    counter = Counter()
    np.testing.assert_array_equal(measure([one], passage, [5, 20], cache=tmp_path, progress=counter).losses, before)
    assert counter.tokens == 10 * 25


def test_an_interrupted_call_keeps_its_losses(ids: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passage, one = Passage(ids, choose_targets(len(ids), 20, 10), "text"), Subject("one", make_model(), "hash")

    def stop(done: int, total: int) -> None:
        if done > 50:
            raise KeyboardInterrupt

    monkeypatch.setattr(contexts_module, "_TOKENS_PER_BATCH", 45)
    with pytest.raises(KeyboardInterrupt):
        measure([one], passage, [5, 20], cache=tmp_path, progress=stop)
    counter = Counter()
    measure([one], passage, [5, 20], cache=tmp_path, progress=counter)
    assert counter.tokens == 10 * 20 - 40
    assert not list((tmp_path / "contexts").glob(".*"))


def test_targets_are_random_sorted_and_stable() -> None:
    chosen = choose_targets(1000, 100, 50)
    assert (np.diff(chosen) > 0).all()
    assert chosen.min() >= 100
    assert chosen.max() < 1000
    assert choose_targets(105, 100).tolist() == [100, 101, 102, 103, 104]
    assert len(choose_targets(10**9, 100)) == 200
    assert sorted(set(choose_targets(3000, 2900, 100))) == list(range(2900, 3000))
    assert set(choose_targets(1000, 100, 50)) <= set(choose_targets(1000, 100, 300))
    everywhere = choose_targets(10**6, 5 * 10**5, 10_000)
    quarters = np.histogram(everywhere, 4, (5 * 10**5, 10**6))[0]
    assert abs(quarters - 2500).max() < 250


def test_errors_name_the_values(ids: np.ndarray) -> None:
    with pytest.raises(DataError, match=r"100 tokens.* 100 .*101"):
        choose_targets(100, 100)
    with pytest.raises(DataError, match=r"7 .*5 .*100"):
        choose_targets(105, 100, 7)
    with pytest.raises(ConfigError, match="targets=0"):
        choose_targets(105, 100, 0)
    passage = Passage(ids, choose_targets(len(ids), 40, 5))
    with pytest.raises(ConfigError, match=r"v .*32 .*40"):
        measure([Subject("v", make_model("vanilla"))], passage, [10, 40])
    with pytest.raises(DataError, match=r"target \d+ .*300"):
        measure([Subject("m", make_model())], passage, [10, 300])
    with pytest.raises(DataError, match=r"token 32.* 29"):
        measure([Subject("m", make_model())], Passage(ids + 3, passage.targets), [10, 20])
