// A form made from a model's signature. It sends the request that it shows as curl and Python.

import { BASE, hasToken, modelPath, send } from "./api.js";
import { button, h, micros, setText } from "./dom.js";

const MOST_SHOWN = 20_000;

/** A request that fits the signature: zeros, or a short text, for one row. */
export function example(inputs) {
  return {
    inputs: inputs.map(({ name, datatype, shape }) => {
      const fixed = shape.map((size) => (size < 0 ? 1 : size));
      const size = Math.min(fixed.reduce((product, each) => product * each, 1), 4096);
      const value = datatype === "BYTES" ? "text" : datatype === "BOOL" ? false : 0;
      return { name, shape: fixed, datatype, data: Array(size).fill(value) };
    }),
  };
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** The call as a command line. Its address is that of this page. */
export function asCurl(path, body, file) {
  const credential = hasToken() ? ' -H "authorization: Bearer $MODELPORT_TOKEN"' : "";
  const data = file ? `-T ${quoted(file)}` : `-H 'content-type: application/json' -d ${quoted(body)}`;
  return `curl${credential} ${data} ${quoted(new URL(path, BASE).href)}`;
}

/** The call in Python. JSON texts are Python's, too; other values are parsed. */
export function asPython(path, body, file) {
  const content = file ? `open(${JSON.stringify(file)}, "rb").read()` : `${JSON.stringify(body)}.encode()`;
  const headers = hasToken() ? 'headers={"authorization": "Bearer " + os.environ["MODELPORT_TOKEN"]}, ' : "";
  return [
    `import json${hasToken() ? ", os" : ""}, urllib.request`, "",
    `request = urllib.request.Request(${JSON.stringify(new URL(path, BASE).href)}, data=${content}, ${headers}method="POST")`,
    "print(json.load(urllib.request.urlopen(request)))",
  ].join("\n");
}

export function tryIt(model, version, described, config, { act }) {
  const infer = `${modelPath(model, version)}/infer`;
  const predictions = `predictions/${encodeURIComponent(model)}${version ? `/${version}` : ""}`;
  const texts = described.inputs.find((each) => each.datatype === "BYTES")?.name ?? "text";
  const isPicture = Object.keys(config?.parameters ?? {}).some((key) => key.startsWith("image."));
  const json = h("textarea", { rows: 10, spellcheck: "false", "aria-label": "Request as JSON" });
  json.value = JSON.stringify(example(described.inputs), null, 1);
  const text = h("textarea", { rows: 4, "aria-label": "Texts, one a line" });
  const picture = h("input", { type: "file", accept: "image/*", "aria-label": "Picture" });
  const file = h("input", { type: "file", "aria-label": "File with a request as JSON" });
  const preview = h("img", { alt: "The chosen picture", hidden: true, width: 160 });
  const answer = h("pre", { tabindex: "0", role: "region", "aria-label": "Answer" });
  const took = h("p", { class: "soft", role: "status" });
  const curl = h("pre", { tabindex: "0", role: "region", "aria-label": "The call as curl" });
  const python = h("pre", { tabindex: "0", role: "region", "aria-label": "The call in Python" });
  const fields = {
    JSON: [json], Text: [text],
    Picture: [picture, preview, isPicture ? "" : h("p", { class: "soft" }, "The configuration has no image.* parameters; the model may refuse pictures.")],
    File: [file],
  };
  let kind = described.inputs.length === 1 && described.inputs[0].datatype === "BYTES" ? "Text" : isPicture ? "Picture" : "JSON";
  const field = h("div");

  /** What the form says: the path, the body, and what the body is. */
  function request() {
    if (kind === "Picture") {
      const [chosen] = picture.files;
      return { path: predictions, body: chosen, file: chosen?.name ?? "PICTURE", type: chosen?.type || "application/octet-stream" };
    }
    if (kind === "File") return { path: infer, body: file.files[0], file: file.files[0]?.name ?? "REQUEST.json", type: "application/json" };
    if (kind === "JSON") return { path: infer, body: json.value, type: "application/json" };
    const data = text.value.split("\n").filter(Boolean);
    const shape = described.inputs.find((each) => each.name === texts)?.shape.length === 2 ? [data.length, 1] : [data.length];
    return { path: infer, body: JSON.stringify({ inputs: [{ name: texts, datatype: "BYTES", shape, data }] }), type: "application/json" };
  }

  function changed() {
    const { path, body, file: named } = request();
    setText(curl, asCurl(path, body, named));
    setText(python, asPython(path, body, named));
    if (preview.src) URL.revokeObjectURL(preview.src);
    preview.hidden = !(kind === "Picture" && picture.files[0]);
    if (!preview.hidden) preview.src = URL.createObjectURL(picture.files[0]);
  }

  function choose(chosen) {
    kind = chosen;
    field.replaceChildren(...fields[kind]);
    changed();
  }

  async function call() {
    const { path, body, type } = request();
    if (!body) return setText(took, "Choose a file first.");
    setText(answer, "");
    const started = performance.now();
    await act("The model has answered", async () => {
      setText(took, "");
      const response = await send(path, { method: "POST", body, headers: { "content-type": type } });
      const found = await response.text();
      setText(took, `${response.status}, ${micros(1000 * (performance.now() - started))}`);
      let shown = found;
      try { shown = JSON.stringify(JSON.parse(found), null, 1); } catch { /* shown as it is */ }
      setText(answer, shown.length > MOST_SHOWN ? `${shown.slice(0, MOST_SHOWN)} …` : shown);
    });
  }

  const kinds = Object.keys(fields).map((each) => h("label", {},
    h("input", { type: "radio", name: "kind", value: each, checked: each === kind, onchange: () => choose(each) }), ` ${each} `));
  for (const input of [json, text, picture, file]) input.addEventListener("input", changed);
  choose(kind);
  return h("section", {}, h("h2", {}, "Try it"), h("fieldset", {}, h("legend", {}, "Send"), kinds), field,
    h("div", { class: "bar" }, button("Call the model", call), took), answer,
    h("details", {}, h("summary", {}, "The same call as curl and Python"), curl, python));
}
