// A text of tokens that can be pointed at: by mouse, by touch, and by the arrow keys.

import { make } from "./dom.js";

const EDGES = [0.25, 1, 2, 3, 4.5, 6.5];

export const level = (bits) => (bits === null || bits === undefined ? 0 : EDGES.filter((edge) => bits >= edge).length);

export function legend(container) {
  const samples = [0.1, 0.5, 1.5, 2.5, 4, 5, 8].map((bits, index) =>
    make("span", { className: `t s${level(bits)}` }, ["0", "¼", "1", "2", "3", "4½", "6½+"][index]));
  container.replaceChildren("bits ", ...samples);
}

export class TokenText {
  // `on.select(index, byUser)` after a choice, `on.hover(index)` (or null), `on.enter(index)` for the Enter key.
  constructor(container, on = {}) {
    this.container = container;
    this.on = on;
    this.spans = [];
    this.marked = [];
    this.selected = null;
    container.addEventListener("click", (event) => this.choose(this.indexOf(event.target)));
    container.addEventListener("mousemove", (event) => on.hover?.(this.indexOf(event.target)));
    container.addEventListener("mouseleave", () => on.hover?.(null));
    container.addEventListener("keydown", (event) => this.key(event));
  }

  indexOf(target) {
    return target.classList?.contains("t") ? Number(target.dataset.i) : null;
  }

  clear() {
    this.container.replaceChildren();
    this.spans = [];
    this.marked = [];
    this.selected = null;
  }

  append(items) {
    const following = this.container.scrollHeight - this.container.scrollTop - this.container.clientHeight < 60;
    const added = items.map((item, k) => {
      const span = make("span", { className: `t s${level(item.bits)}${item.given ? " given" : ""}` }, item.text);
      span.dataset.i = this.spans.length + k;
      return span;
    });
    this.spans.push(...added);
    this.container.append(...added);
    if (following) this.container.scrollTop = this.container.scrollHeight;
  }

  choose(index) {
    if (index === null) return;
    this.select(index);
    this.on.select?.(index);
  }

  select(index) {
    this.spans[this.selected]?.classList.remove("sel");
    this.selected = index;
    if (index === null) return;
    this.spans[index].classList.add("sel");
  }

  // Scrolls within the text only: `scrollIntoView` would move the page as well.
  reveal(index) {
    const box = this.container.getBoundingClientRect();
    const place = this.spans[index].getBoundingClientRect();
    if (place.top < box.top + 8) this.container.scrollTop -= box.top + 40 - place.top;
    if (place.bottom > box.bottom - 8) this.container.scrollTop += place.bottom - box.bottom + 40;
  }

  key(event) {
    const last = this.spans.length - 1;
    if (last < 0) return;
    const from = this.selected ?? (event.key === "ArrowRight" ? -1 : last + 1);
    const moves = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last, ArrowUp: from - 60, ArrowDown: from + 60 };
    if (event.key === "Enter" && this.selected !== null) {
      event.preventDefault();
      this.on.enter?.(this.selected);
    } else if (event.key === "Escape") {
      this.select(null);
      this.on.select?.(null);
    } else if (event.key in moves) {
      event.preventDefault();
      let index = Math.min(Math.max(moves[event.key], 0), last);
      const step = index >= from ? 1 : -1;
      while (!this.spans[index].textContent && this.spans[index + step]) index += step;
      this.choose(index);
      this.reveal(index);
    }
  }

  // Marks are [index, class, weight between 0 and 1]. They replace those before.
  mark(marks) {
    for (const span of this.marked) {
      span.classList.remove("w-earlier", "w-later", "w-saved", "w-lost");
    }
    this.marked = [];
    for (const [index, name, weight] of marks) {
      const span = this.spans[index];
      span.classList.add(name);
      span.style.setProperty("--w", weight.toFixed(3));
      this.marked.push(span);
    }
  }
}
