// The page: tabs, the model, and the parts that are started when they are first shown.

import { get } from "./api.js";
import { Compare } from "./compare.js";
import { $, count, fail, guarded, option } from "./dom.js";
import { Look } from "./look.js";
import { Measure } from "./measure.js";
import { Status } from "./status.js";
import { Write } from "./write.js";

const NAMES = ["write", "look", "compare", "measure", "status"];
const START = 640; // characters of the example that Write begins with

class App {
  async start() {
    const [{ models }, example] = await Promise.all([get("/page/models"), fetch("/static/example.txt").then((found) => found.text())]);
    Object.assign(this, { models, model: models[0], example, listeners: [], started: new Set() });
    $("model").replaceChildren(...models.map((model) => option(model.id)));
    $("model").addEventListener("change", () => this.use($("model").value));
    Object.assign(this, { write: new Write(this), look: new Look(this), compare: new Compare(this), measure: new Measure(this), status: new Status(this) });
    this.describe();
    this.onModel(() => this.write.restart(this.write.node.wholeText));
    const end = example.lastIndexOf("\n\n", START) + 2;
    this.write.restart(example.slice(0, end > 2 ? end : START));
    for (const name of NAMES) {
      $(`tab-${name}`).addEventListener("click", () => this.open(name));
      $(`tab-${name}`).addEventListener("keydown", (event) => this.key(event, name));
    }
    addEventListener("hashchange", () => this.open(location.hash.slice(1)));
    this.open(location.hash.slice(1) || "write");
    document.body.dataset.ready = "true";
  }

  onModel(listener) {
    this.listeners.push(listener);
  }

  // Changes the model; false if there is none of this name.
  use(name) {
    const found = this.models.find((model) => model.id === name);
    if (!found || found === this.model) return Boolean(found);
    this.model = found;
    $("model").value = name;
    this.describe();
    for (const listener of this.listeners) listener();
    return true;
  }

  describe() {
    const { family, parameters, unit, reading, memory_can_change: free, remembers } = this.model;
    const memory = free ? `memory of ${count(reading.memory)} tokens` : remembers ? "recurrent state" : `no memory, window of ${count(reading.segment)} tokens`;
    const size = parameters < 1e5 ? count(parameters) : `${(parameters / 1e6).toFixed(1)} million`;
    $("about").textContent = `${family}, ${size} parameters, one token per ${unit}, ${memory}`;
  }

  open(name) {
    if (!NAMES.includes(name)) return;
    for (const one of NAMES) {
      const chosen = one === name;
      $(`tab-${one}`).setAttribute("aria-selected", String(chosen));
      $(`tab-${one}`).tabIndex = chosen ? 0 : -1;
      $(`panel-${one}`).hidden = !chosen;
    }
    if (location.hash.slice(1) !== name) history.replaceState(null, "", `#${name}`);
    if (this.started.has(name)) return;
    this.started.add(name);
    if (name === "write") guarded(() => this.write.continue())();
    else this[name].start(this.example);
  }

  key(event, name) {
    const moves = { ArrowRight: 1, ArrowLeft: -1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const next = NAMES[(NAMES.indexOf(name) + moves[event.key] + NAMES.length) % NAMES.length];
    this.open(next);
    $(`tab-${next}`).focus();
  }
}

new App().start().catch(fail);
