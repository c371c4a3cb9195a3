// The frame of the console: which view is shown, when it looks again, and what went wrong.

import { ApiError, hasToken, useToken } from "./api.js";
import { setText } from "./dom.js";
import { gateway } from "./gateway.js";
import { model } from "./model.js";
import { models } from "./models.js";
import { requests } from "./requests.js";
import { rollouts } from "./rollouts.js";

const LOOK_MS = 2000;
const VIEWS = { models, rollouts, requests, gateway };
const main = document.getElementById("main");
const problem = document.getElementById("problem");
const notice = document.getElementById("notice");
const dialog = document.getElementById("credentials");
const token = document.getElementById("token");
let leave = () => {};

/** Report an error, or that there is none any more. */
function report(error) {
  if (error?.name === "AbortError") return;
  problem.hidden = !error;
  setText(problem, error ? error.message : "");
  if (error && !(error instanceof ApiError)) console.error(error);
}

/** Do what a person has asked for, and say how it ended. */
async function act(done, work) {
  setText(notice, "");
  try {
    await work();
    setText(notice, done);
    report(null);
  } catch (error) {
    report(error);
  }
}

/** The parts of the address after `#`: a view, and what it shows. */
function place() {
  try {
    return location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  } catch {  // a percent sign that begins no character
    return [""];
  }
}

/** Show the view of the address; it looks at the gateway until the next one is shown. */
async function show() {
  leave();
  const leaving = new AbortController();
  leave = () => leaving.abort();
  const { signal } = leaving;
  const [first, ...rest] = place();
  const view = first in VIEWS ? first : "models";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const open = view === "models" && rest[0] ? model : VIEWS[view];
  document.title = [...rest, view, "modelport"].join(" · ");
  const fresh = () => { if (!signal.aborted) show(); };
  try {
    const { elements, look } = await open(rest, { act, signal, fresh });
    if (signal.aborted) return;
    main.replaceChildren(...elements);
    while (!signal.aborted) {
      if (!document.hidden) await look();
      if (signal.aborted) return;
      report(null);
      await new Promise((wake) => setTimeout(wake, LOOK_MS));
    }
  } catch (error) {
    if (signal.aborted) return;
    report(error);
    if (error.status === 401 && !hasToken() && !dialog.open) dialog.showModal();
    setTimeout(fresh, 2 * LOOK_MS);
  }
}

document.getElementById("credential").addEventListener("click", () => dialog.showModal());
dialog.addEventListener("close", () => {
  if (dialog.returnValue === "use") useToken(token.value);
  token.value = "";
  show();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();  // the address is that of a view
  main.focus();
});
addEventListener("hashchange", () => { main.focus(); show(); });
show();
