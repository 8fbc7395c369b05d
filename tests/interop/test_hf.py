"""longspan models in `transformers`: losses, padding, generation, saving."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longspan.config import keys
from longspan.contract import LanguageModel
from longspan.errors import ConfigError, StateError
from longspan.models.families import BUILT_IN, family
from longspan.scoring.score import score
from longspan.text_model import TextModel
from longspan.tokenizers import ByteTokenizer, CharacterTokenizer, WordTokenizer
from tests.contract.conftest import ALL, DEPENDS_ON_CUTS, SMALL, VOCABULARY, make_model, stream
from tests.support import build

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import longspan.hf as hf
from longspan.interop.hf.tokenizer import convert_tokenizer

PAD = VOCABULARY  # outside the vocabulary: padding is never read
ONE_PER_FAMILY = list({chosen: name for name, (chosen, _) in reversed(ALL.items()) if chosen in BUILT_IN}.values())
FEW = {"pointer", "lstm", "compressive-mean", "learned"}
COVERING = ["pointer", "lstm", "learned"]


def most_in_torture(names: Iterable[str], fast: Iterable[str]) -> list[Any]:
    """`make torture` runs all variants, the suite those in `fast`."""
    chosen = set(fast)
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.torture) for name in names]


def converted(name: str, dtype: torch.dtype = torch.float32) -> hf.LongspanForCausalLM:
    return hf.LongspanForCausalLM.of(make_model(name, dtype))


def left_padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.cat([torch.full((width - len(row),), PAD), row]) for row in rows])
    return ids, (ids != PAD).long()


@pytest.mark.parametrize("name", most_in_torture(ALL, ONE_PER_FAMILY))
@torch.no_grad()
def test_losses_equal_ours(name: str) -> None:
    """In float32, for a text of several segments: with memory as a stream, without one with a sliding window."""
    model = converted(name)
    ids, _ = stream(1, 38)
    ours = score(model.model, ids[0].numpy(), losses=True)
    theirs = model(ids, labels=ids)
    assert float(theirs.loss) == pytest.approx(ours.nats, rel=0, abs=1e-6)
    losses = -theirs.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
    np.testing.assert_allclose(losses.numpy(), ours.losses, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", most_in_torture(ALL, FEW))
@torch.no_grad()
def test_padding_does_not_change_logits_losses_or_the_state(name: str) -> None:
    """Rows of unequal length, also longer than a segment, then further tokens one at a time."""
    model = converted(name, torch.float64)
    rows = [row[0] for row in (stream(1, 12, 1)[0], stream(1, 5, 2)[0], stream(1, 19, 3)[0], stream(1, 5, 4)[0])]
    ids, mask = left_padded(rows)
    together = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=True)
    steps = 9 if name in DEPENDS_ON_CUTS else 2  # blocks are compressed at other steps in rows of other lengths
    more, _ = stream(4, steps, 5)
    after = [model(more[:, k : k + 1], past_key_values=together.past_key_values).logits for k in range(steps)]
    total, count = 0.0, 0
    for k, row in enumerate(rows):
        alone = model(row[None], labels=row[None], use_cache=True)
        torch.testing.assert_close(together.logits[k, -len(row) :], alone.logits[0], rtol=0, atol=1e-10)
        total, count = total + float(alone.loss) * (len(row) - 1), count + len(row) - 1
        for step in range(steps):
            one = model(more[k : k + 1, step : step + 1], past_key_values=alone.past_key_values)
            torch.testing.assert_close(after[step][k], one.logits[0], rtol=0, atol=1e-10)
    assert float(together.loss) == pytest.approx(total / count, rel=1e-12)


@pytest.mark.parametrize("name", COVERING)
@torch.no_grad()
def test_generate_with_the_cache_equals_generate_without(name: str) -> None:
    """Greedy, beam search and a left-padded batch; without a cache, every step reads the complete text."""
    model = converted(name, torch.float64)
    ids, mask = left_padded([stream(1, 7, 1)[0][0], stream(1, 4, 2)[0][0]])
    for options in ({"do_sample": False}, {"num_beams": 3, "do_sample": False}):
        texts = [
            model.generate(ids, attention_mask=mask, max_new_tokens=4, pad_token_id=PAD, use_cache=cache, **options)
            for cache in (True, False)
        ]
        assert torch.equal(*texts), options
        if "num_beams" not in options:
            assert texts[0][0, 7:].tolist() == _greedy(model.model, ids[0].tolist(), 4)


@torch.no_grad()
def test_unequal_prompts_give_the_beams_that_each_gives_alone() -> None:
    """`compressive` compresses a block at the same step in all rows of a state, so these rows have separate states."""
    model = converted("compressive-mean", torch.float64)
    wanted = {"max_new_tokens": 8, "pad_token_id": PAD, "num_beams": 3, "do_sample": False}
    wanted |= {"return_dict_in_generate": True, "output_scores": True}
    prompts = [stream(1, 9, 1)[0][0], stream(1, 4, 2)[0][0]]
    ids, mask = left_padded(prompts)
    together = model.generate(ids, attention_mask=mask, **wanted)
    for k, prompt in enumerate(prompts):
        alone = model.generate(prompt[None], **wanted)
        assert together.sequences[k, 9 - len(prompt) :].tolist() == alone.sequences[0].tolist()
        torch.testing.assert_close(together.sequences_scores[k], alone.sequences_scores[0], rtol=0, atol=1e-10)


def _greedy(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    from longspan.decoding import open_decoder

    decoder = open_decoder(model)
    decoder.prefill(torch.tensor([prompt[:-1]]))
    token, written = prompt[-1], []
    for _ in range(count):
        token = int(decoder.step(torch.tensor([token])).argmax())
        written.append(token)
    return written


def test_sampling_follows_the_seed() -> None:
    model = converted("longspan")
    ids, _ = stream(2, 9)

    def sample(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model.generate(ids, max_new_tokens=6, do_sample=True, top_k=5, pad_token_id=PAD)

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))


@pytest.mark.parametrize("chosen", [name for name in BUILT_IN if family(name).predicts_next])
@torch.no_grad()
def test_every_family_is_saved_and_loaded(chosen: str, tmp_path: Path) -> None:
    values = {k: v for k, v in SMALL.items() if k in {*keys(family(chosen).Config), "segment"}}
    if chosen == "elmo":  # its layers have one width
        del values["inner"]
    if chosen in ("sparse", "bigbird", "vanilla"):
        values["segment"] = 16
    model = hf.LongspanForCausalLM.of(build(chosen, values).eval())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is hf.LongspanForCausalLM
    assert loaded.config.family == chosen
    assert loaded.model.reading == model.model.reading
    assert not loaded.training
    ids, _ = stream(2, 12)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)
    assert loaded.num_parameters() == model.model.parameter_count, "tied weights stay tied"


def test_a_new_model_has_the_weights_of_its_family() -> None:
    config = hf.LongspanConfig(family="transformer-xl", model={"vocabulary": 23, "layers": 1, "width": 8, "heads": 2})
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(3)
    ours = config.build()
    for (name, a), b in zip(made.model.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_ties_survive_loading_and_training(tmp_path: Path) -> None:
    converted("adaptive").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    head, embedding = model.model.head, model.model.embedding
    assert all(a is b for a, b in zip(head.tables, embedding.tables, strict=True))
    ids, targets = stream(2, 8)
    model(ids, targets=targets).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[TextModel, Path]:
    """A byte model as a folder of longspan and as a folder of transformers."""
    folder = tmp_path_factory.mktemp("hf")
    values = {"vocabulary": 256, "layers": 1, "width": 16, "heads": 2, "memory": 12, "segment": 8, "same_length": True}
    ours = TextModel(build("longspan-xl", values), ByteTokenizer())
    ours.save(folder / "ours")
    hf.export_hf(folder / "ours", folder / "theirs")
    return ours, folder / "theirs"


def test_an_exported_folder_works_in_a_pipeline(exported: tuple[TextModel, Path]) -> None:
    from transformers import pipeline  # importing it takes seconds, in every worker

    ours, folder = exported
    generate = pipeline("text-generation", model=str(folder))
    prompt = "Über den Bergen"
    (found,) = generate(prompt, max_new_tokens=20, do_sample=False, return_full_text=False)
    assert found["generated_text"] == ours.generate(prompt, 20, temperature=0)


def test_auto_map_names_classes_that_the_folder_has(exported: tuple[TextModel, Path]) -> None:
    _, folder = exported
    config = hf.LongspanConfig.from_pretrained(folder)
    for key, cls in (("AutoConfig", hf.LongspanConfig), ("AutoModelForCausalLM", hf.LongspanForCausalLM)):
        assert get_class_from_dynamic_module(config.auto_map[key], str(folder)) is cls


_REMOTE_CODE = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline
folder = sys.argv[1]
assert "longspan" not in sys.modules
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer(["Thornby"], return_tensors="pt")
text = tokenizer.decode(model.generate(**inputs, max_new_tokens=20, do_sample=False)[0])
generate = pipeline("text-generation", model=folder, trust_remote_code=True)
(found,) = generate("Thornby", max_new_tokens=20, do_sample=False)
assert found["generated_text"] == text, (found, text)
sys.stdout.buffer.write(text.encode())
"""


