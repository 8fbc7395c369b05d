"""Figures 3 and 4 of Dai et al. 2019: what another step of context gains, and perplexity over context."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from longspan.analysis.drawing import legend, legend_height, line, name_of, picture
from longspan.evaluation.loss_table import LossTable
from longspan.evaluation.recl import gains

_FLOOR = 1e-2  # of the threshold: gains below it are drawn at it, a logarithm has no zero
_THRESHOLD = "threshold (a gain below it ends the walk)"
_OPEN = "open: perplexity did not fall over this step"


def draw_gains(table: LossTable, shares: Mapping[str, float], threshold: float, folder: Path) -> None:
    """figure3: g_i(c, c') over c, one panel for each r; the RECL of a model is where it first falls below the line.

    The paper draws the gain before it is divided by the perplexity; we draw g, so that the threshold is a line. Steps
    over which the model's perplexity did not fall are left open: such a gain may be chance (docs/recl.md).
    """
    labels = [*map(name_of, table.names), _THRESHOLD, _OPEN]
    width, floor = 3.2 * max(2, len(shares)), threshold * _FLOOR * 100
    fell = np.diff(table.losses.mean(axis=2)) < 0
    with picture(folder, "figure3", width, 3.2 + legend_height(labels, width)) as figure:
        panels = figure.subplots(1, len(shares), squeeze=False, sharey=True)[0]
        for axes, (name, share) in zip(panels, shares.items(), strict=True):
            for i, found in enumerate(gains(table.losses, share)):
                percent, style = np.maximum(found * 100, floor), line(i)
                axes.plot(table.contexts[:-1], percent, label=labels[i], **style)
                idle = [*np.flatnonzero(~fell[i])]
                axes.plot(
                    np.take(table.contexts, idle),
                    percent[idle],
                    **style | {"linestyle": "", "markerfacecolor": "white"},
                )
            axes.axhline(threshold * 100, color="black", linewidth=0.8, linestyle=(0, (6, 4)), label=_THRESHOLD)
            axes.plot([], [], "o", color="black", markerfacecolor="white", label=_OPEN)
            axes.set_yscale("log")
            axes.set_ylim(floor * 0.7, 100)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}" if value > floor * 1.01 else "none")
            which = f"hardest {share * 100:.3g}% of targets" if share < 1 else "all targets"
            axes.set_title(f"{which} (r = {name})")
            axes.set_xlabel("context c (tokens)")
        panels[0].set_ylabel("gain of the next step (% of perplexity)")
        legend(figure, panels[0])


def draw_perplexity(table: LossTable, folder: Path) -> None:
    """figure4: perplexity over the length of context, all targets."""
    labels = list(map(name_of, table.names))
    with picture(folder, "figure4", 6.4, 3.4 + legend_height(labels, 6.4)) as figure:
        axes = figure.subplots()
        for i, name in enumerate(labels):
            axes.plot(table.contexts, np.exp(table.losses[i].mean(axis=1)), label=name, **line(i))
        axes.set_xlabel("context c (tokens)")
        axes.set_ylabel("perplexity per token")
        axes.set_title(f"{table.targets} targets, each with exactly c tokens before it")
        legend(figure, axes)
