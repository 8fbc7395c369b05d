"""Time and memory of one forward and backward of each family against the length of the text, one row.

A family that carries a memory of fixed length reads the text as it is meant to, segment after segment, each with its
own backward pass; every other family reads it at once. The shape is the preset's, the text random.
"""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from longspan.bench.peak import peak_bytes
from longspan.bench.timing import Preset, busy_seconds, dense_flops, learnt_attention_flops, seconds, timed
from longspan.config import keys as keys_of
from longspan.contract import LanguageModel
from longspan.errors import LongspanError
from longspan.models.families import FAMILIES, build, family

LONG_CALL = 1.0
"""Seconds from which on a call is timed once, and not looked into; shorter ones are timed over and over."""
LAST = 3
"""The slope is of this many lengths, the longest."""

Values = Callable[[Preset, int], dict[str, Any]]
Keys = Callable[[Any, int], float]


def _full(_: Any, length: int) -> float:
    return (length + 1) / 2


def _none(*_: Any) -> float:
    return 0.0


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Case:
    """A family as it is measured.

    `claim` is the exponent of the length its paper gives for the cost of attention, of everything where there is none;
    None where it is not known, and then nothing is counted. `keys` says how many keys a query meets on average; left
    out where that number does not depend on the length and so does not change the slope.
    """

    family: str
    paper: str
    claim: float | None
    keys: Keys = _none
    values: Values = _nothing
    streamed: bool = False
    products: int = 2
    attentions: int = 1  # per layer

    def model_values(self, preset: Preset, length: int) -> dict[str, Any]:
        """The preset's shape as far as this family knows its keys, with room for a text of this length."""
        known = keys_of(family(self.family).Config)
        segment = preset.train[1] if self.streamed else length
        shape = {key: value for key, value in preset.model.items() if key in known}
        return {**shape, "segment": segment, **self.values(preset, length)}

    def operations(self, model: LanguageModel, length: int) -> float | None:
        """Forward and backward: a dense layer costs three times its forward."""
        if self.claim is None:
            return None
        repeated = getattr(model.config, "steps", 1)
        looked_up = sum(p.numel() for name, p in model.named_parameters() if name.startswith("places."))
        dense = 3 * repeated * dense_flops(model.parameter_count - looked_up)
        met = self.keys(model.config, length)
        if not met:
            return length * dense
        one = learnt_attention_flops(model.config, met, self.products)
        return length * (dense + repeated * self.attentions * one)


