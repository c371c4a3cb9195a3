// The latest requests, from the access log, with the time that each phase took.

import { get } from "./api.js";
import { h, micros, name, setText, table } from "./dom.js";

const HEADS = ["time", "model", "protocol", "path", "status", "#duration", "#queue", "#compute", "#batch", "caller", "trace", "error"];
const ORDERS = { time: (row) => row.time, duration: (row) => row.duration_us, queue: (row) => row.queue_us ?? -1 };

export async function requests(_, { signal }) {
  let found = { requests: [], notable: [] };
  const which = h("select", { id: "which", onchange: draw }, h("option", { value: "requests" }, "all"), h("option", { value: "notable" }, "failed or slow"));
  const order = h("select", { id: "order", onchange: draw }, Object.keys(ORDERS).map((each) => h("option", {}, each)));
  const filter = h("input", { type: "search", id: "text", oninput: draw });
  const note = h("p", { class: "soft" });
  const list = table("Latest requests in the access log", HEADS);

  function draw() {
    const wanted = filter.value.toLowerCase();
    const key = ORDERS[order.value];
    const rows = found[which.value].filter((row) => !wanted || JSON.stringify(row).toLowerCase().includes(wanted));
    rows.sort((one, other) => (key(one) < key(other) ? 1 : key(one) > key(other) ? -1 : 0));
    list.fill(rows.map((row) => [
      row.time, name([row.model, row.version].filter(Boolean).join("/")), row.protocol, name(row.path),
      row.status || row.grpc_status, micros(row.duration_us), micros(row.queue_us), micros(row.compute_us), row.batch_size,
      name(row.caller ?? ""), row.trace_id, name(row.error ?? ""),
    ]));
  }
  return {
    elements: [
      h("h1", {}, "Requests"), note,
      h("div", { class: "bar" }, h("label", { for: "which" }, "Show"), which, h("label", { for: "order" }, "Largest first by"), order, h("label", { for: "text" }, "Contains"), filter),
      list.element,
    ],
    async look() {
      try {
        found = await get("v2/requests", signal);
        setText(note, "");
      } catch (error) {
        if (error.status !== 404) throw error;
        setText(note, error.message);
      }
      draw();
    },
  };
}
