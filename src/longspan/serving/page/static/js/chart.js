// Lines over one x axis, drawn by uPlot in the colours of the page.

/* global uPlot */

const LIGHT = ["#8a4b08", "#1f6f54", "#1f4e79", "#7a2f7d", "#a3231c", "#4a5560", "#66700c"];
const DARK = ["#f0b06a", "#72cfa8", "#8fbdec", "#d79bdb", "#ff9d96", "#c4ccd6", "#cfd86a"];
const dark = matchMedia("(prefers-color-scheme: dark)");

export class Chart {
  // `labels`: names of the places 0, 1, 2, ... on the x axis instead of numbers.
  constructor(container, { x, y, about, labels = null, points = false, range = null }) {
    Object.assign(this, { container, x, y, labels, points, range, names: [], data: null, plot: null });
    container.setAttribute("role", "figure");
    container.setAttribute("aria-label", about);
    dark.addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.resize()).observe(container);
  }

  // Columns: the x values, then one list per name.
  update(names, columns, labels = this.labels) {
    const same = this.plot && names.join() === this.names.join() && String(labels) === String(this.labels);
    Object.assign(this, { names, data: columns, labels });
    if (same) this.plot.setData(columns);
    else this.draw();
  }

  get width() {
    return Math.max(this.container.clientWidth - 20, 200);
  }

  resize() {
    if (this.plot && this.width !== this.plot.width) this.plot.setSize({ width: this.width, height: 260 });
    else if (!this.plot && this.data) this.draw();
  }

  draw() {
    this.plot?.destroy();
    this.plot = null;
    if (!this.data || !this.container.clientWidth) return;
    const style = getComputedStyle(document.documentElement);
    const colours = dark.matches ? DARK : LIGHT;
    const axis = { stroke: style.getPropertyValue("--soft"), grid: { stroke: style.getPropertyValue("--line"), width: 1 }, ticks: { stroke: style.getPropertyValue("--line") } };
    const places = this.labels && {
      splits: () => this.labels.map((_, index) => index),
      values: (_, found) => found.map((value) => this.labels[value] ?? ""),
    };
    const range = this.labels ? [-0.3, this.labels.length - 0.7] : this.range;
    this.plot = new uPlot({
      width: this.width,
      height: 260,
      scales: { x: { time: false, ...(range ? { range } : {}) } },
      legend: { live: true },
      cursor: { drag: { x: false, y: false } },
      axes: [{ ...axis, label: this.x, labelSize: 22, ...places }, { ...axis, label: this.y, labelSize: 22, size: 52 }],
      series: [
        { label: this.x, value: (_, value) => (value === null ? "–" : this.labels ? this.labels[value] : value.toLocaleString("en")) },
        ...this.names.map((label, index) => ({
          label,
          stroke: colours[index % colours.length],
          width: 2,
          dash: index % 2 ? [6, 3] : undefined,
          points: { show: this.points },
          spanGaps: true,
          value: (_, value) => (value === null || value === undefined ? "–" : value.toFixed(3)),
        })),
      ],
    }, this.data, this.container);
  }
}

// Several lines with x values of their own as the columns of one chart.
export const joined = (lines) => {
  const filled = lines.filter(([x]) => x.length);
  return filled.length === lines.length ? uPlot.join(lines) : uPlot.join(lines.map(([x, y]) => (x.length ? [x, y] : [[0], [null]])));
};
