"""Writes the losses and gradients of small random TransfoXL models of `transformers` 4.37.2, to compare ours with.

Runs in a separate environment (requirements.txt in this folder), not in that of the project:

    python tests/parity/make_fixtures.py [FOLDER]

README.md describes the fixtures. Two properties of `transformers` are worked around. Without memories it attends to
zero vectors, so it is given empty ones. With `labels` it skips the last token of every segment and returns losses
ordered by cluster, so losses are gathered from its log-probabilities.
"""

import contextlib
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import TransfoXLConfig, TransfoXLLMHeadModel, TransfoXLTokenizer, logging

FIXTURES = Path(__file__).parent / "fixtures"
BATCH, SEGMENTS = 2, 4
NOTICEABLE = 1e-3  # a fixture must change at least this much if the setting that it tests is wrong

PLAIN = {
    "vocab_size": 23,
    "cutoffs": [],
    "div_val": 1,
    "d_model": 16,
    "d_embed": 16,
    "n_head": 2,
    "d_head": 8,
    "d_inner": 24,
    "n_layer": 2,
    "mem_len": 12,
    "same_length": False,
    "clamp_len": -1,
    "pre_lnorm": False,
    "untie_r": True,
    "dropout": 0.0,
    "dropatt": 0.0,
}
WORDS = {"vocab_size": 60, "cutoffs": [20, 40], "mem_len": 10, "d_head": 6}  # also: heads * d_head is not the width

CASES: dict[str, tuple[int, dict[str, Any]]] = {  # name: (segment, config)
    "plain": (5, PLAIN | {"n_layer": 3}),
    "same_length": (6, PLAIN | {"mem_len": 8, "same_length": True, "clamp_len": 4}),
    # u and w are tied here because the authors' code has no other form, and `authors` has the same weights.
    "adaptive_div4": (8, PLAIN | WORDS | {"div_val": 4, "d_embed": 32, "untie_r": False}),
    "adaptive_div1": (7, PLAIN | WORDS | {"d_embed": 12}),
    "pre_norm": (8, PLAIN | {"pre_lnorm": True, "mem_len": 6}),
    "tied": (5, PLAIN | {"untie_r": False}),
}


VOCABULARY = ["<eos>", "<unk>", "the", ",", ".", "The", "cat", "sat", "@-@", "@,@", "000", "23", "'s", "=", "café"]
TEXTS = [  # the first three are already split as Moses splits, the others are not
    "The cat sat , the cat .",
    "= The cat =",
    "the <unk> cat <eos> the <formula>",
    "The cat sat, the-cat's cat.",
    "THE CAT sat 23,000 Café .",
    "  the\tcat\n\nsat  ",
]


