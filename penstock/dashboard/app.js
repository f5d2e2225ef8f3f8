// The start page. Everything shown comes from the state route and is set as text, never as markup.
"use strict";

const REFRESH_MS = 5000;
const MAX_VALUES = 48;
// With more models, only the first is unfolded.
const MAX_OPEN = 4;
const MAX_LINES = 24;
// Classes shown, the best ones.
const MAX_CLASSES = 5;
let shownModels = "";
let cards = new Map();

// The state.

async function refresh() {
  let response;
  try {
    response = await ask("dashboard/state");
  } catch (error) {
    return isKeyProblem(error) ? askForKey("The key holds characters that no key has.") : complain("The server does not answer.");
  }
  if (response.status === 401 || response.status === 403) {
    return askForKey(secret ? await errorOf(response) : "");
  }
  if (!response.ok) return complain(await errorOf(response));
  const state = await response.json();
  complain("");
  if (state.needs_key) byId("key-text").textContent = "The key is kept in this page's memory only.";
  byId("key").hidden = true;
  show(state);
}

function askForKey(problem) {
  showKeyForm(problem);
  byId("models").replaceChildren();
  shownModels = "";
}

function show(state) {
  showServer(state.name, state.version, state.state);
  const names = JSON.stringify(state.models.map((model) => [model.name, model.version, model.call]));
  if (names !== shownModels) {
    shownModels = names;
    const first = state.models.find((model) => model.call);
    const isOpen = (model) => model === first || state.models.length <= MAX_OPEN;
    cards = new Map(state.models.map((model) => [keyOf(model), new Card(model, state, isOpen(model))]));
    const nodes = [...cards.values()].map((card) => card.node);
    byId("models").replaceChildren(...(nodes.length ? nodes : [nothing(state)]));
  }
  for (const model of state.models) cards.get(keyOf(model)).update(model);
}

const keyOf = (model) => JSON.stringify([model.name, model.version]);

function nothing(state) {
  const text = state.state === "loading" ? "Models are loading." : "No model is loaded.";
  return make("p", { className: "card" }, text);
}

// A model.

class Card {
  constructor(model, state, isOpen) {
    this.chip = make("span", { className: "chip" });
    this.reason = make("p", { className: "problem", hidden: true });
    this.facts = make("dl", { className: "facts" });
    const version = model.version ? make("small", {}, `version ${model.version}`) : null;
    const head = make("header", {}, make("h2", {}, model.name, version), this.chip);
    if (model.version) head.append(links(model, state));
    this.node = make("section", { className: "card model" }, head, this.reason, this.facts);
    if (model.call) this.node.append(make("details", { className: "use", open: isOpen }, ...use(model)));
  }