def _recurrent(preset: Preset, _: int) -> dict[str, Any]:
    """Fewer layers and none wider than the last: `inner` is the width of layers here."""
    return {"layers": max(1, preset.model["layers"] // 3), "inner": None}


def _memory(preset: Preset, _: int) -> dict[str, Any]:
    return {"memory": preset.train[2]}


def _compressed(preset: Preset, _: int) -> dict[str, Any]:
    return {"memory": preset.train[2], "compressed": preset.train[2] // 4, "rate": 4}


def _span(preset: Preset, _: int) -> dict[str, Any]:
    return {"span": preset.train[2]}


def _window(preset: Preset, _: int) -> dict[str, Any]:
    return {"window": preset.train[2]}


def _chunks(preset: Preset, _: int) -> dict[str, Any]:
    return {"rounds": 2, "chunk": max(4, preset.train[2] // 8)}


def _blocks(preset: Preset, _: int) -> dict[str, Any]:
    return {"block": max(16, preset.train[2] // 8)}  # on a CPU no tile is smaller than 16


def _strides(_: Preset, length: int) -> dict[str, Any]:
    return {"stride": max(4, round(math.sqrt(length)))}


def _steps(preset: Preset, _: int) -> dict[str, Any]:
    return {"layers": 1, "steps": preset.model["layers"]}


def _half_near_half_far(config: Any, length: int) -> float:
    """Half of the heads look at a stride, half at every stride-th position."""
    return (config.stride + length / (2 * config.stride)) / 2


def _blocks_met(config: Any, length: int) -> float:
    blocks = config.window_blocks + config.random_blocks + config.global_blocks
    return min(config.block * blocks, _full(config, length))


CASES = (
    Case("vanilla", "L^2", 2, _full),
    Case("rotary", "L^2", 2, _full),
    Case("transformer-xl", "L^2 without memory", 2, _full, lambda *_: {"memory": 0}, products=3),
    Case("universal", "L^2", 2, _full, _steps),
    Case("evolved", "L^2", 2, _full, attentions=2),
    Case("sparse", "L sqrt(L)", 1.5, _half_near_half_far, _strides),
    Case("reformer", "L log L", 1, lambda config, _: 2 * config.rounds * config.chunk, _chunks),
    Case("longformer", "L", 1, lambda config, _: config.window, _window, products=3),
    Case("bigbird", "L", 1, _blocks_met, _blocks),
    Case("transformer-xl", "L with a memory", 1, values=_memory, streamed=True),
    Case("compressive", "L with a memory", 1, values=_compressed, streamed=True),
    Case("adaptive-span", "L with a span", 1, values=_span, streamed=True),
    Case("lstm", "L", 1, values=_recurrent),
    Case("awd-lstm", "L", 1, values=_recurrent),
    Case("qrnn", "L", 1, values=_recurrent),
)


def cases_of(names: Sequence[str]) -> list[Case]:
    """The cases of these families, or of all; a family that is not in CASES is measured in the preset's shape."""
    for name in names:
        family(name)  # a wrong name is refused
    named = [case for case in CASES if not names or case.family in names]
    others = [name for name in names or FAMILIES if name not in {case.family for case in CASES}]
    return named + [_plain_case(name) for name in dict.fromkeys(others)]


def _plain_case(name: str) -> Case:
    remembers = "memory" in keys_of(family(name).Config)
    return Case(name, "not stated", None, values=_memory if remembers else _nothing, streamed=remembers)


@dataclass
class Growth:
    """What a family took at each length: None where it failed, with the reason in `failed`. `busy` are the seconds that
    a GPU worked, where that was looked into. Slopes are exponents of the length over the longest texts: of the time, of
    the memory, and of the operations counted."""

    family: str
    read: str
    paper: str
    claim: float | None
    lengths: tuple[int, ...]
    seconds: list[float | None] = field(default_factory=list)
    busy: list[float | None] = field(default_factory=list)
    bytes: list[int | None] = field(default_factory=list)
    operations: list[float | None] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)

    @property
    def slope(self) -> float | None:
        """Of the work where it is known: on a short text a GPU waits for the processor as long as on a longer one."""
        known = all(worked is not None for worked in self.busy[-LAST:])
        return slope(self.lengths, self.busy if known else self.seconds)

    @property
    def memory_slope(self) -> float | None:
        return slope(self.lengths, self.bytes)

    @property
    def by_count(self) -> float | None:
        """Over the lengths that were measured."""
        return slope(self.lengths, self.operations)

    def facts(self) -> dict[str, Any]:
        facts = asdict(self)
        del facts["operations"]  # they may lack a part that does not change the slope
        return {**facts, "slope": self.slope, "memory_slope": self.memory_slope, "by_count": self.by_count}


def slope(lengths: Sequence[int], values: Sequence[float | None], last: int = LAST) -> float | None:
    """The exponent e of values ~ lengths^e: least squares in logarithms over the last values there are."""
    points = [(math.log(n), math.log(v)) for n, v in zip(lengths, values, strict=True) if v is not None and v > 0]
    points = points[-last:]
    if len(points) < 2:
        return None
    x, y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def measure(
    preset: Preset,
    device: torch.device,
    dtype: torch.dtype,
    lengths: tuple[int, ...] = (),
    names: tuple[str, ...] = (),
) -> Iterator[Growth]:
    """Of the named families, or of all; at these lengths, or the preset's. A wrong name is refused at once."""
    return _measured(cases_of(names), preset, device, dtype, tuple(sorted(set(lengths or preset.texts))))


def _measured(
    cases: Sequence[Case], preset: Preset, device: torch.device, dtype: torch.dtype, lengths: tuple[int, ...]
) -> Iterator[Growth]:
    for case in cases:
        read = f"segments of {preset.train[1]}" if case.streamed else "at once"
        growth = Growth(case.family, read, case.paper, case.claim, lengths)
        for length in lengths:
            took: tuple[Any, ...] = (None, None, None, None)
            try:
                took = _take(case, preset, length, device, dtype)
            except Exception as error:  # whatever ends one family must not end the others
                growth.failed[length] = _why(error)
            _clear(device)
            columns: tuple[list[Any], ...] = (growth.seconds, growth.busy, growth.bytes, growth.operations)
            for column, value in zip(columns, took, strict=True):
                column.append(value)
        yield growth


def _take(
    case: Case, preset: Preset, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[float, float | None, int, float | None]:
    torch.manual_seed(0)
    model = build(case.family, case.model_values(preset, length)).to(device).train()
    step = Step(model, length, device, dtype)
    step()  # compiles what is compiled
    once: list[float] = []
    peak = peak_bytes(lambda: once.append(timed(step, 1, device)), device, model.parameters())
    if once[0] >= LONG_CALL:
        return once[0], None, peak, case.operations(model, length)
    time = seconds(step, device, least=0.1, rounds=3)
    return time, busy_seconds(step, device), peak, case.operations(model, length)


class Step:
    """A forward and backward over a random text, a segment of the config at a time."""

    def __init__(self, model: LanguageModel, length: int, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        self.ids = torch.randint(model.config.vocabulary, (1, length + 1), device=device)

    def __call__(self) -> None:
        state, segment = self.model.initial_state(1), self.model.config.segment
        for begin in range(0, self.ids.shape[1] - 1, segment):
            piece = self.ids[:, begin : begin + segment + 1]
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
                loss, state = self.model.training_loss(piece[:, :-1], piece[:, 1:], state, 0.0)
            loss.backward()
            state = state.detach()
        self.model.zero_grad(set_to_none=True)


def _why(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return "out of memory"
    first = str(error).partition("\n")[0]
    return first if isinstance(error, LongspanError) else f"{type(error).__name__}: {first:.120}"


def _clear(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch._dynamo.reset()  # past a few shapes it compiles no more, and what it does not compile is slow
        torch.cuda.empty_cache()