def draw(config: dict[str, Any], seed: int) -> TransfoXLLMHeadModel:
    """A model with random parameters. The initialisation of `transformers` leaves biases at zero and u, w near it."""
    rng = np.random.default_rng(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = TransfoXLLMHeadModel(TransfoXLConfig(**config)).eval()
    for name, parameter in model.named_parameters():
        centre = 1.0 if name.endswith("layer_norm.weight") else 0.0
        spread = 0.4 if "dec_attn" in name or name.endswith(("r_w_bias", "r_r_bias")) else 0.1
        values = rng.normal(centre, spread, parameter.shape).astype(np.float32)
        parameter.data.copy_(torch.from_numpy(values))
    return model


def empty_memories(model: TransfoXLLMHeadModel, batch: int) -> list[Tensor]:
    return [torch.zeros(0, batch, model.config.d_model) for _ in range(model.config.n_layer)]


def segment_losses(
    model: TransfoXLLMHeadModel, tokens: Tensor, targets: Tensor, memories: list[Tensor] | None
) -> tuple[Tensor, list[Tensor] | None]:
    """Losses in nats, [B, L], in token order, and the memories after the segment."""
    out = model(tokens, mems=memories)
    return -out.prediction_scores.gather(2, targets[:, :, None])[:, :, 0], out.mems


@torch.no_grad()
def stream(model: TransfoXLLMHeadModel, ids: Tensor, segment: int, memories: list[Tensor]) -> Tensor:
    losses = []
    for start in range(0, ids.shape[1] - 1, segment):
        end = start + segment
        found, memories = segment_losses(model, ids[:, start:end], ids[:, start + 1 : end + 1], memories)
        losses.append(found)
    return torch.cat(losses, 1)


def last_step_gradients(model: TransfoXLLMHeadModel, ids: Tensor, segment: int) -> dict[str, Tensor]:
    """Gradients of the mean loss of the last segment, with the memory of the segments before it."""
    memories = empty_memories(model, len(ids))
    model.zero_grad()
    for start in range(0, ids.shape[1] - 1, segment):
        end = start + segment
        losses, memories = segment_losses(model, ids[:, start:end], ids[:, start + 1 : end + 1], memories)
    losses.mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def check(model: TransfoXLLMHeadModel, ids: Tensor, segment: int, losses: Tensor, grads: dict[str, Tensor]) -> None:
    """The losses are correct, and would change noticeably if a setting were ignored."""

    def change(expected: Tensor, found: Tensor) -> float:
        return (expected - found).abs().max().item()

    core, config, empty = model.transformer, model.config, empty_memories(model, len(ids))
    if config.same_length:  # segment boundaries do not matter then, so a single pass gives the same
        assert change(losses, stream(model, ids, ids.shape[1], empty)) < 1e-5
        for option, off in (("same_length", False), ("clamp_len", -1)):
            setattr(core, option, off)
            assert change(losses, stream(model, ids, segment, empty)) > NOTICEABLE, option
            setattr(core, option, getattr(config, option))
    else:  # without memory, the model does not attend to zero vectors
        core.mem_len = 0
        with torch.no_grad():
            fresh, _ = segment_losses(model, ids[:, :segment], ids[:, 1 : segment + 1], None)
        core.mem_len = config.mem_len
        assert change(losses[:, :segment], fresh) < 1e-6
    assert change(losses, stream(model, ids, segment, core.init_mems(len(ids)))) > NOTICEABLE, "zero memories"
    assert change(losses[:, segment:], stream(model, ids[:, segment:], segment, empty)) > NOTICEABLE, "no memory"
    for name, grad in grads.items():
        assert grad.abs().max() > NOTICEABLE, name


def to_authors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights under the names of the authors' PyTorch code.

    It reads the probability of tail cluster i at index -i of the head, `transformers` at index shortlist + i - 1, so
    the rows are in reverse order.
    """
    renamed = {}
    for name, tensor in state.items():
        if name.endswith(("dec_attn.r_w_bias", "dec_attn.r_r_bias")):
            continue  # one pair for all layers, at the top level
        flipped = name in ("crit.cluster_weight", "crit.cluster_bias")
        renamed[name.removeprefix("transformer.")] = tensor.flip(0) if flipped else tensor
    return renamed


@torch.no_grad()
def authors_losses(weights: dict[str, Tensor], hidden: Tensor, targets: Tensor, cutoffs: list[int]) -> Tensor:
    """The adaptive softmax (div_val > 1) as the authors' code computes it: hidden [N, D], targets [N]."""

    def scores(cluster: int) -> Tensor:
        weight, bias = weights[f"crit.out_layers.{cluster}.weight"], weights[f"crit.out_layers.{cluster}.bias"]
        if cluster == 0:
            weight = torch.cat([weight, weights["crit.cluster_weight"]])
            bias = torch.cat([bias, weights["crit.cluster_bias"]])
        return (hidden @ weights[f"crit.out_projs.{cluster}"] @ weight.T + bias).log_softmax(-1)

    head = scores(0)
    tails = [head[:, -i, None] + scores(i) for i in range(1, len(cutoffs) + 1)]
    return -torch.cat([head[:, : cutoffs[0]], *tails], 1).gather(1, targets[:, None])[:, 0]


def check_authors(weights: dict[str, Tensor], model: TransfoXLLMHeadModel, ids: Tensor, segment: int) -> None:
    tokens, targets = ids[:, :segment], ids[:, 1 : segment + 1]
    with torch.no_grad():
        memories = empty_memories(model, len(ids))
        hidden = model.transformer(tokens, mems=memories).last_hidden_state
        expected, _ = segment_losses(model, tokens, targets, memories)
    flat, cutoffs = (hidden.flatten(0, 1), targets.flatten()), model.config.cutoffs
    assert (authors_losses(weights, *flat, cutoffs) - expected.flatten()).abs().max() < 1e-5
    wrong = weights | {name: weights[name].flip(0) for name in ("crit.cluster_weight", "crit.cluster_bias")}
    assert (authors_losses(wrong, *flat, cutoffs) - expected.flatten()).abs().max() > NOTICEABLE


def make(root: Path) -> None:
    logging.set_verbosity_error()  # it warns that it leaves out tied tensors, as it should
    torch.set_num_threads(1)  # a fixed order of sums, so that machines differ little
    models, streams = {}, {}
    for seed, (name, (segment, config)) in enumerate(CASES.items()):
        model = models[name] = draw(config, seed)
        ids = np.random.default_rng(1000 + seed).integers(0, config["vocab_size"], (BATCH, SEGMENTS * segment + 1))
        ids = streams[name] = torch.from_numpy(ids)
        losses = stream(model, ids, segment, empty_memories(model, BATCH))
        grads = last_step_gradients(model, ids, segment)
        check(model, ids, segment, losses, grads)

        model.save_pretrained(root / name, safe_serialization=True)
        expected = {"tokens": ids, "segment": torch.tensor(segment), "losses": losses}
        save_file(expected | {f"grad.{key}": grad for key, grad in grads.items()}, root / name / "expected.safetensors")

    # Pickled weights with tensors that share a storage: in the current format, and in that of torch before 1.6.
    models["adaptive_div4"].save_pretrained(root / "pickled", safe_serialization=False)
    models["tied"].config.save_pretrained(root / "pickled_legacy")
    torch.save(
        models["tied"].state_dict(),
        root / "pickled_legacy" / "pytorch_model.bin",
        _use_new_zipfile_serialization=False,
    )

    authors = to_authors(models["adaptive_div4"].state_dict())
    check_authors(authors, models["adaptive_div4"], streams["adaptive_div4"], CASES["adaptive_div4"][0])
    models["adaptive_div4"].config.save_pretrained(root / "authors")
    torch.save(authors, root / "authors" / "model.pt")

    for stray in root.glob("*/generation_config.json"):
        stray.unlink()

    make_vocabularies(root / "vocabulary")


def make_vocabularies(folder: Path) -> None:
    """The vocab.pkl of two tokenizers, and their tokens and ids for TEXTS.

    One keeps upper case and has `<formula>` in its vocabulary; the other converts to lower case and has `<formula>` as
    an added token.
    """
    folder.mkdir()
    kinds = {"cased": ([*VOCABULARY, "<formula>"], False), "lower": (VOCABULARY, True)}
    read: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        for kind, (words, lower) in kinds.items():
            Path("vocab.txt").write_text("\n".join(words))
            tokenizer = TransfoXLTokenizer(vocab_file="vocab.txt", lower_case=lower)
            tokenizer.save_vocabulary(str(folder), kind)
            tokens = [tokenizer.tokenize(text) for text in TEXTS]
            ids = [tokenizer.encode(text) for text in TEXTS]
            read[kind] = {"texts": TEXTS, "tokens": tokens, "ids": ids}
    (folder / "expected.json").write_text(json.dumps(read, indent=1) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else FIXTURES)
