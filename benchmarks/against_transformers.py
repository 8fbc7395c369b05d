"""Compare longspan with the TransfoXL of `transformers` 4.37.2: the same weights, equal losses, tokens per second.

The shape is the 12-layer model of enwik8 (width 512, 8 heads of 64, inner 2048, vocabulary 204). Both packages must be
in one environment, which `make parity` makes:

    PYTHONPATH=src .venv-parity/bin/python benchmarks/against_transformers.py [--threads 2] [--rounds 3] [--json]

The two sides alternate within each round and the best round counts, so other load on the machine affects both.
"""

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor
from transformers import TransfoXLConfig, TransfoXLLMHeadModel

if TYPE_CHECKING:
    from longspan.contract import Decoder

VOCABULARY, SEGMENT, MEMORY = 204, 128, 1600
TRAIN_BATCH, TRAIN_MEMORY = 4, 128
TOLERANCE = 1e-4  # nats per loss
SHAPE = {
    "vocab_size": VOCABULARY,
    "cutoffs": [],
    "div_val": 1,
    "d_model": 512,
    "d_embed": 512,
    "n_head": 8,
    "d_head": 64,
    "d_inner": 2048,
    "n_layer": 12,
    "same_length": False,
    "clamp_len": -1,
    "dropout": 0.0,
    "dropatt": 0.0,
}

Result = dict[str, float]


