"""GPT, GPT-2 and BERT of `transformers` with random weights: outputs, losses and gradients in float64."""

import math
from typing import Any

import pytest
import torch

import longspan
from longspan.checkpoints.weights import fill, weights_of
from longspan.errors import CheckpointError, ConfigError, DataWarning
from longspan.interop.huggingface import COMPUTED, KINDS, check_computed, import_huggingface, make_model
from longspan.models.bert import BERT
from longspan.reading import Reading
from longspan.tokenizers import ByteTokenizer

transformers = pytest.importorskip("transformers")
B, T, V = 2, 9, 29
GPT = {
    "vocab_size": V,
    "n_positions": 12,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
BERT_SHAPE = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
BERT_SHAPE |= {"intermediate_size": 24, "max_position_embeddings": 12}


def load(config: Any, theirs: Any) -> Any:
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.3)
    theirs.double().eval()
    ours = make_model(config.to_dict(), theirs.state_dict(), "theirs", None).double().eval()
    found = KINDS[config.model_type][1](theirs.state_dict(), config.num_hidden_layers)
    fill(ours, {name: tensor for name, tensor in found.items() if name in weights_of(ours)}, "theirs")
    return ours


def compare_gradients(ours: Any, theirs: Any, kind: str) -> None:
    grads = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    expected = KINDS[kind][1](grads, 3)
    compared = {name: p for name, p in ours.named_parameters() if name in expected and name != "head.biases.0"}
    assert len(compared) > 30
    for name, parameter in compared.items():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


@pytest.mark.parametrize("kind", ["GPT2", "OpenAIGPT"])
def test_gpt(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(**GPT)
    theirs = getattr(transformers, f"{kind}LMHeadModel")(config)
    ours = load(config, theirs)
    ids = torch.randint(V, (B, T))
    logits = theirs(ids).logits
    torch.testing.assert_close(ours(ids)[0], logits)
    loss = ours.losses(ids[:, :-1], ids[:, 1:])[0].mean()
    # Their own loss is computed in float32.
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    compare_gradients(ours, theirs, config.model_type)


def test_rows_of_the_embedding_without_a_token_are_left_out() -> None:
    """Embeddings are often padded to a round number of rows."""
    config = transformers.GPT2Config(**GPT | {"vocab_size": 260})
    theirs = transformers.GPT2LMHeadModel(config).eval()
    with pytest.warns(DataWarning, match="4 rows"):
        ours = make_model(config.to_dict(), theirs.state_dict(), "theirs", ByteTokenizer())
    ids = torch.randint(256, (B, T))
    torch.testing.assert_close(ours(ids)[0], theirs(ids).logits[..., :256])
    config.vocab_size = 255
    with pytest.raises(ConfigError, match=r"255 .* 256"):
        make_model(config.to_dict(), theirs.state_dict(), "theirs", ByteTokenizer())


OTHER: list[tuple[str, str, Any]] = [
    ("gpt2", "tie_word_embeddings", False),
    ("gpt2", "activation_function", "relu"),
    ("gpt2", "layer_norm_epsilon", 1e-6),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True),
    ("gpt2", "scale_attn_weights", False),
    ("openai-gpt", "afn", "relu"),
    ("bert", "tie_word_embeddings", False),
    ("bert", "hidden_act", "relu"),
    ("bert", "layer_norm_eps", 1e-5),
    ("bert", "is_decoder", True),
    ("bert", "position_embedding_type", "relative_key"),
    ("xlnet", "attn_type", "uni"),
    ("xlnet", "ff_activation", "relu"),
    ("xlnet", "layer_norm_eps", 1e-5),
    ("xlnet", "clamp_len", 100),
    ("xlnet", "bi_data", True),
]


@pytest.mark.parametrize(("kind", "key", "value"), OTHER)
def test_a_config_that_computes_something_else_is_refused(kind: str, key: str, value: Any) -> None:
    values = transformers.AutoConfig.for_model(kind, **{key: value}).to_dict() | {key: value}
    with pytest.raises(ConfigError, match=key):
        make_model(values, {}, "theirs", None)
    values[key] = COMPUTED[kind][key][0]
    check_computed(kind, values, "theirs")


@pytest.fixture(scope="module")
def bert() -> tuple[BERT, Any]:
    config = transformers.BertConfig(**BERT_SHAPE)
    theirs = transformers.BertForPreTraining(config)
    return load(config, theirs), theirs


def test_bert_pretraining(bert: tuple[BERT, Any]) -> None:
    ours, theirs = bert
    # Token 0 is their padding, whose embedding gets no gradient.
    ids, targets = torch.randint(1, V, (B, T)), torch.randint(V, (B, T))
    chosen, following = torch.rand(B, T) < 0.4, torch.tensor([0, 1])
    segments = (torch.arange(T) > 4).long().expand(B, -1)
    labels = torch.where(chosen, targets, -100)
    found = theirs(ids, token_type_ids=segments, labels=labels, next_sentence_label=following)
    losses, related = ours.pretraining_losses(ids, targets, segments, following)
    loss = losses[chosen].mean() + related
    torch.testing.assert_close(loss, found.loss)
    found.loss.backward()
    loss.backward()
    compare_gradients(ours, theirs, "bert")


def test_padding_of_bert_is_another_document(bert: tuple[BERT, Any]) -> None:
    ours, theirs = bert
    ids = torch.randint(V, (B, T))
    attention = (torch.arange(T) < torch.tensor([[T], [5]])).long()
    found = theirs.bert(ids, attention_mask=attention, output_hidden_states=True).hidden_states
    starts = torch.zeros(B, T, dtype=torch.bool)
    starts[1, 5] = True
    hidden, _ = ours.encode(ids, None, starts)
    for a, b in zip(hidden, found, strict=True):
        torch.testing.assert_close(a[attention > 0], b[attention > 0])


