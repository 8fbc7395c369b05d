// Look: attention from and to a token.

import { Job, post } from "./api.js";
import { $, count, fail, guarded, make, number, option, percent, place, shown } from "./dom.js";
import { TokenText } from "./tokens.js";

const LISTED = 7;
const FAR = 2048; // a memory that reaches farther than most models were trained with
const LEAST = 0.02; // of the full shade; smaller weights are not marked
const FULL = 0.03; // the weight that gives the full shade, at least

export class Look {
  constructor(app) {
    this.app = app;
    this.pinned = false;
    this.found = new Map();
    this.text = new TokenText($("look-text"), {
      select: (index) => this.pin(index),
      hover: (index) => { if (!this.pinned && index !== null) this.point(index); },
    });
    $("look-go").addEventListener("click", guarded(() => this.read()));
    $("look-cancel").addEventListener("click", () => this.job?.cancel());
    $("look-written").addEventListener("click", () => { $("look-input").value = app.write.node.wholeText; });
    for (const id of ["look-layer", "look-head"]) {
      $(id).addEventListener("change", () => { if (this.text.selected !== null) this.point(this.text.selected, true); });
    }
    $("look-strip").addEventListener("click", (event) => {
      if (!this.tokens?.length) return;
      const index = Math.floor((event.offsetX / $("look-strip").clientWidth) * this.tokens.length);
      this.text.choose(index);
      this.text.reveal(index);
    });
    new ResizeObserver(() => this.drawStrip()).observe($("look-strip"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.drawStrip());
  }

  start(text) {
    this.app.onModel(() => this.reset());
    $("look-input").value = text;
    this.reset();
    guarded(() => this.read())();
  }

  reset() {
    this.job?.cancel();
    this.job = null;
    const { reading, memory_can_change: free } = this.app.model;
    const own = free ? `model's own (${reading.memory})` : "model's own";
    $("look-memory").replaceChildren(option("", own), ...(free ? [0, 64, 512, FAR, 4096].map((size) => option(size, size.toLocaleString("en"))) : []));
    if (free && reading.memory < FAR) $("look-memory").value = String(FAR);
    this.clear();
  }

  clear() {
    this.text.clear();
    this.tokens = [];
    this.result = null;
    this.shownToken = null;
    this.pinned = false;
    this.found.clear();
    $("look-note").hidden = true;
    $("look-detail").textContent = "None yet.";
    for (const id of ["look-candidates", "look-earlier", "look-later"]) $(id).replaceChildren();
    this.drawStrip();
  }

  async read() {
    this.job?.cancel();
    this.clear();
    const memory = $("look-memory").value;
    const body = { model: this.app.model.id, text: $("look-input").value, memory: memory === "" ? null : Number(memory) };
    const job = new Job("/page/look", body, (state) => { if (job === this.job) this.update(state); });
    this.job = job;
    $("look-cancel").disabled = false;
    try {
      await job.finished;
    } finally {
      if (job === this.job) {
        $("look-cancel").disabled = true;
        $("look-progress").hidden = true;
      }
    }
  }

  update({ state, done, total, result }) {
    const bar = $("look-progress");
    bar.hidden = state !== "running";
    bar.value = done / total;
    const before = this.tokens.length;
    this.tokens = result.tokens;
    this.text.append(result.tokens.slice(before).map((text) => ({ text, bits: null })));
    if (!this.result) this.describe(result);
    this.result = result;
    if (before === 0) $("look-text").scrollTop = 0;
    if (result.complete && this.text.selected === null) this.suggest();
    else if (state === "finished") {
      this.found.clear(); // what later tokens attended to is known now
      this.point(this.text.selected, true);
    }
  }

  describe(result) {
    const fill = (id, size) => $(id).replaceChildren(option("", "all"), ...Array.from({ length: size }, (_, k) => option(k, k + 1)));
    fill("look-layer", result.layers);
    fill("look-head", result.heads);
    for (const id of ["look-layer", "look-head"]) $(id).disabled = !result.layers;
    const note = $("look-note");
    note.hidden = Boolean(result.layers && result.remembers);
    note.textContent = result.layers
      ? `The family ${result.family} has no memory: every segment of ${result.segment} tokens is read alone, so attention ends at its edges.`
      : `The family ${result.family} has no attention with one key per token, so there are no links to show. Surprisal and candidates are shown.`;
  }

  // Something to see at once: a token near the end, and the head that looks farthest back if one does.
  async suggest() {
    const at = this.tokens.join("").lastIndexOf("Ellisworth");
    const index = at > 0 ? this.indexAt(at + 4) : this.tokens.length - 1;
    if (index < 1) return;
    this.text.reveal(index);
    await this.point(index);
    const most = Math.max(0, ...(this.far ?? []).flat());
    if (most < 0.5 || this.shownToken !== index || $("look-layer").value || $("look-head").value) return;
    const layer = this.far.findIndex((heads) => heads.includes(most));
    $("look-layer").value = layer;
    $("look-head").value = this.far[layer].indexOf(most);
    this.point(index, true);
  }

  indexAt(character) {
    let passed = 0;
    return this.tokens.findIndex((token) => (passed += token.length) > character);
  }

  pin(index) {
    this.pinned = index !== null && !(this.pinned && index === this.shownToken);
    if (index !== null) this.point(index);
  }

  async point(index, again = false) {
    if (!this.job?.id || (index === this.shownToken && !again)) return;
    this.shownToken = index;
    this.text.select(index);
    const [layer, head] = ["look-layer", "look-head"].map((id) => ($(id).value === "" ? null : Number($(id).value)));
    const key = `${index} ${layer} ${head}`;
    if (!this.found.has(key)) {
      this.found.set(key, post(`/page/jobs/${this.job.id}/token`, { token: index, layer, head }));
    }
    try {
      const found = await this.found.get(key);
      if (this.shownToken === index) this.showToken(index, found);
    } catch (error) {
      this.found.delete(key);
      fail(error);
    }
  }

  showToken(index, { earlier, later, candidates, far }) {
    this.present = { index, earlier: earlier ?? [], later: later ?? [] };
    const marks = [];
    for (const [weights, first, name] of [[earlier, 0, "w-earlier"], [later, index + 1, "w-later"]]) {
      const most = Math.max(...(weights ?? []), FULL);
      (weights ?? []).forEach((weight, k) => {
        // The square root: a few near tokens get most of the weight, and the far ones would be invisible.
        if (weight > LEAST * most) marks.push([first + k, name, Math.sqrt(weight / most)]);
      });
    }
    this.text.mark(marks);
    this.drawStrip();
    this.sentence(index, earlier);
    this.listCandidates(candidates);
    this.showHeads(far ?? []);
    this.list("look-earlier", earlier, 0, index, "back");
    this.list("look-later", later, index + 1, index, "later");
  }

  sentence(index, earlier) {
    const bits = this.result.bits[index];
    const parts = [`“${shown(this.tokens[index])}”, token ${count(index)}`];
    parts.push(bits === null ? "the first token is not predicted" : `${number(bits, 2)} bits`);
    if (earlier?.length) {
      const far = (size) => earlier.slice(0, Math.max(earlier.length - size, 0)).reduce((sum, weight) => sum + weight, 0);
      const size = this.result.segment;
      const whose = ["layer", "head"].filter((name) => $(`look-${name}`).value).map((name) => `${name} ${Number($(`look-${name}`).value) + 1}`);
      parts.push(`${whose.length ? `In ${whose.join(", ")}, ` : ""}${percent(far(32))} of its attention goes more than 32 tokens back`);
      if (earlier.length > size) parts.push(`${percent(far(size))} more than ${size}, beyond one segment`);
    }
    $("look-detail").textContent = `${parts.join(". ")}.`;
  }

  listCandidates(candidates) {
    $("look-candidates").replaceChildren(...candidates.map(({ text, probability, is_actual: actual }) =>
      make("li", { className: actual ? "actual" : "" }, make("code", {}, shown(text)),
        make("meter", { min: 0, max: 1, value: probability, ariaLabel: `Probability of ${shown(text)}` }),
        make("span", { className: "number" }, percent(probability)))));
  }

  // One button per head: the share of its attention that goes far back.
  showHeads(far) {
    const [layer, head] = [$("look-layer").value, $("look-head").value];
    this.far = far;
    $("look-heads").tBodies[0].replaceChildren(...far.map((heads, n) => make("tr", {}, make("th", { scope: "row" }, String(n + 1)), ...heads.map((share, h) => {
      const button = make("button", { className: "w-earlier", ariaLabel: `Layer ${n + 1}, head ${h + 1}: ${percent(share)}` }, percent(share));
      const chosen = layer === String(n) && head === String(h);
      button.setAttribute("aria-pressed", String(chosen));
      button.style.setProperty("--w", Math.sqrt(share).toFixed(3));
      button.addEventListener("click", () => {
        $("look-layer").value = chosen ? "" : n;
        $("look-head").value = chosen ? "" : h;
        this.point(this.shownToken, true);
      });
      return make("td", {}, button);
    }))));
  }

  // The weights of whole words, or the list would be full of the parts of one. Earlier weights add up to 1, so they are
  // added; each later weight is of another prediction, so the largest counts.
  words(weights, first, add) {
    const found = [];
    weights.forEach((weight, k) => {
      const token = this.tokens[first + k];
      if (!found.length || /^\s/.test(token)) found.push({ begin: first + k, end: first + k, weight: 0 });
      const word = found.at(-1);
      word.end = first + k + 1;
      word.weight = add ? word.weight + weight : Math.max(word.weight, weight);
    });
    return found.filter((word) => word.weight >= 0.001).sort((a, b) => b.weight - a.weight).slice(0, LISTED);
  }

  list(id, weights, first, from, words) {
    const ranked = this.words(weights ?? [], first, first < from);
    const around = (begin, end) => this.tokens.slice(Math.max(begin, 0), Math.max(end, 0)).join("");
    const empty = weights ? "None above 0.1%." : this.result.layers ? "Known when the whole text was read." : "This family has none to show.";
    $(id).replaceChildren(...(ranked.length ? ranked.map(({ begin, end, weight }) => {
      const go = make("button", { className: "where" });
      go.append(...place(around(begin - 14, begin), around(begin, end), around(end, end + 14)).childNodes);
      go.addEventListener("click", () => this.text.reveal(begin));
      return make("li", {}, go, make("span", {}, percent(weight), " ", make("small", {}, `${count(Math.abs(from - begin))} ${words}`)));
    }) : [make("li", {}, empty)]));
  }

  drawStrip() {
    const canvas = $("look-strip");
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const size = this.tokens?.length;
    if (!size || !this.present) return;
    const style = getComputedStyle(document.documentElement);
    const column = Math.max(width / size, 1);
    const { index, earlier, later } = this.present;
    for (const [weights, first, colour] of [[earlier, 0, "--earlier"], [later, index + 1, "--later"]]) {
      const most = Math.max(...weights, FULL);
      pen.fillStyle = style.getPropertyValue(colour);
      weights.forEach((weight, k) => {
        const tall = Math.sqrt(weight / most) * (height - 6);
        if (tall > 0.5) pen.fillRect(((first + k) / size) * width, height - tall, column, tall);
      });
    }
    pen.fillStyle = style.getPropertyValue("--chosen");
    pen.fillRect((index / size) * width - 0.5, 0, 2, height);
  }
}
