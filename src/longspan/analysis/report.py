"""The report of some runs: curves, scores, context, speed, pictures and text, measured anew on held-out text."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longspan.analysis.attention import attention_by_distance, can_be_drawn
from longspan.analysis.attention_figures import draw_attention, draw_spans, draw_terms, draw_wide_head, widest_heads
from longspan.analysis.context_figures import draw_gains, draw_perplexity
from longspan.analysis.drawing import legend, legend_height, line, name_of, picture
from longspan.analysis.page import Section, figure, note, page, table, text
from longspan.analysis.passages import take_passage
from longspan.analysis.published import comparable, published_for
from longspan.analysis.runs import Run
from longspan.checkpoints.model_folder import Loaded, load_model
from longspan.data.encoded import Encoded, open_corpus
from longspan.errors import LongspanError
from longspan.evaluation.contexts import Passage, Subject, Watch, choose_targets, measure
from longspan.evaluation.likelihood import Stretch, Tally, sliding_losses, stream_losses
from longspan.evaluation.recl import Length, chance_gains, ecl, recl
from longspan.layers.model_config import WEIGHTLESS
from longspan.text_model import TextModel

SHARES = {"0.1": 0.1, "0.5": 0.5, "1.0": 1.0}
THRESHOLD = 0.01


@dataclass(frozen=True)
class Effort:
    """How much held-out text each part of the report may cost."""

    scored: int = 8192
    slid: int = 512
    slid_over: int = 1 << 18  # tokens read by the windows of all slid tokens together
    targets: int = 60
    longest: int = 1000
    looked: int = 8192
    written: int = 400


@dataclass(frozen=True)
class Subjects:
    """A run with its model and the held-out text it is measured on."""

    run: Run
    loaded: Loaded
    held_out: Encoded


def build_report(
    runs: Sequence[Run],
    scratch: Path,
    device: torch.device,
    dtype: torch.dtype,
    effort: Effort | None = None,
    watch: Watch | None = None,
    opening: Sequence[Section] = (),
) -> str:
    """One HTML file; a part that cannot be made says why in its place. Pictures pass through the folder `scratch`;
    `watch` is called with parts made and parts in all; `opening` comes first, as it is."""
    effort = effort or Effort()
    opened, troubles = _open(runs, device, dtype)
    parts: list[tuple[str, Callable[[], Iterator[str]]]] = [
        ("Runs", lambda: _runs(runs, opened)),
        ("Learning curves", lambda: _curves(runs, scratch)),
        ("Scores", lambda: _scores(opened, effort)),
        ("Context", lambda: _contexts(opened, scratch, effort)),
        ("Attention", lambda: _pictures(opened, scratch, effort)),
        ("Sample text", lambda: _samples(opened, effort)),
    ]
    sections = []
    for title, make in parts:
        body = "".join(_told(make))
        sections.append(Section(title, body + ("".join(map(note, troubles)) if title == "Runs" else "")))
        if watch is not None:
            watch(len(sections), len(parts))
    names = ", ".join(run.name for run in runs)
    lead = f"{names}; held-out text of {', '.join(sorted({run.corpus for run in runs}))}; {_machine(device)}."
    return page("longspan: " + names, lead, [*opening, *sections])


def _told(make: Callable[[], Iterator[str]]) -> Iterator[str]:
    try:
        yield from make()
    except LongspanError as error:
        yield note(f"This part is missing: {error}")


def _open(runs: Sequence[Run], device: torch.device, dtype: torch.dtype) -> tuple[list[Subjects], list[str]]:
    """Models and texts of the runs that have both, and why the others have not."""
    opened, troubles = [], []
    for run in runs:
        try:
            loaded = load_model(run.path, device=device, dtype=dtype)
            wanted = {key: run.evaluation[key] for key in WEIGHTLESS if key in run.evaluation}
            known: dict[str, Any] = {k: v for k, v in wanted.items() if hasattr(loaded.model.config, k)}
            loaded = load_model(run.path, overrides=known, device=device, dtype=dtype) if known else loaded
            held_out = open_corpus(run.corpus, "test", loaded.tokenizer, held_out=run.held_out_files)
            opened.append(Subjects(run, loaded, held_out))
        except LongspanError as error:
            troubles.append(f"{run.name} is not measured: {error}")
    return opened, troubles


def _runs(runs: Sequence[Run], opened: Sequence[Subjects]) -> Iterator[str]:
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
    yield table(["run", "family", "parameters", "corpus", "steps", "minutes", "tokens/s", "on"], rows)


def _curves(runs: Sequence[Run], scratch: Path) -> Iterator[str]:
    """Training loss, smoothed, and held-out loss where the run scored it, over tokens read."""
    if not any(len(run.training["step"]) for run in runs):
        yield note("No run has written metrics yet.")
        return
    read = [(i, run) for i, run in enumerate(runs) if len(run.training["step"])]
    labels = [f"{name_of(run.name)}, {what}" for _, run in read for what in ("training", "held out")]
    with picture(scratch, "curves", 6.4, 3.4 + legend_height(labels, 6.4)) as canvas:
        axes = canvas.subplots()
        for i, run in read:
            steps, bits, style = run.training["step"], run.training["bits"], line(i)
            window = max(1, len(bits) // 50)
            smooth = np.convolve(bits, np.ones(window) / window, mode="valid")
            tokens = run.training["tokens"][window - 1 :]
            axes.plot(tokens, smooth, label=f"{name_of(run.name)}, training", **(style | {"marker": ""}))
            if len(run.held_out["step"]):
                at = np.interp(run.held_out["step"], steps, run.training["tokens"])
                held_out = {"linestyle": "", "label": f"{name_of(run.name)}, held out"}
                axes.plot(at, run.held_out["bits"], **(style | held_out))
        axes.set_xlabel("tokens read in training")
        axes.set_ylabel("loss (bits per token)")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.locator_params(axis="x", nbins=5)
        legend(canvas, axes)
    marks = ", marks for held-out text" if any(len(run.held_out["step"]) for _, run in read) else ""
    yield figure(scratch / "curves.svg", f"Loss over tokens read: a line for training (smoothed){marks}.")


def _scores(opened: Sequence[Subjects], effort: Effort) -> Iterator[str]:
    """How well and how fast each model reads held-out text, as a stream and by a fresh window for every token.

    Windows are slow, so they score few tokens; a stream is scored on those too, or the two could not be compared.
    """
    if not opened:
        yield note("No run could be measured.")
        return
    begin = max(_window(one) for one in opened)
    slid = max(1, min(effort.slid, effort.slid_over // begin))
    scored = max(effort.scored, begin + slid)
    rows: list[list[str]] = []
    bits: dict[str, float] = {}
    for one in opened:
        ids = one.held_out.ids
        count = min(slid, len(ids) - 1 - begin)
        if one.loaded.model.has_memory:
            segment = int(one.run.evaluation.get("segment", one.loaded.model.config.segment))
            text = ids[: scored + 1]
            losses = np.zeros(len(text) - 1, np.float32)
            tally, speed = _timed(stream_losses(one.loaded.model, text, segment=segment), Tally(losses))
            bits[one.run.name] = tally.bits
            whole = [f"{tally.bits:.3f}", f"{tally.perplexity:,.2f}"]
            same = f"{losses[begin : begin + count].mean(dtype=np.float64) / np.log(2):.3f}" if count > 0 else ""
            copying = ", copying" if getattr(one.loaded.model.config, "copy", 0) else ""
            rows.append([one.run.name, f"a stream, with memory{copying}", *whole, same, f"{speed:,.0f}"])
        if count > 0:
            window = _window(one)
            stretches = sliding_losses(one.loaded.model, ids[begin - window : begin + count + 1], segment=window)
            next(stretches)  # the first window, all of whose tokens are scored at once
            tally, speed = _timed(stretches, Tally())
            bits.setdefault(one.run.name, tally.bits)
            same = f"{tally.bits:.3f}"
            rows.append([one.run.name, f"a window of {window} before each", "", "", same, f"{speed:,.0f}"])
    units = {one.loaded.tokenizer.unit for one in opened}
    unit = units.pop() if len(units) == 1 else "token"
    yield table(["run", "read as", f"bits per {unit}", "perplexity", f"bits, same {unit}s", f"{unit}s/s"], rows)
    yield note(
        f"Bits and perplexity over the first {scored:,} tokens of the test split. Bits beside them are over the "
        f"{slid:,} after the first {begin:,}, which are scored in every way, so that rows can be compared. A window is "
        "read anew for each token; what a memory saves is the difference in speed."
    )
    yield from _against_published(opened, bits)


def _window(one: Subjects) -> int:
    """How many tokens a fresh window holds: as many as the model sees of the past in a stream, at least nearly."""
    config = one.loaded.model.config
    return int(getattr(config, "memory", 0) if one.loaded.model.has_memory else config.segment) or int(config.segment)


def _timed(stretches: Iterator[Stretch], tally: Tally) -> tuple[Tally, float]:
    """All losses, and how many of them came in a second."""
    began = time.perf_counter()
    for stretch in stretches:
        tally.add(stretch)
    return tally, tally.count / max(time.perf_counter() - began, 1e-9)


def _against_published(opened: Sequence[Subjects], bits: dict[str, float]) -> Iterator[str]:
    for corpus in sorted({one.run.corpus for one in opened}):
        unit, known = published_for(corpus)
        if not known:
            yield note(f"No paper gives a score for {corpus}.")
            continue
        rows = [(score.score, score.model, f"{score.parameters:g}M", "published") for score in known]
        for one in opened:
            if one.run.corpus != corpus or one.run.name not in bits:
                continue
            if not comparable(corpus, one.loaded.tokenizer.unit):
                yield note(f"{one.run.name} reads {one.loaded.tokenizer.unit}s; published scores are {unit}.")
            else:
                score = bits[one.run.name] if unit.startswith("bits") else 2 ** bits[one.run.name]
                size = one.loaded.model.parameter_count / 1e6
                rows.append((score, one.run.name, f"{size:.3g}M", "here"))
        rows.sort()
        ours = [n for n, row in enumerate(rows) if row[3] == "here"]
        yield table(
            ["model", "parameters", f"{corpus}: {unit}", ""], [[m, p, f"{s:.3g}", w] for s, m, p, w in rows], ours
        )
        yield note("Published scores are of the whole test split, ours of its beginning.")


def _contexts(opened: Sequence[Subjects], scratch: Path, effort: Effort) -> Iterator[str]:
    """RECL and ECL of the models that share a text: those with a memory, then all of them up to the shortest window."""
    groups: dict[str, list[Subjects]] = {}
    for one in opened:
        groups.setdefault(one.held_out.fingerprint, []).append(one)
    for n, group in enumerate(groups.values()):
        lasting = [one for one in group if one.loaded.model.has_memory]
        windows = [one.loaded.model.config.segment for one in group if not one.loaded.model.has_memory]
        if lasting:
            yield from _context(lasting, effort.longest, scratch / f"group-{n}", effort)
        if windows:
            yield from _context(group, min(effort.longest, *windows), scratch / f"group-{n}-windows", effort)
            yield note(f"Without a memory nothing lies beyond the window; the shortest here is {min(windows)} tokens.")


def _context(group: Sequence[Subjects], longest: int, folder: Path, effort: Effort) -> Iterator[str]:
    """One group's lengths and figures 3 and 4, over ten even steps of context."""
    ids = group[0].held_out.ids
    step = min(longest, len(ids) // 2) // 10
    if not step:
        yield note(f"The held-out text of {group[0].run.corpus}, or a window, is too short to measure context.")
        return
    contexts = range(step, step * 10 + 1, step)
    targets = choose_targets(len(ids), contexts[-1], min(effort.targets, len(ids) - contexts[-1]))
    subjects = [Subject(one.run.name, one.loaded.model, one.loaded.hash) for one in group]
    found = measure(subjects, Passage(ids, targets, group[0].held_out.fingerprint), contexts)
    by_share = {name: recl(found, share, THRESHOLD) for name, share in SHARES.items()}
    columns = {f"RECL, r = {name}": lengths for name, lengths in by_share.items()} | {"ECL": ecl(found, THRESHOLD)}
    yield table(["run", *columns], [[name, *(_shown(c[name]) for c in columns.values())] for name in found.names])
    yield note(
        f"Tokens of context, up to {contexts[-1]:,} in steps of {step:,}, over {len(targets)} targets, with 95% "
        "intervals; + where the contexts ended before the gain did."
    )
    yield from (note(f"{sentence}.") for sentence in chance_gains(found, by_share.values()))
    folder.mkdir(exist_ok=True)
    draw_perplexity(found, folder)
    draw_gains(found, SHARES, THRESHOLD, folder)
    yield figure(folder / "figure4.svg", f"Perplexity over the length of context, up to {contexts[-1]:,} tokens.")
    yield figure(folder / "figure3.svg", "What the next step of context gains, on the hardest targets and on all.")


def _shown(length: Length) -> str:
    return f"{length.tokens:,}{'+' if length.bounded else ''} ({length.low:,} to {length.high:,})"


def _pictures(opened: Sequence[Subjects], scratch: Path, effort: Effort) -> Iterator[str]:
    for n, one in enumerate(opened):
        if not can_be_drawn(one.loaded.model):
            yield note(f"{one.run.name} has no attention to draw.")
            continue
        folder = scratch / f"attention-{n}"
        folder.mkdir(exist_ok=True)
        ids = one.held_out.ids[: effort.looked]
        found = attention_by_distance(one.loaded.model, ids)
        draw_attention(found, folder)
        yield figure(folder / "figure5.svg", f"{one.run.name}: mean attention of every head over distance.")
        draw_spans(found, folder)
        yield figure(folder / "spans.svg", f"{one.run.name}: how far back each head's attention lies.")
        if found.terms:
            draw_terms(found, folder)
            yield figure(folder / "figure7.svg", f"{one.run.name}: the four terms of the score, each on its own.")
        (layer, head), *_ = widest_heads(found, 1)
        draw_wide_head(take_passage(one.loaded.model, ids, one.loaded.tokenizer, 24), layer, head, "figure6", folder)
        yield figure(folder / "figure6.svg", f"{one.run.name}: what its widest head looks at, with the text.")


def _samples(opened: Sequence[Subjects], effort: Effort) -> Iterator[str]:
    """The same beginning, from the held-out text, and what each model makes of it."""
    for one in opened:
        model = TextModel(one.loaded.model, one.loaded.tokenizer, one.loaded.hash)
        prompt = one.loaded.tokenizer.decode(np.asarray(one.held_out.ids[:200]))
        written = model.generate(prompt, effort.written, temperature=0.8, top_p=0.95, seed=0)
        yield note(f"{one.run.name}, temperature 0.8, after the first 200 tokens of the test split (until the bar):")
        yield text(f"{prompt}|{written}")


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"measured on {torch.cuda.get_device_name(device)}"
    return f"measured on a CPU, threads: {torch.get_num_threads()}"
