// Elements and numbers as text. Nothing that comes from outside is ever parsed as HTML.

/** Make an element; children are elements and texts, `on…` attributes are listeners. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

/** Make an element of a drawing. */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A name or a reason: its direction of writing does not change that of the text around it. */
export const name = (text) => h("bdi", {}, String(text));

export const state = (text) => h("span", { class: "state", "data-state": text }, String(text));

/** Change a text, and leave a node alone that has it already. */
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** A table that scrolls by itself; a head that begins with # is one of numbers. */
export function table(caption, heads, rows = []) {
  const titles = heads.map((head) =>
    h("th", { scope: "col", class: head.startsWith("#") ? "n" : null }, head.replace("#", "")));
  const body = h("tbody");
  fill(body, heads, rows);
  const element = h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, titles)), body);
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, element);
  return { element: scroll, fill: (found) => fill(body, heads, found) };
}

function fill(body, heads, rows) {
  const none = [h("tr", {}, h("td", { colspan: heads.length, class: "soft" }, "none"))];
  const made = rows.map((row) => h("tr", {}, row.map((cell, i) =>
    h("td", { class: heads[i].startsWith("#") ? "n" : null }, cell ?? ""))));
  body.replaceChildren(...(made.length ? made : none));
}

/** Figures with titles, whose values change. */
export function tiles(titles) {
  const values = titles.map(() => h("dd", {}, "–"));
  const boxes = titles.map((title, i) => h("div", {}, h("dt", {}, title), values[i]));
  return { element: h("dl", { class: "tiles" }, boxes), set: (texts) => texts.forEach((text, i) => setText(values[i], text)) };
}

/** A list of facts; those without a value are left out. */
export function facts(pairs) {
  const known = pairs.filter(([, value]) => value != null && value !== "");
  return h("dl", { class: "facts" }, known.flatMap(([title, value]) => [h("dt", {}, title), h("dd", {}, value)]));
}

/** A line of the latest values. */
export function spark(label) {
  const line = s("polyline");
  const element = s("svg", { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-label": label }, line);
  return {
    element,
    draw(values) {
      const most = Math.max(...values, 1e-9);
      const step = 100 / Math.max(values.length - 1, 1);
      line.setAttribute("points", values.map((value, i) => `${(i * step).toFixed(1)},${(29 - 27 * value / most).toFixed(1)}`).join(" "));
    },
  };
}

/** A button whose action may fail; it cannot be pressed again until the action has ended. */
export function button(text, action, attributes = {}) {
  return h("button", {
    type: "button",
    ...attributes,
    async onclick(event) {
      const pressed = event.currentTarget;
      pressed.disabled = true;
      try { await action(); } finally { pressed.disabled = false; }
    },
  }, text);
}

export function number(value) {
  if (value == null || Number.isNaN(value)) return "–";
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(3);
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

export function micros(value) {
  if (value == null || Number.isNaN(value)) return "–";
  if (value < 1000) return `${number(value)} µs`;
  return value < 1e6 ? `${number(value / 1e3)} ms` : `${number(value / 1e6)} s`;
}

export function bytes(value) {
  if (value == null) return "–";
  const power = Math.min(4, Math.floor(Math.log2(Math.max(value, 1)) / 10));
  return `${number(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}