def test_the_pair_of_a_single_row_is_its_own() -> None:
    """The batch has no other text, so none can be called a random one."""
    config = BERT.Config(vocabulary=50, layers=1, width=8, heads=1, mask=1, classify=2, separator=3)
    model, tokens = BERT(config), torch.randint(4, 50, (1, 21))
    made = [model.make_pairs(tokens) for _ in range(20)]
    assert {int(following) for _, following in made} == {0}
    assert all((rows[:, 11:20] == tokens[:, 9:18]).all() for rows, _ in made)
    assert model.training_loss(tokens, tokens)[0].isfinite()


def test_what_is_hidden() -> None:
    torch.manual_seed(1)
    config = BERT.Config(vocabulary=1000, layers=1, width=8, heads=1, mask=1, classify=2, separator=3)
    model = BERT(config)
    tokens = torch.randint(4, 1000, (400, 120))
    rows, following = model.make_pairs(tokens)
    assert rows.shape == tokens.shape
    assert 0.4 < following.float().mean() < 0.6
    half = (120 - 3) // 2
    torch.testing.assert_close(rows[:, 1 : 1 + half], tokens[:, :half])
    own = following == 0
    torch.testing.assert_close(rows[own, half + 2 : -1], tokens[own, half : 120 - 3])
    assert (rows[:, [0]] == 2).all()
    assert (rows[:, [half + 1, -1]] == 3).all()
    hidden, positions = model.hide(rows)
    chosen = torch.zeros_like(rows, dtype=torch.bool).scatter(1, positions, True)
    assert (chosen.sum(1) == round(0.15 * 117)).all()
    assert not chosen[:, [0, half + 1, -1]].any()
    assert (hidden == rows)[~chosen].all()
    shares = (hidden == 1)[chosen].float().mean().item(), (hidden == rows)[chosen].float().mean().item()
    assert abs(shares[0] - 0.8) < 0.03
    assert abs(shares[1] - 0.1) < 0.03
    assert model.segments_of(rows)[0].tolist() == [0] * (half + 2) + [1] * (120 - half - 2)


@pytest.mark.parametrize("saving", [{}, {"max_shard_size": "8KB"}])
def test_a_folder_is_imported(tmp_path: Any, saving: dict[str, str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: k for k, word in enumerate(["[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxy"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**BERT_SHAPE)).eval()
    theirs.save_pretrained(tmp_path, **saving)
    assert (tmp_path / "model.safetensors.index.json").exists() == bool(saving)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model, found = import_huggingface(tmp_path)
    assert (model.config.mask, model.config.classify, model.config.separator) == (3, 1, 2)
    assert longspan.import_model(tmp_path, tmp_path, device="cpu").tokenizer.size == found.size
    ids = torch.from_numpy(found.encode("a b c").astype("int64"))[None]
    with torch.no_grad():
        expected = theirs.bert(ids).last_hidden_state
        torch.testing.assert_close(model.eval().encode(ids)[0][-1], expected, atol=1e-5, rtol=1e-5)
    if saving:
        next(tmp_path.glob("model-*.safetensors")).unlink()
        with pytest.raises(CheckpointError, match="model-0"):
            import_huggingface(tmp_path)


def test_pre_norm_bert_is_that_of_transformers() -> None:
    """Their RoBERTa with norms before the layers. Its positions begin after that of the padding."""
    shape = {**BERT_SHAPE, "max_position_embeddings": 13, "pad_token_id": 0, "layer_norm_eps": 1e-12}
    theirs = transformers.RobertaPreLayerNormModel(transformers.RobertaPreLayerNormConfig(**shape, type_vocab_size=2))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.3)
    theirs.double().eval()
    config = BERT.Config(vocabulary=V, layers=3, width=16, heads=2, inner=24, positions=12, norm="pre", separator=5)
    ours = BERT(config).double().eval()
    renamed = {"attention.LayerNorm": "attention.output.LayerNorm", "intermediate.LayerNorm": "output.LayerNorm"}
    given = {"bert." + name: tensor for name, tensor in theirs.state_dict().items()}
    for old, new in renamed.items():
        given = {name.replace(old, new): tensor for name, tensor in given.items()}
    given["bert.embeddings.position_embeddings.weight"] = given["bert.embeddings.position_embeddings.weight"][1:]
    found = KINDS["bert"][1](given, 3)
    found |= {f"final_norm.{kind}": given[f"bert.LayerNorm.{kind}"] for kind in ("weight", "bias")}
    unknown = ours.load_state_dict({k: v for k, v in found.items() if k in ours.state_dict()}, strict=False)
    assert not [name for name in unknown.missing_keys if name.startswith(("layers", "final", "embed", "places", "seg"))]
    ids = torch.randint(6, V, (B, T))
    ids[:, 4] = 5
    expected = theirs(ids, token_type_ids=(torch.arange(T) > 4).long().expand(B, -1)).last_hidden_state
    torch.testing.assert_close(ours.encode(ids, ours.initial_state(B, Reading(segment=T)))[0][-1], expected)


def test_first_positions() -> None:
    config = BERT.Config(vocabulary=V, layers=1, width=8, heads=1, positions=40, first_positions="sinusoid")
    rows = BERT(config).places.rows.detach().double()
    angle = 7 * 10000 ** (-2 / 8)  # position 7, the second frequency
    torch.testing.assert_close(rows[7, [1, 5]], 0.05 * 2**0.5 * rows.new_tensor([math.sin(angle), math.cos(angle)]))
