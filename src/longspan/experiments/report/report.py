"""The report about some runs: curves, scores, context, attention and sample text, measured on held-out text."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from longspan.checkpoints.model_folder import Loaded, load_model
from longspan.checkpoints.store import write_file
from longspan.data.encoded import Encoded, open_corpus
from longspan.errors import ConfigError, LongspanError
from longspan.experiments.contexts import LONGEST, SHARES, THRESHOLD, even_contexts
from longspan.experiments.figures.attention import attention_by_distance, has_attention
from longspan.experiments.figures.attention_figures import (
    draw_attention,
    draw_head,
    draw_spans,
    draw_terms,
    widest_heads,
)
from longspan.experiments.figures.attention_sample import sample_attention
from longspan.experiments.figures.context_figures import draw_gains, draw_perplexity
from longspan.experiments.figures.drawing import legend, legend_height, legend_name, line_style, save_figure
from longspan.experiments.report.page import Section, figure, note, page, table, text
from longspan.experiments.report.published import comparable, published_for
from longspan.experiments.report.runs import Run, read_run
from longspan.scoring.contexts import Passage, Progress, Subject, choose_targets, measure
from longspan.scoring.recl import Length, chance_gains, ecl, recl
from longspan.scoring.score import score
from longspan.text_model import TextModel


@dataclass(frozen=True)
class Effort:
    """How much held-out text each part of the report uses, in tokens."""

    stream: int = 8192
    sliding: int = 512
    sliding_total: int = 1 << 18
    """Upper bound of the tokens that all sliding windows read together."""
    targets: int = 60
    longest_context: int = LONGEST
    attention: int = 8192
    sample: int = 400


@dataclass(frozen=True)
class OpenRun:
    """A run with its model and the held-out text to measure it on."""

    run: Run
    loaded: Loaded
    held_out: Encoded


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in some folders, named after the folders, or by their paths if two folders share a name."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError(f"RUN {' '.join(map(str, paths))} lists a run twice; list each run only once")
    unique = len({path.resolve().name for path in paths}) == len(paths)
    return [read_run(path, None if unique else str(path)) for path in paths]


def check_report_path(flag: str, path: Path) -> None:
    """Raise a ConfigError if a report cannot be written there; called before anything is measured."""
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; use the path of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {path.parent}; create it first")


def write_report(
    runs: Sequence[Run],
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    progress: Progress | None = None,
    opening: Sequence[Section] = (),
) -> None:
    with tempfile.TemporaryDirectory(prefix="longspan-report-") as scratch:
        content = build_report(runs, Path(scratch), device, dtype, progress=progress, opening=opening)
    write_file(path, content.encode("utf-8"))


def build_report(
    runs: Sequence[Run],
    scratch: Path,
    device: torch.device,
    dtype: torch.dtype,
    effort: Effort | None = None,
    progress: Progress | None = None,
    opening: Sequence[Section] = (),
) -> str:
    """One HTML file. A section that cannot be made says why.

    Figures are drawn in the folder `scratch`; `progress` is called with the sections made so far and the number of
    sections; `opening` sections come first.
    """
    effort = effort or Effort()
    opened, problems = _open(runs, device, dtype)
    parts: list[tuple[str, Callable[[], Iterator[str]]]] = [
        ("Runs", lambda: _runs(runs, opened)),
        ("Learning curves", lambda: _curves(runs, opened, scratch)),
        ("Scores", lambda: _scores(opened, effort)),
        ("Context", lambda: _contexts(opened, scratch, effort)),
        ("Attention", lambda: _attention(opened, scratch, effort)),
        ("Sample text", lambda: _samples(opened, effort)),
    ]
    sections = []
    for title, make in parts:
        body = "".join(_or_reason(make))
        sections.append(Section(title, body + ("".join(map(note, problems)) if title == "Runs" else "")))
        if progress is not None:
            progress(len(sections), len(parts))
    names = ", ".join(run.name for run in runs)
    lead = f"{names}; held-out text of {', '.join(sorted({run.corpus for run in runs}))}; {_machine(device)}."
    return page("longspan: " + names, lead, [*opening, *sections])


def _or_reason(make: Callable[[], Iterator[str]]) -> Iterator[str]:
    try:
        yield from make()
    except LongspanError as error:
        yield note(f"This part is missing: {error}")


def _open(runs: Sequence[Run], device: torch.device, dtype: torch.dtype) -> tuple[list[OpenRun], list[str]]:
    """The runs whose model and text can be opened, and the reasons why the others cannot."""
    opened, problems = [], []
    for run in runs:
        try:
            loaded = load_model(run.path, device=device, dtype=dtype)
            loaded.model.require_next_token()
            used = {key: value for key, value in run.evaluation.items() if key in loaded.model.settings}
            if any(getattr(loaded.model.reading, key) != value for key, value in used.items()):
                loaded = load_model(run.path, overrides=used, device=device, dtype=dtype)
            held_out = open_corpus(
                run.corpus,
                "test",
                loaded.tokenizer,
                held_out=run.held_out_files,
                field=run.data_option("field"),
                encoding=run.data_option("encoding"),
            )
            opened.append(OpenRun(run, loaded, held_out))
        except LongspanError as error:
            problems.append(f"{run.name} is not measured: {error}")
    return opened, problems


def _runs(runs: Sequence[Run], opened: Sequence[OpenRun]) -> Iterator[str]:
    sizes = {one.run.name: one.loaded.model.parameter_count for one in opened}
    rows = []
    for run in runs:
        speed, seconds = run.training["tokens_per_second"], run.training["seconds"]
        rows.append(
            [
                run.name,
                run.family,
                f"{sizes[run.name]:,}" if run.name in sizes else "",
                run.corpus,
                f"{int(run.training['step'][-1]):,}" if len(seconds) else "",
                f"{seconds[-1] / 60:.1f}" if len(seconds) else "",
                f"{np.median(speed):,.0f}" if len(speed) else "",
                str(run.machine.get("device", "")),
            ]
        )
    yield table(["run", "family", "parameters", "corpus", "steps", "minutes", "tokens/s", "device"], rows)


def _curves(runs: Sequence[Run], opened: Sequence[OpenRun], scratch: Path) -> Iterator[str]:
    """Smoothed training loss, and validation loss if the run has any, by tokens of training text. One figure per unit:
    bits of a byte and bits of a word are not comparable."""
    units = {one.run.name: one.loaded.tokenizer.unit for one in opened}
    if not any(len(run.training["step"]) for run in runs):
        yield note("No run has written metrics yet.")
        return
    groups: dict[str, list[tuple[int, Run]]] = {}
    for i, run in enumerate(runs):
        if len(run.training["step"]):
            groups.setdefault(units.get(run.name, "token"), []).append((i, run))
    for unit, shown in groups.items():
        yield _draw_curves(shown, unit, scratch)


def _draw_curves(shown: Sequence[tuple[int, Run]], unit: str, scratch: Path) -> str:
    labels = [f"{legend_name(run.name)}, {curve}" for _, run in shown for curve in ("training", "held out")]
    with save_figure(scratch, f"curves-{unit}", 6.4, 3.4 + legend_height(labels, 6.4)) as canvas:
        axes = canvas.subplots()
        for i, run in shown:
            steps, bits, style = run.training["step"], run.training["bits"], line_style(i)
            window = max(1, len(bits) // 50)
            smooth = np.convolve(bits, np.ones(window) / window, mode="valid")
            tokens = run.training["tokens"][window - 1 :]
            axes.plot(tokens, smooth, label=f"{legend_name(run.name)}, training", **(style | {"marker": ""}))
            if len(run.held_out["step"]):
                at = np.interp(run.held_out["step"], steps, run.training["tokens"])
                held_out = {"linestyle": "", "label": f"{legend_name(run.name)}, held out"}
                axes.plot(at, run.held_out["bits"], **(style | held_out))
        axes.set_xlabel(f"training text ({unit}s)")
        axes.set_ylabel(f"loss (bits per {unit})")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.locator_params(axis="x", nbins=5)
        legend(canvas, axes)
    markers = ", held-out loss (markers)" if any(len(run.held_out["step"]) for _, run in shown) else ""
    return figure(scratch / f"curves-{unit}.svg", f"Loss by {unit}s of training text: smoothed (lines){markers}.")


def _scores(opened: Sequence[OpenRun], effort: Effort) -> Iterator[str]:
    """Loss and speed of each model on held-out text, as a stream and with a sliding window.

    A sliding window is slow, so it scores few tokens. The stream's loss on the same tokens is shown next to it.
    """
    if not opened:
        yield note("No run could be measured.")
        return
    begin = max(_window(one) for one in opened)
    sliding = max(1, min(effort.sliding, effort.sliding_total // begin))
    scored = max(effort.stream, begin + sliding)
    rows: list[list[str]] = []
    bits: dict[str, float] = {}
    for one in opened:
        ids, model, name = one.held_out.ids, one.loaded.model, one.run.name
        count = min(sliding, len(ids) - 1 - begin)
        if model.has_memory():
            found = score(model, one.held_out.excerpt(0, scored + 1), losses=True)
            assert found.losses is not None
            bits[name] = found.bits
            same = f"{found.losses[begin : begin + count].mean(dtype=np.float64) / np.log(2):.3f}" if count > 0 else ""
            speed = f"{found.tokens_per_second:,.0f}"
            rows.append(
                [
                    name,
                    f"stream with memory{_extra_help(one)}",
                    f"{found.bits:.3f}",
                    f"{found.perplexity:,.2f}",
                    same,
                    speed,
                ]
            )
        if count > 0:
            window = _window(one)
            excerpt = one.held_out.excerpt(begin - window, begin + count + 1)
            found = score(model, excerpt, replace(model.reading, segment=window), method="sliding", losses=True)
            assert found.losses is not None
            sliding_bits = float(found.losses[window:].mean(dtype=np.float64) / np.log(2))
            bits.setdefault(name, sliding_bits)
            speed = f"{found.tokens_per_second:,.0f}"
            rows.append([name, f"sliding window of {window}", "", "", f"{sliding_bits:.3f}", speed])
    units = {one.loaded.tokenizer.unit for one in opened}
    unit = units.pop() if len(units) == 1 else "token"
    yield table(["run", "method", f"bits per {unit}", "perplexity", f"bits, same {unit}s", f"{unit}s/s"], rows)
    yield note(
        f"Bits and perplexity are over the first {scored:,} tokens of the test split. The next column is over the "
        f"{sliding:,} tokens after the first {begin:,}: all rows of a text score these and can be compared. A sliding "
        "window is computed again for every token; the difference in speed is what a memory saves."
    )
    yield from _published(opened, bits)


def _extra_help(one: OpenRun) -> str:
    """Settings that change the score and that most papers do not use."""
    reading = one.loaded.model.reading
    pointer = f", pointer {reading.pointer}" if reading.pointer else ""
    temperature = f", temperature {reading.temperature:g}" if reading.temperature != 1 else ""
    return pointer + temperature


def _window(one: OpenRun) -> int:
    """Tokens of a sliding window: about as many as the model sees of the past in a stream."""
    reading = one.loaded.model.reading
    return (reading.memory if one.loaded.model.has_memory() else reading.segment) or reading.segment


def _published(opened: Sequence[OpenRun], bits: dict[str, float]) -> Iterator[str]:
    """The runs among the published scores of their corpus."""
    for corpus in sorted({one.run.corpus for one in opened}):
        unit, known = published_for(corpus)
        if not known:
            yield note(f"There are no published scores for {corpus}.")
            continue
        rows = [(score.score, score.model, f"{score.parameters:g}M", "published") for score in known]
        for one in opened:
            if one.run.corpus != corpus or one.run.name not in bits:
                continue
            if not comparable(corpus, one.loaded.tokenizer.unit):
                yield note(f"{one.run.name} is scored per {one.loaded.tokenizer.unit}; published scores are {unit}.")
            else:
                ours = bits[one.run.name] if unit.startswith("bits") else 2 ** bits[one.run.name]
                size = one.loaded.model.parameter_count / 1e6
                rows.append((ours, one.run.name, f"{size:.3g}M", f"this run{_extra_help(one)}"))
        rows.sort()
        bold = [n for n, row in enumerate(rows) if row[3] != "published"]
        cells = [[model, size, f"{value:.3g}", source] for value, model, size, source in rows]
        yield table(["model", "parameters", f"{corpus}: {unit}", "source"], cells, bold)
        yield note("Published scores are over the complete test split, ours over its first tokens.")


def _contexts(opened: Sequence[OpenRun], scratch: Path, effort: Effort) -> Iterator[str]:
    """RECL and ECL of models that share a text: those with memory, then all up to the shortest window."""
    groups: dict[str, list[OpenRun]] = {}
    for one in opened:
        groups.setdefault(one.held_out.fingerprint, []).append(one)
    for n, group in enumerate(groups.values()):
        with_memory = [one for one in group if one.loaded.model.has_memory()]
        windows = [one.loaded.model.reading.segment for one in group if not one.loaded.model.has_memory()]
        if with_memory:
            yield from _context(with_memory, effort.longest_context, scratch / f"group-{n}", effort)
        if windows:
            longest = min(effort.longest_context, *windows)
            yield from _context(group, longest, scratch / f"group-{n}-windows", effort)
            yield note(f"A model without memory sees nothing before its window; the shortest is {min(windows)} tokens.")


def _context(group: Sequence[OpenRun], longest: int, folder: Path, effort: Effort) -> Iterator[str]:
    """RECL and ECL of one group with figures 3 and 4, at ten evenly spaced contexts."""
    ids = group[0].held_out.ids
    contexts = even_contexts(min(longest, len(ids) // 2))
    if not contexts:
        yield note(f"The held-out text of {group[0].run.corpus} or a window is too short to measure context.")
        return
    targets = choose_targets(len(ids), contexts[-1], min(effort.targets, len(ids) - contexts[-1]))
    subjects = [Subject(one.run.name, one.loaded.model, one.loaded.hash) for one in group]
    losses = measure(subjects, Passage(ids, targets, group[0].held_out.fingerprint), contexts)
    by_share = {name: recl(losses, share, THRESHOLD) for name, share in SHARES.items()}
    columns = {f"RECL, r = {name}": lengths for name, lengths in by_share.items()} | {"ECL": ecl(losses, THRESHOLD)}
    yield table(["run", *columns], [[name, *(_shown(c[name]) for c in columns.values())] for name in losses.names])
    yield note(
        f"In tokens, for contexts up to {contexts[-1]:,} in steps of {contexts[0]:,}, over {len(targets)} targets, "
        "with 95% intervals. + means that the last context still gained, so the length may be larger."
    )
    yield from (note(f"{sentence}.") for sentence in chance_gains(losses, by_share.values()))
    folder.mkdir(exist_ok=True)
    draw_perplexity(losses, folder)
    draw_gains(losses, SHARES, THRESHOLD, folder)
    yield figure(folder / "figure4.svg", f"Perplexity by context length, up to {contexts[-1]:,} tokens.")
    yield figure(folder / "figure3.svg", "Gain of the next step of context, for the hardest targets and for all.")


def _shown(length: Length) -> str:
    return f"{length.tokens:,}{'+' if length.bounded else ''} ({length.low:,} to {length.high:,})"


def _attention(opened: Sequence[OpenRun], scratch: Path, effort: Effort) -> Iterator[str]:
    for n, one in enumerate(opened):
        if not has_attention(one.loaded.model):
            yield note(f"{one.run.name} has no attention that can be drawn.")
            continue
        folder = scratch / f"attention-{n}"
        folder.mkdir(exist_ok=True)
        ids = one.held_out.ids[: effort.attention]
        means = attention_by_distance(one.loaded.model, ids)
        draw_attention(means, folder)
        yield figure(folder / "figure5.svg", f"{one.run.name}: mean attention of every head by distance.")
        draw_spans(means, folder)
        yield figure(folder / "spans.svg", f"{one.run.name}: attention span of every head.")
        if means.terms:
            draw_terms(means, folder)
            yield figure(folder / "figure7.svg", f"{one.run.name}: the four terms of the attention score.")
        (layer, head), *_ = widest_heads(means, 1)
        draw_head(sample_attention(one.loaded.model, ids, one.loaded.tokenizer, 24), layer, head, "figure6", folder)
        yield figure(folder / "figure6.svg", f"{one.run.name}: the head with the largest mean distance.")


def _samples(opened: Sequence[OpenRun], effort: Effort) -> Iterator[str]:
    """A continuation of the first tokens of the held-out text by each model."""
    for one in opened:
        model = TextModel(one.loaded.model, one.loaded.tokenizer, one.loaded.hash)
        prompt = one.loaded.tokenizer.decode(np.asarray(one.held_out.ids[:200]))
        generated = model.generate(prompt, effort.sample, temperature=0.8, top_p=0.95, seed=0)
        yield note(f"{one.run.name}, temperature 0.8. The text before the bar is the start of the test split:")
        yield text(f"{prompt}|{generated}")


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"measured on {torch.cuda.get_device_name(device)}"
    return f"measured on a CPU, threads: {torch.get_num_threads()}"
