// Small helpers for elements and numbers.

export const $ = (id) => document.getElementById(id);

// make("li", { class: "actual" }, "text", otherElement)
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in element && key !== "list") element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

export const option = (value, text = value) => make("option", { value }, String(text));

export const number = (value, digits = 3) => (value === null || value === undefined ? "–" : value.toFixed(digits));
export const count = (value) => Math.round(value).toLocaleString("en");
export const percent = (value) => `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)}%`;

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["B", "kB", "MB"]) {
    if (value < 1000) return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} GB`;
}

// A token in a sentence: white space is made visible.
export const shown = (text) => text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +$|^ | $/g, (s) => "␣".repeat(s.length)) || "∅";

export const plain = (text) => text.replace(/\s+/g, " ");

// A place in a text with what is around it.
export const place = (left, text, right) =>
  make("span", { className: "where" }, plain(left), make("mark", {}, plain(text)), plain(right));

export function fail(error) {
  const box = $("error");
  box.hidden = !error;
  box.textContent = error ? error.message ?? String(error) : "";
}

// Runs an action of the user and shows its error.
export const guarded = (action) => async (...values) => {
  fail(null);
  try {
    return await action(...values);
  } catch (error) {
    fail(error);
    return undefined;
  }
};
