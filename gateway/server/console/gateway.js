// The gateway as a whole: workers, memory, endpoints of other servers, and quotas.

import { find, get, metrics, total } from "./api.js";
import { bytes, facts, h, name, number, table, tiles } from "./dom.js";

export async function gateway(_, { signal }) {
  const about = await get("v2", signal);
  const figures = tiles(["workers ready", "not ready", "memory of requests", "its limit", "resident memory", "CPU cores in use", "refused for memory"]);
  const endpoints = table("Endpoints of other servers", ["model", "version", "endpoint", "state"]);
  const failures = table("Failed loads since the start", ["model", "#failures"]);
  const quotas = table("Quotas", ["principals", "models", "#requests/s", "#burst", "#in flight", "#bytes/s", "#tokens/s"]);
  const rules = (await find("v2/quotas", signal)) ?? [];
  quotas.fill(rules.map((each) => [name(each.principals.join(", ")), name(each.models.join(", ")),
    ...["requests_per_second", "burst", "in_flight", "bytes_per_second", "tokens_per_second"].map((field) => number(each[field]))]));
  const [traces, logs] = await Promise.all([find("v2/trace/setting", signal), find("v2/logging", signal)]);
  const settings = (title, document) => document && h("section", {}, h("h2", {}, title),
    facts(Object.entries(document).map(([key, value]) => [key, String(value)])));
  let before = null;
  async function look() {
    const samples = await metrics("", signal);
    const workers = (state) => number(total(samples, "modelport_workers", (labels) => labels.state === state));
    const now = { at: performance.now(), cpu: total(samples, "process_cpu_seconds_total") };
    const seconds = before && (now.at - before.at) / 1000;
    figures.set([
      workers("ready"), workers("not_ready"), bytes(total(samples, "modelport_request_memory_used_bytes")),
      bytes(total(samples, "modelport_request_memory_limit_bytes")), bytes(total(samples, "process_resident_memory_bytes")),
      seconds ? number((now.cpu - before.cpu) / seconds) : "–", number(total(samples, "modelport_request_memory_refused_total")),
    ]);
    before = now;
    endpoints.fill((samples.get("modelport_upstream_endpoint_ejected") ?? []).map(({ labels, value }) =>
      [name(labels.model), labels.version, name(labels.endpoint),
        value ? h("span", { class: "bad" }, `ejected by ${value} workers`) : h("span", { class: "good" }, "in use")]));
    failures.fill((samples.get("modelport_model_load_failures_total") ?? []).filter((each) => each.value)
      .map(({ labels, value }) => [name(labels.model), number(value)]));
  }
  return {
    elements: [
      h("h1", {}, "Gateway"), figures.element, facts([["Version", `${about.name} ${about.version}`], ["Extensions", about.extensions.join(", ")]]),
      h("h2", {}, "Upstream"), endpoints.element, h("h2", {}, "Loads"), failures.element, h("h2", {}, "Quotas"), quotas.element,
      settings("Traces", traces), settings("Log", logs),
    ].filter(Boolean),
    look,
  };
}
