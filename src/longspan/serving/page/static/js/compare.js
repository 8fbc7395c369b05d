// Compare: one text, several memories or two models.

import { Job } from "./api.js";
import { Chart, joined } from "./chart.js";
import { $, guarded, make, number, option, place, shown } from "./dom.js";
import { TokenText } from "./tokens.js";

const MEMORIES = [0, 64, 512, 2048];
const FULL = 4; // bits saved that give the full shade

export class Compare {
  constructor(app) {
    this.app = app;
    this.text = new TokenText($("compare-text"), { select: (index) => this.detail(index), hover: (index) => this.detail(index) });
    this.chart = new Chart($("compare-chart"), { x: "bytes read", y: "bits per byte so far", about: "Bits per byte as the text is read; the table below has the final values" });
    for (const size of MEMORIES) {
      const box = make("input", { type: "checkbox", value: size, checked: true });
      $("compare-memories").append(make("label", { className: "inline" }, box, size ? size.toLocaleString("en") : "none"));
    }
    $("compare-go").addEventListener("click", guarded(() => this.run()));
    $("compare-cancel").addEventListener("click", () => this.job?.cancel());
    for (const id of ["compare-pair", "compare-unit"]) $(id).addEventListener("change", () => this.showWhere());
  }

  start(text) {
    $("compare-input").value = text;
    this.app.onModel(() => this.reset());
    this.reset();
  }

  reset() {
    const others = this.app.models.filter((model) => model.id !== this.app.model.id);
    const free = this.app.model.memory_can_change;
    $("compare-other").replaceChildren(...others.map((model) => option(model.id)));
    $("compare-two").hidden = !others.length;
    $("compare-memories").disabled = !free;
    $("compare-models").checked = !free && others.length > 0;
    $("compare-status").textContent = free ? "" : `The family ${this.app.model.family} has no memory to change; compare two models.`;
  }

  async run() {
    const two = $("compare-models").checked;
    const memories = [...$("compare-memories").querySelectorAll("input:checked")].map((box) => Number(box.value));
    const body = two
      ? { text: $("compare-input").value, models: [this.app.model.id, $("compare-other").value] }
      : { text: $("compare-input").value, models: [this.app.model.id], memories };
    $("compare-where").hidden = true;
    this.job?.cancel();
    const job = new Job("/page/compare", body, (state) => { if (job === this.job) this.update(state, two); });
    this.job = job;
    $("compare-cancel").disabled = false;
    $("compare-status").textContent = "Reading…";
    try {
      const { state } = await job.finished;
      if (job === this.job) $("compare-status").textContent = state === "finished" ? "Done." : "Cancelled; the results so far stay.";
    } catch (error) {
      if (job === this.job) $("compare-status").textContent = "";
      throw error;
    } finally {
      if (job === this.job) { // not one that a newer job replaced
        $("compare-cancel").disabled = true;
        $("compare-progress").hidden = true;
      }
    }
  }

  update({ state, done, total, result }, two) {
    $("compare-progress").hidden = state !== "running";
    $("compare-progress").value = done / total;
    $("compare-result").hidden = false;
    const { ways } = result;
    this.names = ways.map((way) => (two ? way.model : way.memory ? `memory ${way.memory.toLocaleString("en")}` : `no memory (segments of ${way.reading.segment})`));
    this.chart.update(this.names, joined(ways.map((way) => [way.places, way.bits])));
    $("compare-table").tBodies[0].replaceChildren(...ways.map((way, index) => {
      const change = index && way.bits_per_byte !== null && ways[0].bits_per_byte ? way.bits_per_byte / ways[0].bits_per_byte - 1 : null;
      return make("tr", {}, make("td", {}, this.names[index]), make("td", { className: "number" }, number(way.bits_per_byte, 4)),
        make("td", { className: "number" }, change === null ? "–" : `${change > 0 ? "+" : "−"}${Math.abs(100 * change).toFixed(1)}%`));
    }));
    if (state !== "finished") return;
    this.result = result;
    $("compare-base").textContent = this.names[0];
    $("compare-pair").replaceChildren(...this.names.slice(1).map((name, index) => option(index, name)));
    $("compare-pair").value = String(ways.length - 2);
    $("compare-unit").disabled = !result.helped_tokens;
    $("compare-unit").value = !result.helped_tokens || ["byte", "character"].includes(this.app.model.unit) ? "words" : "tokens";
    this.text.clear();
    this.text.append(result.tokens.map((text) => ({ text, bits: null })));
    $("compare-text").scrollTop = 0;
    $("compare-where").hidden = false;
    this.showWhere();
  }

  showWhere() {
    const pair = Number($("compare-pair").value);
    const ranked = this.result[`helped_${$("compare-unit").value}`][pair];
    $("compare-ranked").tBodies[0].replaceChildren(...ranked.map(({ left, text, right, before, after }) => {
      const cell = make("td", { className: "where" });
      cell.append(...place(left, text, right).childNodes);
      return make("tr", {}, cell, ...[before, after, before - after].map((bits) => make("td", { className: "number" }, number(bits, 1))));
    }));
    this.gains = this.result.gains?.[pair];
    this.text.mark((this.gains ?? []).flatMap((saved, k) => (Math.abs(saved) < 0.15 ? []
      : [[k + 1, saved > 0 ? "w-saved" : "w-lost", Math.min(Math.sqrt(Math.abs(saved) / FULL), 1)]])));
  }

  detail(index) {
    const saved = index ? this.gains?.[index - 1] : undefined;
    if (saved === undefined) return;
    const word = saved >= 0 ? "saves" : "loses";
    $("compare-detail").textContent = `“${shown(this.result.tokens[index])}”: ${this.names[Number($("compare-pair").value) + 1]} ${word} ${number(Math.abs(saved), 2)} bits.`;
  }
}
