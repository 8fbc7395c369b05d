// Texts that share their beginnings. A node has its own items and the session at its end, if there is one.

let numbers = 0;

export class Node {
  constructor(parent, items = []) {
    Object.assign(this, { id: ++numbers, parent, items, children: [], session: null, busy: false });
    parent?.children.push(this);
  }

  get text() {
    return this.items.map((item) => item.text).join("");
  }

  get path() {
    return this.parent ? [...this.parent.path, this] : [this];
  }

  get wholeText() {
    return this.path.map((node) => node.text).join("");
  }

  get nodes() {
    return [this, ...this.children.flatMap((child) => child.nodes)];
  }

  // Splits the node after `count` items. This node keeps the first, a child gets the rest, the session and the children.
  split(count) {
    if (count >= this.items.length) return this;
    const rest = new Node(null, this.items.splice(count));
    rest.parent = this;
    rest.children = this.children;
    for (const child of rest.children) child.parent = rest;
    rest.session = this.session;
    this.session = null;
    this.children = [rest];
    return this;
  }

  // The same after a number of characters, which may be inside an item.
  splitText(characters) {
    let count = 0;
    while (count < this.items.length && characters >= this.items[count].text.length) {
      characters -= this.items[count].text.length;
      count += 1;
    }
    if (characters > 0) {
      const item = this.items[count];
      this.items.splice(count, 1, { ...item, text: item.text.slice(0, characters) }, { ...item, text: item.text.slice(characters) });
      count += 1;
    }
    return this.split(count);
  }

  // Where an edited text leaves this path: the node at whose end it does, and the new text after it.
  branch(edited) {
    let rest = edited;
    for (const node of this.path) {
      const own = node.text;
      if (rest.startsWith(own)) {
        rest = rest.slice(own.length);
        if (node === this) return [node, rest];
        continue;
      }
      let same = 0;
      while (same < rest.length && rest[same] === own[same]) same += 1;
      return same ? [node.splitText(same), rest.slice(same)] : [node.parent, rest];
    }
    return [this, rest];
  }

  // What is kept of the tree. `sessions` has the name under which each session is kept.
  store(sessions) {
    const items = this.items.map(({ text, bits, given }) => (given ? [text] : [text, Math.round((bits ?? 0) * 100) / 100]));
    return { items, session: sessions.get(this.session) ?? null, children: this.children.map((child) => child.store(sessions)) };
  }
}

export function restoreTree(stored, parent = null) {
  const items = stored.items.map(([text, bits]) => (bits === undefined ? { text, given: true } : { text, bits }));
  const node = new Node(parent, items);
  node.session = stored.session;
  for (const child of stored.children) restoreTree(child, node);
  return node;
}
