"""Time and memory of one forward and backward pass of each family by text length, batch 1.

A family with a memory of fixed length reads the text one segment at a time, with a backward pass per segment. Every
other family reads it at once. The shape is that of the preset, the text is random.
"""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from longspan.config import keys as keys_of
from longspan.contract import LanguageModel, State
from longspan.errors import LongspanError
from longspan.experiments.bench.peak import peak_bytes
from longspan.experiments.bench.timing import (
    Preset,
    busy_seconds,
    dense_flops,
    seconds,
    timed,
    training_attention_flops,
)
from longspan.models.families import build, family, known_families
from longspan.segments import map_segments
from longspan.shapes import Tensor

LONG_CALL = 1.0
"""Calls of at least this many seconds are timed once and not profiled; shorter ones are repeated."""
FITTED = 3
"""Slopes are fitted to this many of the longest texts."""

Values = Callable[[Preset, int], dict[str, Any]]
Keys = Callable[[Any, int], float]


def _all_keys(_: Any, length: int) -> float:
    return (length + 1) / 2


def _constant(*_: Any) -> float:
    return 0.0


def _defaults(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Case:
    """How a family is measured.

    `claim` is the exponent of the length in the cost that its paper states for attention, or for the model if it has no
    attention; None if unknown, and then operations are not counted. `keys` is the mean number of keys per query; it is
    left out if that does not depend on the length, since it then does not change the slope.
    """

    family: str
    paper: str
    claim: float | None
    keys: Keys = _constant
    values: Values = _defaults
    streamed: bool = False
    products: int = 2
    attentions: int = 1  # per layer

    def build(self, preset: Preset, length: int) -> LanguageModel:
        """A model for a text of this length, with the keys of the preset's shape that the family has."""
        cls = family(self.family)
        known, values = keys_of(cls.Config), self.values(preset, length)
        segment = preset.train[1] if self.streamed else length
        shape = {key: value for key, value in preset.model.items() if key in known}
        if "max_distance" in known and self.family != "longspan-xl":
            shape["max_distance"] = length - 1
        if "positions" in known:
            shape["positions"] = length
        memory = {"memory": values.pop("memory")} if "memory" in values else {}
        return build(self.family, {**shape, **values}, replace(cls.reading, segment=segment, **memory))

    def operations(self, model: LanguageModel, length: int) -> float | None:
        """Operations of a forward and backward pass; for a dense layer three times those of the forward pass."""
        if self.claim is None:
            return None
        repeated = getattr(model.config, "steps", 1)
        lookups = sum(p.numel() for name, p in model.named_parameters() if name.startswith("places."))
        dense = 3 * repeated * dense_flops(model.parameter_count - lookups)
        keys = self.keys(model.config, length)
        if not keys:
            return length * dense
        attention = training_attention_flops(model.config, keys, self.products)
        return length * (dense + repeated * self.attentions * attention)


def _recurrent(preset: Preset, _: int) -> dict[str, Any]:
    """A third of the layers. `inner` is the width of inner layers here, so its default is used."""
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
    return {"block": max(16, preset.train[2] // 8)}  # the smallest block size on a CPU


def _strides(_: Preset, length: int) -> dict[str, Any]:
    return {"stride": max(4, round(math.sqrt(length)))}


def _steps(preset: Preset, _: int) -> dict[str, Any]:
    return {"layers": 1, "steps": preset.model["layers"]}


def _strided_keys(config: Any, length: int) -> float:
    """Half of the heads attend to the last `stride` positions, half to every stride-th position."""
    return (config.stride + length / (2 * config.stride)) / 2


def _block_keys(config: Any, length: int) -> float:
    blocks = config.window_blocks + config.random_blocks + config.global_blocks
    return min(config.block * blocks, _all_keys(config, length))


CASES = (
    Case("vanilla", "L^2", 2, _all_keys),
    Case("rotary", "L^2", 2, _all_keys),
    Case("gpt", "L^2", 2, _all_keys),
    Case("bert", "L^2", 2, lambda _, length: length),
    Case("transformer-xl", "L^2 without memory", 2, _all_keys, lambda *_: {"memory": 0}, products=3),
    Case("universal", "L^2", 2, _all_keys, _steps),
    Case("evolved", "L^2", 2, _all_keys, attentions=2),
    Case("sparse", "L sqrt(L)", 1.5, _strided_keys, _strides),
    Case("reformer", "L log L", 1, lambda config, _: 2 * config.rounds * config.chunk, _chunks),
    Case("longformer", "L", 1, lambda config, _: config.window, _window, products=3),
    Case("bigbird", "L", 1, _block_keys, _blocks),
    Case("transformer-xl", "L with a memory", 1, values=_memory, streamed=True),
    Case("longspan-xl", "L with a memory", 1, values=_memory, streamed=True),
    Case("xlnet", "L with a memory", 1, values=_memory, streamed=True),
    Case("compressive", "L with a memory", 1, values=_compressed, streamed=True),
    Case("adaptive-span", "L with a span", 1, values=_span, streamed=True),
    Case("lstm", "L", 1, values=_recurrent),
    Case("awd-lstm", "L", 1, values=_recurrent),
    Case("qrnn", "L", 1, values=_recurrent),
    Case("elmo", "L", 1, values=_recurrent),
)


def cases_of(names: Sequence[str]) -> list[Case]:
    """The cases of these families, or of all. A family without a case is measured with the preset's shape."""
    for name in names:
        family(name)  # raises for an unknown name
    known = [case for case in CASES if not names or case.family in names]
    others = [name for name in names or known_families() if name not in {case.family for case in CASES}]
    return known + [_default_case(name) for name in dict.fromkeys(others)]


def _default_case(name: str) -> Case:
    remembers = "memory" in family(name).settings
    return Case(name, "not stated", None, values=_memory if remembers else _defaults, streamed=remembers)


@dataclass
class Growth:
    """The cost of a family at each length; None where it failed, with the reason in `failed`.

    `busy` is the GPU's busy time in seconds, where it was profiled. Slopes are exponents of the length, fitted to the
    longest texts: of time, memory and operations.
    """

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
        """The exponent of the busy time if known, else of the time: short texts are launch-bound on a GPU."""
        profiled = all(busy is not None for busy in self.busy[-FITTED:])
        return slope(self.lengths, self.busy if profiled else self.seconds)

    @property
    def memory_slope(self) -> float | None:
        return slope(self.lengths, self.bytes)

    @property
    def by_count(self) -> float | None:
        """The exponent of the operations, over the measured lengths."""
        return slope(self.lengths, self.operations)

    def facts(self) -> dict[str, Any]:
        facts = asdict(self)
        del facts["operations"]  # parts that do not change the slope are not counted
        return {**facts, "slope": self.slope, "memory_slope": self.memory_slope, "by_count": self.by_count}


def slope(lengths: Sequence[int], values: Sequence[float | None], last: int = FITTED) -> float | None:
    """The exponent e of values ~ lengths^e: least squares in log-log space over the last known values."""
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
    """Measure the named families (default: all) at these lengths (default: those of the preset).

    Raises at once for an unknown name, before anything is measured.
    """
    return _measured(cases_of(names), preset, device, dtype, tuple(sorted(set(lengths or preset.texts))))


def _measured(
    cases: Sequence[Case], preset: Preset, device: torch.device, dtype: torch.dtype, lengths: tuple[int, ...]
) -> Iterator[Growth]:
    for case in cases:
        read = f"segments of {preset.train[1]}" if case.streamed else "at once"
        growth = Growth(case.family, read, case.paper, case.claim, lengths)
        for length in lengths:
            costs: tuple[Any, ...] = (None, None, None, None)
            try:
                costs = _cost(case, preset, length, device, dtype)
            except Exception as error:  # one family must not end the others
                growth.failed[length] = _reason(error)
            _clear(device)
            columns: tuple[list[Any], ...] = (growth.seconds, growth.busy, growth.bytes, growth.operations)
            for column, value in zip(columns, costs, strict=True):
                column.append(value)
        yield growth


def _cost(
    case: Case, preset: Preset, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[float, float | None, int, float | None]:
    torch.manual_seed(0)
    model = case.build(preset, length).to(device).train()
    step = Step(model, length, device, dtype)
    step()  # compiles
    once: list[float] = []
    peak = peak_bytes(lambda: once.append(timed(step, 1, device)), device, model.parameters())
    if once[0] >= LONG_CALL:
        return once[0], None, peak, case.operations(model, length)
    time = seconds(step, device, least=0.1, rounds=3)
    return time, busy_seconds(step, device), peak, case.operations(model, length)


class Step:
    """A forward and backward pass over a random text, one segment at a time."""

    def __init__(self, model: LanguageModel, length: int, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        self.ids = torch.randint(model.config.vocabulary, (1, length + 1), device=device)

    def __call__(self) -> None:
        for loss, _ in map_segments(self._loss, self.model.initial_state(1), self.ids[:, :-1], self.ids[:, 1:]):
            loss.backward()
        self.model.zero_grad(set_to_none=True)

    def _loss(self, tokens: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
            loss, state = self.model.training_loss(tokens, targets, state, 0.0)
        return loss, state.detach()


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return "out of memory"
    first = str(error).partition("\n")[0]
    return first if isinstance(error, LongspanError) else f"{type(error).__name__}: {first:.120}"


def _clear(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch._dynamo.reset()  # otherwise it stops compiling after a few shapes
        torch.cuda.empty_cache()
