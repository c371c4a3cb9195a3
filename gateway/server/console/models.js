// The list of models: state, rate, latency and errors of every version.

import { get, post } from "./api.js";
import { h, micros, name, number, setText, state } from "./dom.js";

/** Rows of a page: so many change at once, however many models there are. */
const PAGE = 50;
/** Nobody reads faster than this; a browser has other work between. */
const DRAW_MS = 100;
const HEADS = ["model", "version", "state", "#requests/s", "#mean latency", "#mean queue", "#errors/s", "reason"];

/** The list as an element, and the function that takes new figures 50 times a second if need be. */
export function modelList() {
  let rows = [], figures = new Map(), page = 0, waits = false;
  const filter = h("input", { type: "search", id: "filter", oninput: () => { page = 0; draw(); } });
  const only = h("input", { type: "checkbox", oninput: () => { page = 0; draw(); } });
  const body = h("tbody");
  const count = h("span", { class: "soft", role: "status" });
  const turn = (by) => () => { page += by; draw(); };
  const back = h("button", { type: "button", onclick: turn(-1) }, "Previous");
  const forth = h("button", { type: "button", onclick: turn(1) }, "Next");
  const titles = HEADS.map((head) => h("th", { scope: "col", class: head.startsWith("#") ? "n" : null }, head.replace("#", "")));
  const list = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Models" },
    h("table", { class: "list" }, h("caption", {}, "Versions of the repository"), h("thead", {}, h("tr", {}, titles)), body));
  const element = h("section", {},
    h("div", { class: "bar" }, h("label", { for: "filter" }, "Name contains"), filter,
      h("label", {}, only, " not READY"), count, back, forth),
    list);

  function chosen() {
    const wanted = filter.value.toLowerCase();
    return rows.filter((row) => (!only.checked || row.state !== "READY") && row.name.toLowerCase().includes(wanted));
  }

  /** Make or reuse the rows of the page; only cells that differ are touched. */
  function draw() {
    const found = chosen();
    page = Math.max(0, Math.min(page, Math.ceil(found.length / PAGE) - 1));
    const shown = found.slice(page * PAGE, (page + 1) * PAGE);
    setText(count, `${shown.length ? page * PAGE + 1 : 0}–${page * PAGE + shown.length} of ${found.length}`);
    back.disabled = page === 0;
    forth.disabled = (page + 1) * PAGE >= found.length;
    while (body.rows.length > shown.length) body.lastChild.remove();
    shown.forEach((row, i) => fill(body.rows[i] ?? body.appendChild(blank()), row));
  }

  function fill(line, row) {
    const key = JSON.stringify([row.name, row.version]);
    if (line.dataset.key !== key) {
      line.dataset.key = key;
      line.link.setAttribute("href", `#/models/${[row.name, row.version].filter(Boolean).map(encodeURIComponent).join("/")}`);
      setText(line.link.firstChild, row.name);
    }
    const figure = figures.get(key) ?? {};
    const texts = [row.version ?? "", row.state ?? "", number(figure.rate), micros(figure.latency), micros(figure.queue), number(figure.errors), row.reason ?? ""];
    texts.forEach((text, i) => setText(line.texts[i], text));
    line.texts[1].dataset.state = row.state ?? "";
  }

  function blank() {
    const link = h("a", { href: "#" }, name(""));
    const texts = [h("span"), state(""), ...Array.from({ length: 4 }, () => h("span")), h("bdi")];
    const cells = [link, ...texts].map((cell, i) => h("td", { class: HEADS[i].startsWith("#") ? "n" : null }, cell));
    return Object.assign(h("tr", {}, cells), { link, texts });
  }

  /** Take rows of the index, and figures by model and version; draw the latest. */
  function update(newRows, newFigures) {
    rows = newRows;
    figures = newFigures;
    if (waits) return;
    waits = true;
    setTimeout(() => requestAnimationFrame(() => { waits = false; draw(); }), body.rows.length ? DRAW_MS : 0);
  }
  return { element, update };
}

/** Rates and means between two answers of the statistics extension. */
export function compared(now, before, seconds) {
  const earlier = new Map(before.map((entry) => [JSON.stringify([entry.name, entry.version]), entry]));
  return new Map(now.map((entry) => {
    const key = JSON.stringify([entry.name, entry.version]);
    const was = earlier.get(key)?.inference_stats ?? entry.inference_stats;
    const grown = (phase, field) => Math.max(0, entry.inference_stats[phase][field] - was[phase][field]);
    const answered = grown("success", "count");
    const mean = (phase) => (answered ? grown(phase, "ns") / 1000 / answered : null);
    return [key, {
      rate: answered / seconds, errors: grown("fail", "count") / seconds,
      latency: mean("success"), queue: mean("queue"),
    }];
  }));
}

export function models(_, { signal }) {
  const list = modelList();
  let before = [], at = 0;
  async function look() {
    const [rows, stats] = await Promise.all([
      post("v2/repository/index", {}, signal),
      get("v2/models/stats", signal).catch((error) => {
        if (error.status === 403) return { model_stats: [] };  // the caller may see states alone
        throw error;
      }),
    ]);
    const now = performance.now();
    list.update(rows, compared(stats.model_stats, before, at ? (now - at) / 1000 : Infinity));
    before = stats.model_stats;
    at = now;
  }
  return { elements: [h("h1", {}, "Models"), list.element], look };
}