  update(model) {
    this.chip.textContent = (model.state || "not loaded").toLowerCase();
    this.chip.className = "chip " + (COLOURS[model.state] || "");
    this.reason.textContent = model.reason;
    this.reason.hidden = !model.reason;
    const facts = [
      ["SLO", model.slo],
      ["Backend", model.backend],
      ["Batching", model.batching],
      ["Instances", model.num_instances ? `${model.num_ready} of ${model.num_instances} on ${[...new Set(model.devices)].join(", ")}` : ""],
    ];
    if (model.load) {
      facts.push(["Answered", model.load.num_answered.toLocaleString("en")]);
      if (model.load.num_failed) facts.push(["Failed", model.load.num_failed.toLocaleString("en")]);
      facts.push(["Waiting", model.load.num_waiting.toLocaleString("en")]);
    }
    const given = facts.filter(([, value]) => value);
    this.facts.replaceChildren(...given.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
  }
}

function links(model, state) {
  const path = `v2/models/${encodeURIComponent(model.name)}/versions/${encodeURIComponent(model.version)}`;
  const found = [["Metadata", path], ["Config", path + "/config"], ["Statistics", path + "/stats"]];
  if (state.scopes.includes("metrics")) found.unshift(["Explain", path + "/explain"]);
  return make("div", { className: "links" }, ...found.map(([text, href]) => make("a", { href, className: "fetched" }, text)));
}

function use(model) {
  const found = [make("summary", {}, "Call it")];
  if (model.inputs.length || model.outputs.length) {
    const sides = [["Inputs", model.inputs], ["Outputs", model.outputs]];
    found.push(make("div", { className: "tensors" }, ...sides.map(([title, all]) => tensors(title, all))));
  }
  return [...found, tabs(model)];
}

function tensors(title, all) {
  const rows = all.map((tensor) => make("li", {}, tensor.name, make("span", {}, `${tensor.datatype} [${tensor.shape.map((size) => (size < 0 ? "any" : size)).join(", ")}]`)));
  return make("div", {}, make("h3", {}, title), make("ul", {}, ...rows));
}

function tabs(model) {
  const { call } = model;
  const address = BASE.replace(/\/$/, "");
  const place = (text) => text.replace("{url}", () => address);
  const panels = { "Try it": form(model), curl: code(place(call.curl)), Python: code(place(call.python)) };
  const bar = make("div", { className: "tabs", role: "tablist" });
  const choose = (name) => {
    for (const button of bar.children) button.setAttribute("aria-selected", String(button.textContent === name));
    for (const [title, panel] of Object.entries(panels)) panel.hidden = title !== name;
  };
  for (const [name, panel] of Object.entries(panels)) {
    panel.setAttribute("role", "tabpanel");
    bar.append(make("button", { type: "button", role: "tab", onclick: () => choose(name) }, name));
  }
  choose("Try it");
  return make("div", {}, bar, ...Object.values(panels));
}

function code(text) {
  const button = make("button", { type: "button", className: "plain" }, "Copy");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text).then(() => { button.textContent = "Copied"; }, () => { button.textContent = "Select it"; });
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return make("div", { className: "copied" }, make("pre", {}, text), button);
}

// The form.

function form(model) {
  const { call } = model;
  const field = fieldOf(call);
  const button = make("button", { type: "submit" }, "Run");
  const took = make("span", { role: "status" });
  const answer = make("div", { className: "answer" });
  const preview = call.form === "image" ? previewOf(field) : null;
  const node = make("form", {}, field, preview, note(call), make("div", { className: "run" }, button, took), answer);
  node.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) node.requestSubmit();
  });
  node.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    took.textContent = "";
    answer.replaceChildren();
    const began = performance.now();
    try {
      const request = await requestOf(call, field);
      const response = await ask(call.path, { method: "POST", ...request });
      if (!response.ok) throw new Error(await errorOf(response));
      await showAnswer(model, response, answer);
      took.textContent = `${(performance.now() - began).toFixed(0)} ms`;
    } catch (error) {
      answer.append(make("p", { className: "problem" }, error.message));
    }
    button.disabled = false;
    refresh();
  });
  return node;
}

function fieldOf(call) {
  const body = JSON.parse(call.body);
  if (call.form === "chat") return make("textarea", { value: body.messages[0].content, "aria-label": "Message" });
  if (call.form === "completion") return make("textarea", { value: body.prompt, "aria-label": "Prompt" });
  if (call.form === "text") return make("textarea", { value: body.inputs[0].data[0], "aria-label": "Text" });
  if (call.form === "image") return make("input", { type: "file", accept: "image/*", required: true, "aria-label": "Image" });
  const text = pretty(body);
  const rows = Math.min(MAX_LINES, text.split("\n").length + 1);
  return make("textarea", { className: "code", value: text, rows, spellcheck: false, "aria-label": "Request as JSON" });
}

function previewOf(field) {
  const image = make("img", { className: "preview", alt: "", hidden: true });
  field.addEventListener("change", () => {
    URL.revokeObjectURL(image.src);
    image.hidden = !field.files.length;
    if (field.files.length) image.src = URL.createObjectURL(field.files[0]);
  });
  return image;
}

function note(call) {
  const text = call.form === "tensors" && call.num_zeros ? "Inputs with binary_data_size are sent as that many zero bytes." : "";
  return text ? make("p", { className: "note" }, text) : null;
}