@pytest.mark.slow
def test_remote_code_loads_in_a_process_without_longspan(exported: tuple[TextModel, Path], tmp_path: Path) -> None:
    """As someone does who has only the folder: nothing imports longspan before the folder's own code does."""
    ours, folder = exported
    command = [sys.executable, "-c", _REMOTE_CODE, str(folder)]
    found = subprocess.run(command, env=os.environ | {"HF_HOME": str(tmp_path)}, capture_output=True, check=False)
    assert found.returncode == 0, found.stderr.decode()[-2000:]
    assert found.stdout == ("Thornby" + ours.generate("Thornby", 20, temperature=0)).encode()


def test_an_existing_folder_is_not_overwritten(exported: tuple[TextModel, Path]) -> None:
    with pytest.raises(ConfigError, match="theirs"):
        hf.export_hf(exported[1].parent / "ours", exported[1])


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (ByteTokenizer(), "a\r\nb ü\u0301 \ufeff<eos>\x00"),
        (ByteTokenizer(plain=True), "a\r\nb ü \ufeff."),
        (CharacterTokenizer("abc \nü", dropped="x"), "ab xü\nc"),
        (WordTokenizer(("<eos>", "<unk>", "the", "cat"), lower=True), "The cat\nthe dog"),
    ],
)
def test_tokenizers_give_the_same_ids(tokenizer, text: str, tmp_path: Path) -> None:
    theirs = convert_tokenizer(tokenizer)
    expected = tokenizer.encode_prompt(text).tolist()
    assert theirs(text)["input_ids"] == expected
    assert theirs.decode(expected) == tokenizer.decode(expected)
    theirs.save_pretrained(tmp_path)
    loaded = type(theirs).from_pretrained(tmp_path)
    assert loaded(text)["input_ids"] == expected
    batch = loaded([text, text[:3]], padding=True)
    short = tokenizer.encode_prompt(text[:3]).tolist()
    assert batch["input_ids"][1] == [tokenizer.size] * (len(expected) - len(short)) + short
    assert loaded.pad_token_id == tokenizer.size


