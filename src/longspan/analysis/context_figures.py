"""Figures 3 and 4 of Dai et al. 2019: what another step of context gains, and perplexity over context."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from longspan.analysis.drawing import line, picture
from longspan.evaluation.loss_table import LossTable
from longspan.evaluation.recl import gains

_FLOOR = 1e-2  # of the threshold: gains below it are drawn at it, a logarithm has no zero


def draw_gains(table: LossTable, shares: Mapping[str, float], threshold: float, folder: Path) -> None:
    """figure3: g_i(c, c') over c, one panel for each r; the RECL of a model is where it first falls below the line.

    The paper draws the gain before it is divided by the perplexity; we draw g, so that the threshold is a line.
    """
    with picture(folder, "figure3", 3.2 * max(2, len(shares)), 3.4) as figure:
        panels = figure.subplots(1, len(shares), squeeze=False, sharey=True)[0]
        for axes, (name, share) in zip(panels, shares.items(), strict=True):
            floor = threshold * _FLOOR * 100
            for i, found in enumerate(gains(table.losses, share)):
                percent = np.maximum(found * 100, floor)
                axes.plot(table.contexts[:-1], percent, label=table.names[i], **line(i))
            axes.axhline(threshold * 100, color="black", linewidth=0.8, linestyle=(0, (6, 4)), label="threshold")
            axes.set_yscale("log")
            axes.set_ylim(floor * 0.7, 100)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            which = f"hardest {share:.0%} of targets" if share < 1 else "all targets"
            axes.set_title(f"{which} (r = {name})")
            axes.set_xlabel("context c (tokens)")
        panels[0].set_ylabel("gain of the next step (% of perplexity)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=4, fontsize=8)


def draw_perplexity(table: LossTable, folder: Path) -> None:
    """figure4: perplexity over the length of context, all targets."""
    with picture(folder, "figure4", 6.4, 3.6) as figure:
        axes = figure.subplots()
        for i, name in enumerate(table.names):
            axes.plot(table.contexts, np.exp(table.losses[i].mean(axis=1)), label=name, **line(i))
        axes.set_xlabel("context c (tokens)")
        axes.set_ylabel("perplexity per token")
        axes.set_title(f"{table.targets} targets, each with exactly c tokens before it")
        axes.legend(fontsize=8)
