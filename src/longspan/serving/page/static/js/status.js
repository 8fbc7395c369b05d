// Status: what the server does now.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { $, bytes, count, fail, make } from "./dom.js";

const SECONDS = 120;

export class Status {
  constructor(app) {
    this.app = app;
    this.history = [];
    this.before = null;
    this.chart = new Chart($("status-chart"), { x: "seconds", y: "tokens/s", range: [-SECONDS, 0], about: "Tokens per second over the last two minutes" });
  }

  start() {
    this.poll();
    setInterval(() => { if (!$("panel-status").hidden && !document.hidden) this.poll(); }, 1000);
  }

  async poll() {
    try {
      this.update(await get("/page/status"), performance.now() / 1000);
    } catch (error) {
      fail(error);
    }
  }

  update(state, now) {
    const sum = (key) => state.models.reduce((total, model) => total + model[key], 0);
    const totals = { now, read: sum("prompt_tokens"), written: sum("generated_tokens") };
    if (this.before) {
      const seconds = Math.max(now - this.before.now, 1e-3);
      this.history.push([now, (totals.written - this.before.written) / seconds, (totals.read - this.before.read) / seconds]);
    }
    this.before = totals;
    this.history = this.history.filter(([when]) => when > now - SECONDS);
    const last = this.history.at(-1);
    const facts = [
      ["Tokens written per second", last ? count(last[1]) : "–"],
      ["Tokens read per second", last ? count(last[2]) : "–"],
      ["Tokens written", count(totals.written)],
      ["Streams running", `${sum("running")}${sum("waiting") ? `, ${sum("waiting")} waiting` : ""}`],
      ["Sessions", `${state.sessions}${state.sessions > state.sessions_in_memory ? `, ${state.sessions - state.sessions_in_memory} on disk` : ""}`],
      ["State of all sessions", bytes(state.state_bytes)],
      ["State of one full session", bytes(this.app.model.state_bytes)],
      ["Analyses running", count(state.jobs)],
      ["Uptime", `${count(state.uptime / 60)} min`],
    ];
    $("status-numbers").replaceChildren(...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
    this.chart.update(["written", "read"], [0, 1, 2].map((k) => this.history.map((row) => (k ? row[k] : Math.round(row[0] - now)))));
    const none = make("tr", {}, make("td", { colSpan: 4 }, "No sessions. Write something first."));
    $("status-sessions").tBodies[0].replaceChildren(...(state.recent.length ? [] : [none]), ...state.recent.map((session) => make("tr", {},
      make("td", { className: "number" }, session.tokens === null ? "–" : count(session.tokens)),
      make("td", { className: "number" }, bytes(session.state_bytes)),
      make("td", {}, session.busy ? "running" : session.in_memory ? "memory" : "disk", session.saved ? ", saved" : ""),
      make("td", {}, `${count(session.idle)} s ago`))));
  }
}
