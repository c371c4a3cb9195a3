// One version of a model: what was proven about it, how it does, and a form to call it.

import { find, get, histogram, metrics, modelPath, post, quantile, total } from "./api.js";
import { button, bytes, facts, h, micros, name, number, setText, spark, state, table, tiles } from "./dom.js";
import { tryIt } from "./try_it.js";

const LATENCY = "nv_inference_request_duration_histogram_us";
const KEPT = 120;

export async function model([model, asked], context) {
  const { signal } = context;
  const rows = (await post("v2/repository/index", {}, signal)).filter((row) => row.name === model);
  if (!rows.length) return { elements: [h("h1", {}, name(model)), h("p", {}, "There is no such model, or it is not for you.")], look: async () => {} };
  const row = rows.find((each) => each.version === asked) ?? rows.findLast((each) => each.state === "READY") ?? rows.at(-1);
  const path = modelPath(model, row.version);
  const ready = row.state === "READY";
  const [described, config, proof] = ready
    ? await Promise.all([find(path, signal), find(`${path}/config`, signal), find(`${path}/certificate`, signal)])
    : [null, null, null];
  const live = ready ? liveFigures(model, row.version, signal) : null;
  const head = header(model, row, rows, config, context);
  return {
    elements: [
      ...head.elements,
      ...(live?.elements ?? []),
      ...(ready ? certificate(proof) : []),
      ...(described ? [signature(described), tryIt(model, row.version, described, config, context)] : []),
    ],
    async look() {
      const found = (await post("v2/repository/index", {}, signal)).filter((each) => each.name === model);
      const now = found.find((each) => each.version === row.version);
      if (now?.state !== row.state || found.length !== rows.length) return context.fresh();
      return live?.look();
    },
  };
}

function header(model, row, rows, config, { act, fresh }) {
  const versions = rows.filter((each) => each.version);
  const choice = h("select", {
    id: "version",
    onchange: (event) => { location.hash = `#/models/${encodeURIComponent(model)}/${event.target.value}`; },
  }, versions.map((each) => h("option", { value: each.version, selected: each === row }, `${each.version} (${each.state})`)));
  const labels = Object.entries(config?.parameters ?? {}).filter(([key]) => key.startsWith("version_label."))
    .map(([key, value]) => h("span", { class: "tag" }, `${key.slice("version_label.".length)} → ${value.string_value}`));
  const control = (text, verb) => button(text, async () => {
    if (!confirm(`${text} model '${model}'?`)) return;
    await act(`${text}: done`, () => post(`v2/repository/models/${encodeURIComponent(model)}/${verb}`));
    fresh();
  });
  return {
    elements: [
      h("h1", {}, name(model)),
      h("div", { class: "bar" },
        versions.length ? [h("label", { for: "version" }, "Version"), choice] : null,
        state(row.state ?? "no version"), row.reason ? name(row.reason) : null, labels,
        control("Load", "load"), control("Unload", "unload")),
    ],
  };
}

/** The figures of a version, looked at again and again. */
function liveFigures(model, version, signal) {
  const figures = tiles(["requests/s", "p50", "p99", "waiting", "mean queue", "errors/s", "cache hits", "mean batch"]);
  const rates = spark("Requests per second of the last minutes");
  const errors = table("Failed requests since the start", ["reason", "#requests"]);
  const batches = table("Executions by batch size since the start", ["#batch size", "#executions", "#mean compute"]);
  const endpoints = table("Endpoints of the model's server", ["endpoint", "state"]);
  const upstream = h("div", { hidden: true }, h("h2", {}, "Upstream"), endpoints.element);
  const mine = (labels) => labels.model === model && labels.version === version;
  const trail = [];
  let before = null;
  async function look() {
    const [samples, stats] = await Promise.all([metrics(model, signal), get(`${modelPath(model, version)}/stats`, signal)]);
    const sum = (metric) => total(samples, metric, mine);
    const now = {
      at: performance.now(), buckets: histogram(samples, LATENCY, mine),
      done: sum("nv_inference_request_success"), failed: sum("nv_inference_request_failure"),
      queue: sum("nv_inference_queue_duration_us"), count: sum("nv_inference_count"), runs: sum("nv_inference_exec_count"),
      hits: sum("nv_cache_num_hits_per_model"), misses: sum("nv_cache_num_misses_per_model"),
    };
    const was = before ?? now;
    const seconds = (now.at - was.at) / 1000 || Infinity;
    const grown = (field) => Math.max(0, now[field] - was[field]);
    const looked = grown("hits") + grown("misses");
    const p = (q) => micros(quantile(now.buckets, was.buckets, q));
    figures.set([
      number(grown("done") / seconds), p(0.5), p(0.99), number(sum("nv_inference_pending_request_count")),
      micros(grown("done") ? grown("queue") / grown("done") : null), number(grown("failed") / seconds),
      looked ? `${number(100 * grown("hits") / looked)} %` : "–",
      grown("runs") ? number(grown("count") / grown("runs")) : "–",
    ]);
    if (before) trail.push(grown("done") / seconds);
    rates.draw(trail.splice(0, trail.length - KEPT) && trail);
    before = now;
    errors.fill((samples.get("nv_inference_request_failure") ?? []).filter((each) => mine(each.labels) && each.value)
      .map((each) => [each.labels.reason, number(each.value)]));
    batches.fill((stats.model_stats[0]?.batch_stats ?? []).map((each) => {
      const { count, ns } = each.compute_infer;
      return [number(each.batch_size), number(count), micros(count ? ns / 1000 / count : null)];
    }));
    const ejected = (samples.get("modelport_upstream_endpoint_ejected") ?? []).filter((each) => mine(each.labels));
    upstream.hidden = !ejected.length;
    endpoints.fill(ejected.map((each) => [name(each.labels.endpoint),
      each.value ? h("span", { class: "bad" }, "ejected") : h("span", { class: "good" }, "in use")]));
  }
  return { elements: [h("h2", {}, "Live"), figures.element, rates.element, upstream, batches.element, errors.element], look };
}

