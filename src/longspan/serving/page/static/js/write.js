// Write: a tree of continuations, each a session of the server.

import { events, get, post, send } from "./api.js";
import { $, fail, guarded, make, number, option, percent, plain, shown } from "./dom.js";
import { Node, restoreTree } from "./tree.js";
import { TokenText, legend } from "./tokens.js";

const SAVED = "longspan.saved";
const MOST_SAVED = 12;
const seed = () => Math.floor(Math.random() * 2 ** 48);

// The number in a field. One that is missing or out of range is an error in the words of the page.
function valueOf(id, name) {
  const field = $(id);
  const { badInput, rangeOverflow, rangeUnderflow } = field.validity;
  if (field.value === "" || badInput || rangeOverflow || rangeUnderflow) {
    field.focus();
    throw new Error(`${name} must be a number from ${field.min} to ${Number(field.max).toLocaleString("en")}`);
  }
  return Number(field.value);
}

// Whether the server still has a session: it may have expired, or the server was killed.
const exists = (session) => get(`/v1/sessions/${session}`).then(() => true, (error) => {
  if (error.status === 404) return false;
  throw error;
});

export class Write {
  constructor(app) {
    this.app = app;
    this.text = new TokenText($("write-text"), { select: (index) => this.showDetail(index), enter: () => this.fork() });
    legend($("write-legend"));
    const on = (id, action) => $(id).addEventListener("click", guarded(action));
    on("write-go", () => this.continue());
    on("write-stop", () => this.stop());
    on("write-fork", () => this.fork());
    on("write-edit", () => this.edit(true));
    on("write-edited-go", () => this.continueEdited());
    on("write-edited-cancel", () => this.edit(false));
    on("write-save", () => this.save());
    on("write-load", () => this.load());
    on("write-new", () => this.restart("", true));
    addEventListener("pagehide", () => this.forget());
    addEventListener("storage", (event) => { if (event.key === SAVED) this.listSaved(); }); // saved in another tab
    this.listSaved();
  }

  // Starts again with a text of the user.
  restart(text, edit = false) {
    this.forget();
    this.root = new Node(null);
    this.show(new Node(this.root, text ? [{ text, given: true }] : []));
    if (edit) this.edit(true);
    else this.edit(false);
  }

  // Deletes the sessions of this tree.
  forget() {
    this.drop((this.root?.nodes ?? []).map((node) => node.session));
  }

  drop(sessions) {
    const names = sessions.filter((name) => name);
    if (names.length) send("POST", "/page/forget", { sessions: names }, { keepalive: true }).catch(() => {});
  }

  show(node) {
    this.node = node;
    this.text.clear();
    this.places = node.path.flatMap((one) => one.items.map((_, index) => [one, index]));
    this.text.append(node.path.flatMap((one) => one.items));
    $("write-text").scrollTop = $("write-text").scrollHeight;
    this.showDetail(null);
    this.showTree();
  }

  add(node, item) {
    node.items.push(item);
    if (node !== this.node) return;
    this.places.push([node, node.items.length - 1]);
    this.text.append([item]);
  }

  showDetail(index) {
    const [node, place] = index === null ? [] : this.places[index];
    const item = node?.items[place];
    $("write-fork").textContent = item ? "Fork here" : "Fork";
    if (!item) $("write-detail").textContent = this.summary();
    else if (item.given) $("write-detail").textContent = `“${shown(plain(item.text).slice(0, 60))}” was given.`;
    else {
      const others = (item.top ?? []).map(([text, chance]) => `“${shown(text)}” ${percent(chance)}`).join(", ");
      $("write-detail").textContent = `“${shown(item.text)}”: ${number(item.bits, 2)} bits${others ? `. Candidates: ${others}` : ""}`;
    }
  }

  summary() {
    const written = this.node.path.flatMap((one) => one.items).filter((item) => !item.given);
    if (!written.length) return "Nothing written yet.";
    const bits = written.reduce((sum, item) => sum + item.bits, 0) / written.length;
    return `${written.length} tokens written, ${number(bits, 2)} bits per token. Select a token to see what else was likely there.`;
  }

  showTree() {
    const list = (nodes) => nodes.map((node) => {
      const label = plain(node.text).trim().slice(0, 44) || (node.busy ? "" : "(empty)");
      const button = make("button", { className: node.busy ? "busy" : "" }, label, make("small", {}, ` ${node.items.filter((item) => !item.given).length || "given"}`));
      button.setAttribute("aria-current", String(node === this.node));
      button.addEventListener("click", () => this.show(node));
      const entry = make("li", {}, button);
      if (node.children.length) entry.append(make("ul", {}, ...list(node.children)));
      return entry;
    });
    $("write-tree").replaceChildren(...list(this.root.children));
    const busy = this.root.nodes.some((node) => node.busy);
    $("write-stop").disabled = !busy;
    for (const id of ["write-go", "write-edit", "write-save", "write-new"]) $(id).disabled = busy;
    $("write-load").disabled = busy || !this.saved.length;
    $("write-text").setAttribute("aria-busy", String(busy));
  }

  // The session at the end of a node. Without one, the text is read again after the session of its parent.
  async session(node) {
    if (node.session && await exists(node.session)) return node.session;
    node.session = null;
    const text = node.text;
    if (node.parent === this.root) {
      node.session = (await post("/v1/sessions", { model: this.app.model.id, prompt: text, seed: seed() })).id;
    } else {
      const found = await post(`/v1/sessions/${await this.session(node.parent)}/fork`, { seed: seed() });
      if (text) await post(`/v1/sessions/${found.id}/continue`, { prompt: text, max_tokens: 0 });
      node.session = found.id;
    }
    return node.session;
  }