async function requestOf(call, field) {
  const body = JSON.parse(call.form === "tensors" ? readJson(field) : call.body);
  if (call.form === "chat" || call.form === "completion") {
    if (call.form === "chat") body.messages[0].content = field.value;
    else body.prompt = field.value;
    body.stream = true;
    return jsonBody(body);
  }
  if (call.form === "text") {
    body.inputs[0].data = body.inputs[0].data.map(() => field.value);
    return jsonBody(body);
  }
  if (call.form === "image") {
    const bytes = await field.files[0].arrayBuffer();
    const length = new DataView(new ArrayBuffer(4));
    length.setUint32(0, bytes.byteLength, true);
    delete body.inputs[0].data;
    body.inputs[0].parameters = { binary_data_size: bytes.byteLength + 4 };
    return binaryBody(body, [length.buffer, bytes]);
  }
  const sizes = (body.inputs || []).map((input) => (input.parameters || {}).binary_data_size || 0);
  const total = sizes.reduce((sum, size) => sum + size, 0);
  return total ? binaryBody(body, [new Uint8Array(total)]) : jsonBody(body);
}

function readJson(field) {
  try {
    JSON.parse(field.value);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
  return field.value;
}

function jsonBody(body) {
  return { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
}

function binaryBody(body, rest) {
  const head = new TextEncoder().encode(JSON.stringify(body));
  const headers = { "Content-Type": "application/octet-stream", "Inference-Header-Content-Length": String(head.length) };
  return { body: new Blob([head, ...rest]), headers };
}

// Answers.

async function showAnswer(model, response, node) {
  if (["chat", "completion"].includes(model.call.form)) return stream(response, node);
  const length = response.headers.get("Inference-Header-Content-Length");
  const bytes = await response.arrayBuffer();
  const head = length === null ? bytes : bytes.slice(0, Number(length));
  const answer = JSON.parse(new TextDecoder().decode(head));
  node.append(...(answer.outputs || []).map((tensor) => output(tensor, model.labels[tensor.name] || [])));
  if (length !== null) node.append(make("p", { className: "note" }, `${bytes.byteLength - Number(length)} bytes of tensors follow.`));
  const raw = make("details", { className: "raw" }, make("summary", {}, "Answer as JSON"), make("pre", {}, pretty(answer)));
  node.append(raw);
}

function output(tensor, labels) {
  const kind = make("div", { className: "part" }, `${tensor.name}  ${tensor.datatype} [${tensor.shape.join(", ")}]`);
  const data = (tensor.data || []).flat(Infinity);
  if (labels.length > 1 && labels.length === data.length) return make("div", { className: "output" }, kind, classes(data, labels));
  const values = data.slice(0, MAX_VALUES).map(shortly).join(tensor.datatype === "BYTES" ? "\n" : ", ");
  const more = data.length > MAX_VALUES ? `, … ${data.length - MAX_VALUES} more` : "";
  const text = tensor.datatype === "BYTES" ? make("div", { className: "text" }, values + more) : make("code", {}, values + more);
  return make("div", { className: "output" }, kind, text);
}

function classes(data, labels) {
  const least = Math.min(0, ...data);
  const most = Math.max(1, ...data);
  const best = data.map((value, index) => [value, labels[index]]).sort((a, b) => b[0] - a[0]).slice(0, MAX_CLASSES);
  const cells = best.flatMap(([value, label]) => [make("span", {}, label), make("progress", { max: most - least, value: value - least }), make("code", {}, shortly(value))]);
  return make("div", { className: "bars" }, ...cells);
}

const shortly = (value) => (typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(6))) : String(value));

async function stream(response, node) {
  const text = make("div", { className: "text" });
  node.append(text);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) addEvent(event.replace(/^data: /, ""), text);
  }
  if (!text.textContent) text.textContent = "(no text)";
}

function addEvent(data, text) {
  if (data === "[DONE]") return;
  const event = JSON.parse(data);
  if (event.error) throw new Error(event.error.message || event.error);
  for (const choice of event.choices || []) text.append((choice.delta ? choice.delta.content : choice.text) || "");
}

onKey(refresh);
setInterval(() => { if (!document.hidden && byId("key").hidden) refresh(); }, REFRESH_MS);
refresh();