class Theirs:
    """TransfoXL with empty initial memories, scored by its log-probabilities.

    By default it would attend to zero vectors at the start, and its labels leave out the last token of a segment.
    """

    def __init__(self, folder: Path, batch: int) -> None:
        self.model = TransfoXLLMHeadModel.from_pretrained(folder).eval()
        config = self.model.config
        self.memories = [torch.zeros(0, batch, config.d_model) for _ in range(config.n_layer)]

    def _losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        out = self.model(tokens, mems=self.memories)
        self.memories = out.mems
        return -out.prediction_scores.gather(2, targets[:, :, None])[:, :, 0]

    @torch.no_grad()
    def score(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self._losses(tokens, targets)

    @torch.no_grad()
    def step(self, token: Tensor) -> Tensor:
        out = self.model(token[:, None], mems=self.memories)
        self.memories = out.mems
        return out.prediction_scores[:, -1]

    def train(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.model.zero_grad()
        loss = self._losses(tokens, targets).mean()
        loss.backward()
        return loss.detach()


class Ours:
    def __init__(self, folder: Path, batch: int, training: bool = False) -> None:
        from longspan.interop.transfo_xl import import_transfo_xl

        self.model = import_transfo_xl(folder).train(training)
        self.state = self.model.initial_state(batch)
        self.decoder: Decoder | None = None

    @torch.no_grad()
    def score(self, tokens: Tensor, targets: Tensor) -> Tensor:
        losses, self.state = self.model.losses(tokens, targets, self.state)
        return losses

    @torch.no_grad()
    def step(self, token: Tensor) -> Tensor:
        from longspan.decoding import open_decoder

        if self.decoder is None:
            self.decoder = open_decoder(self.model, self.state)
        return self.decoder.step(token)

    def train(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.model.zero_grad()
        losses, self.state = self.model.losses(tokens, targets, self.state)
        loss = losses.mean()
        loss.backward()
        return loss.detach()


def save_models(root: Path) -> tuple[Path, Path]:
    """Save the same random weights twice: with a long memory for scoring, with a short one for training."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = TransfoXLLMHeadModel(TransfoXLConfig(**SHAPE, mem_len=MEMORY))
    for name, parameter in model.named_parameters():  # larger than the default, so that attention matters
        torch.nn.init.normal_(parameter, float(name.endswith("layer_norm.weight")), 0.05)
    long, short = root / "long", root / "short"
    model.save_pretrained(long)
    TransfoXLConfig(**SHAPE, mem_len=TRAIN_MEMORY).save_pretrained(short)
    (short / "model.safetensors").symlink_to(long / "model.safetensors")
    return long, short


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def agree(what: str, theirs: Tensor, ours: Tensor) -> float:
    apart = (theirs - ours).abs().max().item()
    if not apart <= TOLERANCE:
        raise SystemExit(f"{what} differ by {apart:.1e}, more than {TOLERANCE:.0e}; fix that before comparing speed")
    return apart


class Stream:
    """Random tokens in segments of consecutive tokens, with the next tokens as targets."""

    def __init__(self, batch: int, seed: int) -> None:
        self.batch, self.random = batch, torch.Generator().manual_seed(seed)
        self.last = self._draw(1)

    def _draw(self, count: int) -> Tensor:
        return torch.randint(VOCABULARY, (self.batch, count), generator=self.random)

    def segment(self) -> tuple[Tensor, Tensor]:
        ids = torch.cat([self.last, self._draw(SEGMENT)], 1)
        self.last = ids[:, -1:]
        return ids[:, :-1], ids[:, 1:]


def race(theirs: Callable[[], object], ours: Callable[[], object], rounds: int, tokens: tuple[int, int]) -> Result:
    """Tokens per second of each side's best round; `tokens` is the number of tokens per round of each side."""
    theirs(), ours()
    times = [(seconds(theirs), seconds(ours)) for _ in range(rounds)]
    slow, fast = (count / min(column) for count, column in zip(tokens, zip(*times, strict=True), strict=True))
    return {"transformers": slow, "longspan": fast, "ratio": fast / slow}


def fill(theirs: Theirs, ours: Ours, stream: Stream, memory: int) -> float:
    """Score segments until the memory is full, and return the largest difference of a loss."""
    segments = [stream.segment() for _ in range(-(-memory // SEGMENT))]
    return max(agree("losses", theirs.score(*segment), ours.score(*segment)) for segment in segments)


def evaluate(folder: Path, rounds: int) -> tuple[float, Result, Result]:
    theirs, ours, stream = Theirs(folder, 1), Ours(folder, 1), Stream(1, seed=1)
    apart = fill(theirs, ours, stream, MEMORY)
    segment = stream.segment()
    scoring = race(lambda: theirs.score(*segment), lambda: ours.score(*segment), rounds, (SEGMENT, SEGMENT))

    token = segment[1][:, -1]
    apart = max(apart, agree("log-probabilities", theirs.step(token), ours.step(token).log_softmax(-1)))

    def generate(side: Theirs | Ours, count: int) -> None:
        following = token
        for _ in range(count):
            following = side.step(following).argmax(-1)

    counts = (2, 50)  # theirs takes a second per token
    generating = race(lambda: generate(theirs, counts[0]), lambda: generate(ours, counts[1]), rounds, counts)
    return apart, scoring, generating


def train(folder: Path, rounds: int) -> tuple[float, Result]:
    theirs, ours, stream = Theirs(folder, TRAIN_BATCH), Ours(folder, TRAIN_BATCH, training=True), Stream(TRAIN_BATCH, 2)
    apart = fill(theirs, ours, stream, TRAIN_MEMORY)
    segment = stream.segment()
    apart = max(apart, agree("training losses", theirs.train(*segment), ours.train(*segment)))
    count = TRAIN_BATCH * SEGMENT
    return apart, race(lambda: theirs.train(*segment), lambda: ours.train(*segment), rounds, (count, count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()

    with tempfile.TemporaryDirectory() as root:
        long, short = save_models(Path(root))
        apart, scoring, generating = evaluate(long, options.rounds)
        apart_training, training = train(short, options.rounds)
    results = {"segment": scoring, "one_token": generating, "training_step": training}
    largest = max(apart, apart_training)
    if options.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        print(json.dumps(results | {"largest_difference": largest, "threads": options.threads} | versions))
        return
    titles = {
        "segment": f"segment of {SEGMENT}, memory {MEMORY}",
        "one_token": f"one token at a time, memory {MEMORY}",
        "training_step": f"training, batch {TRAIN_BATCH}, segment {SEGMENT}, memory {TRAIN_MEMORY}",
    }
    print(f"losses agree to {largest:.1e}; tokens per second on {options.threads} threads:")
    print(f"{'':44s}{'transformers':>14s}{'longspan':>12s}{'ratio':>8s}")
    for name, row in results.items():
        print(f"{titles[name]:44s}{row['transformers']:14.1f}{row['longspan']:12.1f}{row['ratio']:8.1f}")


if __name__ == "__main__":
    main()