def test_a_loaded_tokenizer_of_words_is_found_by_its_class_name(tmp_path: Path) -> None:
    tokenizer = WordTokenizer(("<eos>", "<unk>", "the", "cat"))
    TextModel(build("lstm", {"vocabulary": 4, "layers": 1, "width": 8}), tokenizer).save(tmp_path / "ours")
    hf.export_hf(tmp_path / "ours", tmp_path / "theirs")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "theirs", trust_remote_code=True)
    assert loaded("the cat\n")["input_ids"] == [2, 3, 0]


def test_what_a_state_cannot_do_is_an_error_with_a_name() -> None:
    model = converted("plain")
    ids, _ = stream(1, 6)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(StateError, match=r"crop\(3\)"):
        cache.crop(3)
    with pytest.raises(StateError, match="6"):
        model.generate(ids, past_key_values=cache, max_new_tokens=2)
    with pytest.raises(ConfigError, match="tuple"):
        model(ids, past_key_values=())
    with pytest.raises(ConfigError, match="30"):
        model.resize_token_embeddings(30)


@torch.no_grad()
def test_a_text_continues_from_a_copy_of_the_cache() -> None:
    model = converted("longspan", torch.float64)
    ids, _ = stream(1, 14)
    cache = model(ids[:, :6], use_cache=True).past_key_values
    kept = cache.copy()
    first = model.generate(ids[:, :9], past_key_values=cache, max_new_tokens=3, do_sample=False, pad_token_id=PAD)
    second = model.generate(ids[:, :9], past_key_values=kept, max_new_tokens=3, do_sample=False, pad_token_id=PAD)
    fresh = model.generate(ids[:, :9], max_new_tokens=3, do_sample=False, pad_token_id=PAD)
    assert torch.equal(first, fresh)
    assert torch.equal(second, fresh)


@torch.no_grad()
def test_hidden_states_are_those_of_the_model() -> None:
    model = converted("plain", torch.float64)
    ids, mask = left_padded([stream(1, 7, 1)[0][0], stream(1, 4, 2)[0][0]])
    found = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    expected, _ = model.model.hidden_states(ids[1:, 3:])
    assert len(found) == len(expected) == 3
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a[1, 3:], b[0], rtol=0, atol=1e-12)