function signature(described) {
  const rows = ["inputs", "outputs"].flatMap((side) => (described[side] ?? []).map((tensor) =>
    [side.slice(0, -1), name(tensor.name), tensor.datatype, JSON.stringify(tensor.shape)]));
  return h("section", {}, h("h2", {}, "Signature"),
    table(`Platform: ${described.platform}`, ["side", "name", "datatype", "shape"], rows).element);
}

/** What the certificate of a version says; whatever it lacks is left out. */
function certificate(found) {
  const title = h("h2", {}, "Proof");
  if (!found) return [title, h("p", { class: "soft" }, "No certificate: this version was not published by 'modelport export' or 'modelport certify'.")];
  const { certificate: document = {}, key, verified } = found;
  const { artifact = {}, checkpoint = {}, parity = {}, evaluation, versions = {}, hardware = {} } = document;
  const signed = key
    ? `${verified ? "valid signature of the trusted key" : "signed by key"} ${key}${verified ? "" : " (not checked: no --require-signature)"}`
    : "not signed";
  const decision = parity.decision;
  const proven = facts([
    ["Result", h("strong", { class: parity.passed ? "good" : "bad" }, parity.passed ? "answers as the checkpoint does" : "no comparison")],
    ["Compared on", parity.samples && `${number(parity.samples)} random inputs and ${number(parity.edge_samples)} edge cases, seed ${parity.seed}`],
    ["Batch sizes", parity.batch_sizes?.join(", ")],
    ["Tolerance", parity.tolerance && `absolute ${parity.tolerance.atol}, relative ${parity.tolerance.rtol}`],
    ["Decisions", decision && `${number(100 * decision.agreement)} % of ${number(decision.decisions)} agree (${decision.kind} of ${decision.output})`],
    ["Held-out data", evaluation && JSON.stringify(evaluation)],
    ["Format", [artifact.format, artifact.dtype, artifact.quantize, artifact.opset && `opset ${artifact.opset}`].filter(Boolean).join(", ")],
    ["Checkpoint", checkpoint.file && `${checkpoint.file}, SHA-256 ${checkpoint.sha256}`],
    ["Created", document.created],
    ["On", [hardware.cpu, hardware.cores && `${hardware.cores} cores`].filter(Boolean).join(", ")],
    ["By", Object.entries(versions).map(([library, version]) => `${library} ${version}`).join(", ")],
    ["Size", artifact.size_bytes && bytes(artifact.size_bytes)],
    ["Signature", signed],
  ]);
  const outputs = Object.entries(parity.outputs ?? {}).map(([output, error]) =>
    [name(output), number(error.values), number(error.max_abs_error), number(error.mean_abs_error)]);
  const whole = h("details", {}, h("summary", {}, "The whole certificate"));
  whole.addEventListener("toggle", () => {
    if (whole.children.length === 1) whole.append(h("pre", { tabindex: "0", role: "region", "aria-label": "Certificate" }, JSON.stringify(document, null, 2)));
  });
  return [title, proven, table("Errors beside the checkpoint", ["output", "#values compared", "#largest error", "#mean error"], outputs).element, whole];
}
