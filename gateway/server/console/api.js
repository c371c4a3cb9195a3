// The gateway's public API, as every client has it.

/** The folder of the page, so that a proxy may serve it below a prefix. */
export const BASE = new URL(".", document.baseURI);
let token = "";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const useToken = (text) => { token = text.trim(); };
export const hasToken = () => token !== "";

/** Send a request; return the response, or throw the gateway's error. */
export async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (token) headers.authorization = `Bearer ${token}`;
  let response;
  try {
    response = await fetch(new URL(path, BASE), { ...options, headers, credentials: "same-origin", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the gateway does not respond");
  }
  if (response.ok) return response;
  const text = await response.text();
  let reason = text.slice(0, 1000);
  try { reason = JSON.parse(text).error ?? reason; } catch { /* a proxy's own page */ }
  throw new ApiError(response.status, String(reason) || `status ${response.status}`);
}

export const get = async (path, signal) => (await send(path, { signal })).json();

export async function post(path, document = {}, signal) {
  const headers = { "content-type": "application/json" };
  const text = await (await send(path, { method: "POST", headers, body: JSON.stringify(document), signal })).text();
  return text ? JSON.parse(text) : null;
}

/** What is at a path; null if it is not there, or not for this caller. */
export async function find(path, signal) {
  try {
    return await get(path, signal);
  } catch (error) {
    if ([401, 403, 404].includes(error.status)) return null;
    throw error;
  }
}

export const modelPath = (model, version) =>
  `v2/models/${encodeURIComponent(model)}${version ? `/versions/${encodeURIComponent(version)}` : ""}`;

const SAMPLE = /^([\w:]+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** The samples of the metrics, by name: labels and value. Counters of `model` alone are fetched. */
export async function metrics(model, signal) {
  const text = await (await send(`metrics?model=${encodeURIComponent(model)}`, { signal })).text();
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = SAMPLE.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(LABEL)].map((each) =>
      [each[1], each[2].replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c))]));
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return found;
}

/** The sum of the samples of a name whose labels `suits` accepts. */
export const total = (samples, metric, suits = () => true) =>
  (samples.get(metric) ?? []).filter(({ labels }) => suits(labels)).reduce((sum, { value }) => sum + value, 0);

/** Cumulative counts of a histogram by upper bound. */
export function histogram(samples, metric, suits) {
  const counts = new Map();
  for (const { labels, value } of samples.get(`${metric}_bucket`) ?? []) {
    if (suits(labels)) counts.set(Number(labels.le.replace("+Inf", "Infinity")), (counts.get(Number(labels.le.replace("+Inf", "Infinity"))) ?? 0) + value);
  }
  return [...counts].sort(([one], [other]) => one - other);
}

/** A quantile of what has been counted since `before`, linear within a bucket as in Prometheus. */
export function quantile(now, before, q) {
  const earlier = new Map(before);
  const counts = now.map(([bound, count]) => [bound, count - (earlier.get(bound) ?? 0)]);
  const all = counts.at(-1)?.[1] ?? 0;
  if (all <= 0) return null;
  const rank = q * all;
  const i = counts.findIndex(([, count]) => count >= rank);
  const [low, below] = i > 0 ? counts[i - 1] : [0, 0];
  const [high, upTo] = counts[i];
  if (!Number.isFinite(high)) return low;
  return upTo > below ? low + (high - low) * (rank - below) / (upTo - below) : high;
}
