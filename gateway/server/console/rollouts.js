// Rollouts: stages, confidence sequences, disagreeing examples, and the commands.

import { find, get, post } from "./api.js";
import { button, facts, h, name, number, s, setText, state, table } from "./dom.js";

const COMMANDS = { running: ["pause", "promote", "rollback"], paused: ["resume", "promote", "rollback"] };
const percent = (share) => `${number(100 * share)} %`;
const side = (plan, which) => (plan[which].model === plan.model ? plan[which].version : `${plan[which].model}/${plan[which].version}`);
const stagesOf = ({ shadow, steps }) => [...(shadow ? [`shadow ${percent(shadow)}`] : []), ...steps.map((share) => `canary ${percent(share)}`)];
const where = (status) => `${status.stage + 1} of ${stagesOf(status.plan).length}`;

export function rollouts([model], context) {
  return model ? one(model, context) : all(context);
}

async function all({ signal }) {
  const list = table("Rollouts on this gateway", ["model", "baseline", "candidate", "stage", "#candidate's share", "phase"]);
  return {
    elements: [h("h1", {}, "Rollouts"), list.element, h("p", { class: "soft" }, "Start one with 'modelport rollout start MODEL'.")],
    async look() {
      list.fill((await get("v2/rollouts", signal)).map((status) => [
        h("a", { href: `#/rollouts/${encodeURIComponent(status.plan.model)}` }, name(status.plan.model)),
        name(side(status.plan, "baseline")), name(side(status.plan, "candidate")), where(status),
        percent(status.share), state(status.phase),
      ]));
    },
  };
}

/** A criterion's confidence interval beside its limit. */
function interval(row) {
  const known = [row.lower, row.upper, row.limit, row.estimate].filter(Number.isFinite);
  if (!Number.isFinite(row.lower) || !Number.isFinite(row.upper)) return "";
  const [least, most] = [Math.min(...known), Math.max(...known)];
  const x = (value) => 6 + 188 * (most > least ? (value - least) / (most - least) : 0.5);
  const label = `between ${number(row.lower)} and ${number(row.upper)}, limit ${number(row.limit)}`;
  const line = (cls, from, to, y1, y2) => s("line", { class: cls, x1: from, x2: to, y1, y2 });
  const parts = [line("", 0, 200, 10, 10), line("range", x(row.lower), x(row.upper), 10, 10)];
  if (Number.isFinite(row.limit)) parts.push(line("limit", x(row.limit), x(row.limit), 2, 18));
  if (Number.isFinite(row.estimate)) parts.push(s("circle", { cx: x(row.estimate), cy: 10, r: 4 }));
  return s("svg", { class: "interval", viewBox: "0 0 200 20", role: "img", "aria-label": label }, ...parts);
}

async function one(model, { act, signal, fresh }) {
  const path = `v2/rollouts/${encodeURIComponent(model)}`;
  const summary = h("div"), actions = h("div", { class: "bar" });
  const reason = h("input", { id: "reason" });
  const evidence = table("Criteria with their confidence sequences", ["criterion", "#limit", "#estimate", "interval", "#e-value", "#needed", "state"]);
  const stages = table("Stages", ["stage", "#candidate", "#baseline", "#compared", "#disagreed", "#failed"]);
  const events = table("Events, latest first", ["time", "event", "stage", "reason", "by"]);
  const examples = h("div");
  const command = (verb) => button(verb, async () => {
    if (!confirm(`${verb} the rollout of '${model}'?`)) return;
    await act(`${verb}: done`, () => post(`${path}/${verb}`, { reason: reason.value }));
    fresh();
  });
  const show = button("Show requests with disagreeing answers", () => act("", async () => {
    const found = await get(`${path}/examples`, signal);
    examples.replaceChildren(...(found.length ? found.map((each) => h("pre", { tabindex: "0", role: "region", "aria-label": "Example" }, JSON.stringify(each, null, 1))) : [h("p", {}, "There are none.")]));
  }));
  let phase = "";
  async function look() {
    const status = await find(path, signal);
    if (!status) return summary.replaceChildren(h("p", {}, "This model has had no rollout, or it is not for you."));
    const { plan } = status;
    summary.replaceChildren(facts([
      ["Phase", state(status.phase)], ["Candidate", name(side(plan, "candidate"))], ["Baseline", name(side(plan, "baseline"))],
      ["Stage", where(status)], ["Candidate's share", percent(status.share)],
      ["Verdict", status.decision && `${status.decision.verdict}: ${status.decision.reason}`],
      ["Waits", status.problem || status.hold_reason || status.unsettled_reason],
    ]));
    if (phase !== status.phase) {
      phase = status.phase;
      const verbs = COMMANDS[phase] ?? [];
      actions.replaceChildren(...(verbs.length ? [h("label", { for: "reason" }, "Reason"), reason, ...verbs.map(command)] : []));
    }
    evidence.fill((status.evidence ?? []).map((row) => [name(row.name), number(row.limit), number(row.estimate), interval(row),
      number(Math.exp(Math.min(row.log_e_value, 50))), number(1 / row.alpha), state(row.status)]));
    stages.fill(stagesOf(plan).map((stage, i) => {
      const count = status.counts?.[i];
      const marked = `${i === status.stage ? "▸ " : ""}${stage}`;
      return [marked, ...(count ? [count.candidate.requests, count.baseline.requests, count.compared, count.disagreed, count.failed + count.candidate.errors].map(number) : [])];
    }));
    events.fill([...status.events].reverse().map((event) =>
      [new Date(1000 * event.time).toLocaleString(), event.kind, event.stage + 1, name(event.reason), name(event.by)]));
  }
  return { elements: [h("h1", {}, "Rollout of ", name(model)), summary, actions, evidence.element, stages.element, show, examples, events.element], look };
}
