// Measure: the surprisal of a long text, and bits against memory.

import { Job } from "./api.js";
import { Chart } from "./chart.js";
import { $, bytes, count, guarded, make, number, plain } from "./dom.js";

const MOST = 1_000_000;

export class Measure {
  constructor(app) {
    this.app = app;
    this.chart = new Chart($("measure-chart"), { x: "place in bytes", y: "bits per byte", about: "Surprisal along the text; the passages below are its peaks" });
    this.memoryChart = new Chart($("measure-memory-chart"), { x: "memory in tokens", y: "bits per byte", about: "Bits per byte against the length of memory; the table below has the values", points: true });
    $("measure-go").addEventListener("click", guarded(() => this.run("/page/measure", (job) => this.update(job))));
    $("measure-memory").addEventListener("click", guarded(() => this.run("/page/memory", (job) => this.updateMemory(job))));
    $("measure-cancel").addEventListener("click", () => this.job?.cancel());
    $("measure-file").addEventListener("change", guarded(async (event) => { await this.take(event.target.files[0]); }));
    $("measure-input").addEventListener("input", () => this.set($("measure-input").value));
    const drop = $("measure-drop");
    for (const name of ["dragover", "dragleave", "drop"]) {
      drop.addEventListener(name, (event) => {
        event.preventDefault();
        drop.classList.toggle("over", name === "dragover");
      });
    }
    drop.addEventListener("drop", guarded(async (event) => { await this.take(event.dataTransfer.files[0]); }));
  }

  start(text) {
    $("measure-input").value = text;
    this.set(text);
    this.app.onModel(() => this.reset());
    this.reset();
  }

  reset() {
    $("measure-memory").disabled = !this.app.model.memory_can_change;
  }

  async take(file) {
    if (!file) return;
    const data = new Uint8Array(await file.slice(0, MOST).arrayBuffer());
    const cut = file.size > MOST;  // with `stream`, a character that is cut is left out
    const text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(data, { stream: cut });
    $("measure-input").value = text;
    this.set(text, cut ? `${file.name} has ${bytes(file.size)}; its first 1 MB is measured. ` : `${file.name}: `);
  }

  // What is measured. Not the value of the input: that has no carriage returns.
  set(text, before = "") {
    this.text = text;
    $("measure-size").textContent = `${before}${count(new TextEncoder().encode(text).length)} bytes`;
  }

  async run(path, update) {
    if (!this.text) throw new Error("there is no text to measure; type or drop one");
    this.job?.cancel();
    const began = performance.now();
    const job = new Job(path, { model: this.app.model.id, text: this.text }, (state) => {
      if (job !== this.job) return;
      const { done, total } = state;
      $("measure-progress").hidden = state.state !== "running";
      $("measure-progress").value = done / total;
      const speed = done / ((performance.now() - began) / 1000);
      $("measure-status").textContent = done && state.state === "running" ? `${count(speed)} bytes/s, ${count((total - done) / speed)} s left` : "Reading…";
      update(state);
    });
    this.job = job;
    $("measure-cancel").disabled = false;
    $("measure-status").textContent = "Reading…";
    try {
      const { state } = await job.finished;
      if (job === this.job) $("measure-status").textContent = state === "finished" ? "Done." : "Cancelled; the results so far stay.";
    } catch (error) {
      if (job === this.job) $("measure-status").textContent = "";
      throw error;
    } finally {
      if (job === this.job) { // not one that a newer job replaced
        $("measure-cancel").disabled = true;
        $("measure-progress").hidden = true;
      }
    }
  }

  update({ result }) {
    $("measure-result").hidden = false;
    $("measure-numbers").textContent = `${number(result.bits_per_byte, 4)} bits per byte over ${count(result.bytes_read)} of ${count(result.bytes)} bytes`;
    this.chart.update([this.app.model.id], [result.curve.places, result.curve.bits]);
    $("measure-passages").replaceChildren(...result.passages.map(({ begin, text, bits_per_byte: bits }) =>
      make("li", {}, plain(text).trim(), make("small", {}, `${number(bits, 2)} bits per byte, at byte ${count(begin)}`))));
  }

  updateMemory({ result }) {
    $("measure-memories").hidden = false;
    const labels = result.ways.map((way) => (way.memory ? String(way.memory) : "none"));
    const bits = result.ways.map((way) => way.bits_per_byte);
    $("measure-sample").textContent = `Read with each memory: ${count(result.bytes)} bytes; of a longer text, its middle. Without memory, segments of ${result.ways[0].reading.segment} tokens are read one at a time.`;
    this.memoryChart.update([this.app.model.id], [labels.map((_, index) => index), bits], labels);
    $("measure-memory-table").tBodies[0].replaceChildren(...labels.map((label, index) =>
      make("tr", {}, make("td", {}, label), make("td", { className: "number" }, number(bits[index], 4)))));
  }
}
