"""Generation on one CPU thread: int8 weights and cache in C against float32, in one run.

    python benchmarks/int8_generation.py [--bytes 1000] [--json]

Rates are tokens per second of CPU time, so that other work on the machine counts less; the decoders take turns and the
best of the rounds is taken. The cost is measured in bits per byte on the bundled page, token by token.
"""

import argparse
import itertools
import json
import math
import platform
import time
from typing import Any

import torch

from longspan import load
from longspan.bundled import PAGE
from longspan.contract import LanguageModel
from longspan.decoding.int8 import Int8Decoder
from longspan.decoding.rolling import RollingDecoder
from longspan.decoding.samplers import sampler
from longspan.decoding.sampling import Sampling
from longspan.decoding.step_layers import step_layers
from longspan.experiments.bench.timing import PRESETS
from longspan.models.families import build
from longspan.reading import Reading

ROUNDS = 5
KINDS = {"float32": RollingDecoder, "int8": Int8Decoder}


def open_as(kind: type[RollingDecoder], model: LanguageModel) -> RollingDecoder:
    state = model.initial_state(1, trainable=False)
    layers = step_layers(model, state)
    assert layers is not None
    assert Int8Decoder.supports(model, state, layers), "this machine has no C compiler"
    return kind(model, state, layers, 0)


def rates(model: LanguageModel, memory: int, count: int) -> dict[str, float]:
    """Tokens per second of both decoders with a full memory."""
    torch.manual_seed(1)
    prompt = torch.randint(200, (1, memory))
    best = dict.fromkeys(KINDS, math.inf)
    steps = {}
    for name, kind in KINDS.items():
        decoder = open_as(kind, model)
        decoder.prefill(prompt)
        steps[name] = sampler(decoder, Sampling(), torch.Generator().manual_seed(0))
    for _ in range(ROUNDS):
        for name, step in steps.items():
            token = step(torch.zeros(1, dtype=torch.int64))
            began = time.process_time()
            for _ in range(count):
                token = step(token)
            best[name] = min(best[name], (time.process_time() - began) / count)
    return {name: 1 / seconds for name, seconds in best.items()}


def bits(model: LanguageModel, text: bytes) -> dict[str, float]:
    """Bits per byte of a text."""
    found = {}
    for name, kind in KINDS.items():
        decoder, total = open_as(kind, model), 0.0
        for here, after in itertools.pairwise(text):
            total -= float(decoder.step(torch.tensor([here])).log_softmax(-1)[0, after])
        found[name] = total / math.log(2) / (len(text) - 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bundled = load(device="cpu", dtype="float32").model
    results: dict[str, Any] = {"bundled model, memory 1024": rates(bundled, 1100, 40)}
    for memory in (512, 1600):
        torch.manual_seed(0)
        shape = Reading(segment=128, memory=memory)
        model = build("transformer-xl", PRESETS["enwik8"].model, shape).eval()
        results[f"41M shape, memory {memory}"] = rates(model, memory, 8)
    cost = bits(bundled, PAGE.read_bytes()[: options.bytes])
    if options.json:
        facts = {"machine": platform.machine(), "torch": torch.__version__, "tokens_per_second": results, "bits": cost}
        print(json.dumps(facts, indent=1))
        return
    for what, found in results.items():
        ratio = found["int8"] / found["float32"]
        print(f"{what:32s} float32 {found['float32']:7.1f}  int8 {found['int8']:7.1f} tokens/s  ratio {ratio:.2f}")
    found = ", ".join(f"{name} {value:.4f}" for name, value in cost.items())
    print(f"bits per byte of {options.bytes} bytes: {found}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
