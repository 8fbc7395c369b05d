"""Figures 3 and 4 of Dai et al. 2019: the gain of another step of context, and perplexity by context length."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from longspan.experiments.figures.drawing import (
    keep_range,
    legend,
    legend_height,
    legend_name,
    line_style,
    save_figure,
)
from longspan.scoring.loss_table import LossTable
from longspan.scoring.recl import gains

_FLOOR = 1e-2  # of the threshold: smaller gains are drawn here, because the axis is logarithmic
_THRESHOLD = "threshold (RECL ends at the first gain below it)"
_OPEN = "open: perplexity did not fall over this step"


def draw_gains(table: LossTable, shares: Mapping[str, float], threshold: float, folder: Path) -> None:
    """figure3: g_i(c, c') by c, one panel per r. The RECL of a model is where its line first falls below the threshold.

    The paper draws the gain before it is divided by the perplexity. We draw g, so that the threshold is a line. Markers
    are open where the model's perplexity did not fall over the step: such a gain may be chance (docs/recl.md).
    """
    labels = [*map(legend_name, table.names), _THRESHOLD, _OPEN]
    width, floor = 3.2 * max(2, len(shares)), threshold * _FLOOR * 100
    fell = np.diff(table.losses.mean(axis=2)) < 0
    with save_figure(folder, "figure3", width, 3.2 + legend_height(labels, width)) as figure:
        panels = figure.subplots(1, len(shares), squeeze=False, sharey=True)[0]
        for axes, (name, share) in zip(panels, shares.items(), strict=True):
            for i, gain in enumerate(gains(table.losses, share)):
                percent, style = np.maximum(gain * 100, floor), line_style(i)
                axes.plot(table.contexts[:-1], percent, label=labels[i], **style)
                unchanged = [*np.flatnonzero(~fell[i])]
                axes.plot(
                    np.take(table.contexts, unchanged),
                    percent[unchanged],
                    **style | {"linestyle": "", "markerfacecolor": "white"},
                )
            axes.axhline(threshold * 100, color="black", linewidth=0.8, linestyle=(0, (6, 4)), label=_THRESHOLD)
            axes.plot([], [], "o", color="black", markerfacecolor="white", label=_OPEN)
            axes.set_yscale("log")
            axes.set_ylim(floor * 0.7, 100)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}" if value > floor * 1.01 else "none")
            subset = f"hardest {share * 100:.3g}% of targets" if share < 1 else "all targets"
            axes.set_title(f"{subset} (r = {name})")
            axes.set_xlabel("context c (tokens)")
        panels[0].set_ylabel("gain of the next step (% of perplexity)")
        legend(figure, panels[0])


def draw_perplexity(table: LossTable, folder: Path) -> None:
    """figure4: perplexity by context length, over all targets."""
    labels = list(map(legend_name, table.names))
    with save_figure(folder, "figure4", 6.4, 3.4 + legend_height(labels, 6.4)) as figure:
        axes = figure.subplots()
        for i, name in enumerate(labels):
            axes.plot(table.contexts, np.exp(table.losses[i].mean(axis=1)), label=name, **line_style(i))
        axes.set_xlabel("context c (tokens)")
        axes.set_ylabel("perplexity per token")
        keep_range(axes)
        axes.set_title(f"{table.targets} targets, each with exactly c tokens before it")
        legend(figure, axes)