  get options() {
    const tokens = Math.round(valueOf("write-count", "Tokens"));
    return { max_tokens: tokens, temperature: valueOf("write-temperature", "Temperature"), logprobs: 5 };
  }

  async generate(node) {
    const body = this.options;
    Object.assign(node, { busy: true, stopping: false });
    this.showTree();
    const tree = this.root;
    try {
      const session = await this.session(node);
      if (node.stopping) return; // while its text was read
      let ready = "";
      for await (const event of events(`/v1/sessions/${session}/continue`, body)) {
        const [{ text, logprobs }] = event.choices;
        if (!logprobs) ready += text;
        for (const [k, name] of (logprobs?.tokens ?? []).entries()) {
          const top = Object.entries(logprobs.top_logprobs?.[k] ?? {}).map(([other, value]) => [other, Math.exp(value)]);
          this.add(node, { text, name, bits: -logprobs.token_logprobs[k] / Math.LN2, top });
        }
        if (node.items.length % 20 === 1 && tree === this.root) this.showTree();
      }
      if (ready) this.add(node, { text: ready, bits: 0 });
    } catch (error) {
      if (error.code !== "stopped") throw error; // in the queue
    } finally {
      node.busy = false;
      if (tree !== this.root) this.drop([node.session]); // a new text was started meanwhile
      else {
        this.showTree();
        if (this.text.selected === null) this.showDetail(null);
      }
    }
  }

  // Writes at the end of the present branch, in a new branch if something follows there.
  async continue() {
    let node = this.node;
    if (node.children.length) this.show((node = new Node(node)));
    await this.generate(node);
  }

  // Two continuations of the end, or another one from the selected token on.
  async fork() {
    const [chosen, index] = this.text.selected === null ? [this.node, this.node.items.length - 1] : this.places[this.text.selected];
    if (chosen.busy) throw new Error("this branch is still being written; stop it first");
    void this.options; // an error in them must not leave empty branches
    const base = chosen.split(index + 1);
    base.busy = true;
    this.showTree();
    try {
      await this.session(base);
    } finally {
      base.busy = false;
    }
    const first = new Node(base);
    const made = base.children.length > 1 ? [first] : [first, new Node(base)];
    this.show(first);
    await Promise.all(made.map((node) => this.generate(node)));
  }

  async stop() {
    const busy = (this.root?.nodes ?? []).filter((node) => node.busy);
    for (const node of busy) node.stopping = true;
    await Promise.all(busy.filter((node) => node.session).map((node) => post(`/v1/sessions/${node.session}/stop`).catch(() => {})));
  }

  edit(open) {
    $("write-editor").hidden = !open;
    $("write-text").hidden = open;
    if (!open) return;
    $("write-edited").value = this.node.wholeText;
    $("write-edited").focus();
  }

  async continueEdited() {
    const [base, rest] = this.node.branch($("write-edited").value);
    const given = rest ? [{ text: rest, given: true }] : [];
    const reused = base.parent && !base.items.length && !base.children.length;
    const node = reused ? base : new Node(base, given);
    if (reused) {
      if (node.session) this.drop([node.session]);
      Object.assign(node, { items: given, session: null });
    }
    this.edit(false);
    this.show(node);
    await this.generate(node);
  }

  get saved() {
    try {
      return JSON.parse(localStorage.getItem(SAVED) ?? "[]");
    } catch {
      return [];
    }
  }

  listSaved() {
    const options = this.saved.map((entry, index) => option(index, entry.name));
    $("write-saved").replaceChildren(...(options.length ? options : [option("", "none")]));
    $("write-load").disabled = !options.length;
  }

  // The text goes to this browser, copies of the sessions to the disk of the server. The copies never change.
  async save() {
    const nodes = this.root.nodes.filter((node) => node.session);
    const copies = new Map();
    for (const { session } of nodes) {
      const copy = await post(`/v1/sessions/${session}/fork`).catch(() => null);
      const kept = copy && await post(`/v1/sessions/${copy.id}/save`).catch(() => null);
      if (kept) copies.set(session, copy.id);
      else this.drop([copy?.id]);
    }
    const when = new Date().toLocaleString("en", { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
    const entry = { name: `${plain(this.node.wholeText).slice(0, 24)}… ${when}`, model: this.app.model.id, at: this.node.path.map((one) => one.parent?.children.indexOf(one) ?? 0), tree: this.root.store(copies) };
    const entries = [entry, ...this.saved];
    this.drop(entries.slice(MOST_SAVED).flatMap(({ tree }) => restoreTree(tree).nodes.map((node) => node.session)));
    localStorage.setItem(SAVED, JSON.stringify(entries.slice(0, MOST_SAVED)));
    this.listSaved();
    $("write-detail").textContent = copies.size === nodes.length ? "Saved with its sessions." : "The text was saved. The server could not save its sessions; they will be read again.";
  }

  // Continues from copies of what was saved; sessions that are gone are made again from the text.
  async load() {
    const entry = this.saved[Number($("write-saved").value)];
    if (!entry) return;
    if (!this.app.use(entry.model)) throw new Error(`this server has no model ${entry.model}`);
    this.forget();
    this.root = restoreTree(entry.tree);
    for (const node of this.root.nodes.filter((one) => one.session)) {
      node.session = (await post(`/v1/sessions/${node.session}/fork`).catch(() => null))?.id ?? null;
    }
    this.edit(false);
    this.show(entry.at.slice(1).reduce((node, index) => node.children[index] ?? node, this.root));
    fail(null);
  }
}
