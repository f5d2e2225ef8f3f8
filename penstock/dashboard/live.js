// The dashboard. A stream of events brings figures once a second; all text is set as text, never as markup.
"use strict";

const RETRY_MS = [1000, 2000, 5000, 10000];
// Without an event for this long, the stream is taken for broken.
const SILENCE_MS = 6000;
const MAX_REFUSALS = 40;
const WINDOWS = ["5m", "1h", "6h", "3d"];
const METRICS = { latency: "latency", ttft: "time to first token", tpot: "time per output token" };
const REASONS = {
  queue_full: "the queue is full",
  predicted_late: "the answer would have been late",
  queue_timeout: "waited too long in the queue",
  dropped_late: "dropped from the queue: late anyway",
  gave_up: "no instance came back",
  quota: "over the quota of the API key",
  quarantined: "crashed workers before",
  not_ready: "the model is not ready",
  invalid: "the request is invalid",
  too_large: "the request is too large",
  unsupported: "not supported",
  other: "other",
};

let start = null;
let latest = null;
// By version: the rows of the chart.
let points = new Map();
let times = [];
let refusals = [];
let chosen = "";
let detail = null;
let attempt = 0;
let controller = null;
let heardAt = 0;

const keyOf = (model) => JSON.stringify([model.name, model.version]);
const isAdmin = () => start !== null && start.scopes.includes("admin");
const canChange = () => isAdmin() && start.is_explicit;

// The stream. EventSource cannot send a key, so it is read by hand.

async function listen() {
  if (controller) controller.abort();
  const own = controller = new AbortController();
  heardAt = Date.now();
  try {
    const response = await ask("dashboard/events", { signal: own.signal });
    if (response.status === 401 || response.status === 403) return askForKey(secret ? await errorOf(response) : "");
    if (!response.ok) throw new Error(await errorOf(response));
    byId("key").hidden = true;
    await read(response.body.pipeThrough(new TextDecoderStream()).getReader());
    if (own === controller) retry("the stream has ended");
  } catch (error) {
    if (own.signal.aborted) return;
    if (isKeyProblem(error)) return askForKey("The key holds characters that no key has.");
    // fetch says "Failed to fetch" when nobody answers.
    retry(error instanceof TypeError ? "the server does not answer" : error.message);
  }
}

async function read(reader) {
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const text of events) {
      const [, name, data] = /^event: (\w+)\ndata: (.*)$/.exec(text) || [];
      heardAt = Date.now();
      attempt = 0;
      if (name === "start") begin(JSON.parse(data));
      else if (name === "tick") take(JSON.parse(data));
    }
  }
}

function retry(problem) {
  byId("stream").textContent = "reconnecting";
  byId("stream").className = "chip bad";
  showAge(true);
  if (attempt > 1) complain(`No new figures: ${problem}.`);
  setTimeout(listen, RETRY_MS[Math.min(attempt, RETRY_MS.length - 1)]);
  attempt += 1;
}

// Figures of a server that does not answer stay, but do not look like those of now.
function showAge(isOld) {
  byId("live").classList.toggle("old", isOld);
  if (isOld) byId("state").hidden = true;
}

function askForKey(problem) {
  showKeyForm(problem);
  byId("live").hidden = true;
  byId("stream").textContent = "no key";
  byId("stream").className = "chip";
}

function begin(event) {
  start = event;
  times = event.times;
  points = new Map(event.series.map((series) => [keyOf(series), series.points]));
  refusals = event.refusals.slice().reverse();
  byId("stream").textContent = "live";
  byId("stream").className = "chip good";
  byId("live").hidden = false;
  showAge(false);
  complain("");
  if (start.needs_key) byId("key-text").textContent = "The key is kept in this page's memory only.";
  showRepository();
}

function take(event) {
  if (times[times.length - 1] !== event.time) {
    const keep = 200;
    times = [...times, event.time].slice(-keep);
    const known = new Map();
    for (const model of event.models) {
      if (!model.version) continue;
      const row = start.drawn.map((name) => model[name]);
      known.set(keyOf(model), [...(points.get(keyOf(model)) || []), row].slice(-keep));
    }
    points = known;
    refusals = [...event.refusals.slice().reverse(), ...refusals].slice(0, MAX_REFUSALS);
  }
  const before = latest;
  latest = event;
  showServer(start.name, start.version, event.state);
  showTiles(event);
  showRows(event);
  showGpus(event.machine.gpus);
  showRefusals();
  showDetail(event);
  if (before && changing(before) !== changing(event)) {
    showRepository();
    if (detail) detail.refreshVersions();
  }
}

// What versions and history depend on. They are read again only when it changes: each reading is in the audit log.
function changing(event) {
  const rollouts = Object.values(event.rollouts).map((state) => [state.model, state.candidate, state.decision, state.step]);
  return JSON.stringify([event.models.map((model) => [model.name, model.version, model.state]), rollouts]);
}

// The values of one drawn figure; versions that came later have none before.
function column(key, name) {
  const rows = points.get(key) || [];
  const place = start.drawn.indexOf(name);
  return [...Array(Math.max(0, times.length - rows.length)).fill(null), ...rows.slice(-times.length).map((row) => row[place])];
}

// The server.

function showTiles(event) {
  const sum = (name) => event.models.reduce((total, model) => total + model[name], 0);
  const burns = Object.values(event.burn_rates).flatMap((metrics) => Object.values(metrics).map((windows) => windows["5m"]));
  const { machine } = event;
  const tiles = [
    ["Requests/s", number(sum("answered")), ""],
    ["Refused/s", number(sum("refused")), sum("refused") > 0 ? "bad" : ""],
    ["Failed/s", number(sum("failed")), sum("failed") > 0 ? "bad" : ""],
    ["In the queue", number(sum("num_waiting")), ""],
    ["Fastest SLO burn", burns.length ? `${number(Math.max(...burns))}×` : "no SLO", burns.length ? burnColour(Math.max(...burns)) : ""],
    ["CPU", percent(machine.cpu), machine.cpu > 0.95 ? "mixed" : ""],
    ["Memory", percent(machine.memory_used_bytes / machine.memory_total_bytes), ""],
  ];
  if (machine.shards.length) {
    tiles.push(["Connections", number(machine.shards.reduce((total, shard) => total + shard.num_connections, 0)), ""]);
  }
  byId("tiles").replaceChildren(...tiles.map(([name, value, colour]) => make("div", { className: `tile ${colour}` }, make("span", {}, name), make("b", {}, value))));
}

function showGpus(gpus) {
  byId("gpus").hidden = !gpus.length;
  byId("gpu-rows").replaceChildren(...gpus.map((gpu) => {
    const memory = gpu.memory_total_bytes ? gpu.memory_used_bytes / gpu.memory_total_bytes : 0;
    const power = gpu.power_limit_watts ? gpu.power_watts / gpu.power_limit_watts : 0;
    const figures = [
      ["Busy", meter(gpu.utilization, percent(gpu.utilization))],
      ["Memory", meter(memory, `${bytes(gpu.memory_used_bytes)} of ${bytes(gpu.memory_total_bytes)}`)],
      ["Power", meter(power, gpu.power_watts === null ? UNKNOWN : `${number(gpu.power_watts)} of ${number(gpu.power_limit_watts)} W`)],
    ];
    return make("div", { className: "gpu" }, make("b", {}, gpu.name), ...figures.map(([name, node]) => make("div", {}, make("span", {}, name), node)));
  }));
}

function showRefusals() {
  byId("no-refusals").hidden = refusals.length > 0;
  byId("refusals").replaceChildren(...refusals.map((entry) => make("li", {},
    make("time", {}, new Date(entry.time * 1000).toLocaleTimeString()),
    make("b", {}, `${entry.model} ${entry.version}`), ` ${REASONS[entry.reason] || entry.reason}`,
    make("span", { className: "chip" }, `${entry.reason} ×${entry.count}`))));
}

// The list of models.

const burnColour = (rate) => (rate >= 14.4 ? "bad" : rate >= 1 ? "mixed" : "good");

function fastestBurn(event, name, window) {
  const metrics = Object.values(event.burn_rates[name] || {});
  return metrics.length ? Math.max(...metrics.map((windows) => windows[window])) : null;
}

function showRows(event) {
  if (!event.models.some((model) => keyOf(model) === chosen)) {
    // After a promotion, the page stays with the model.
    const loaded = event.models.filter((model) => model.version);
    const next = loaded.find((model) => detail && model.name === detail.name) || loaded[0];
    chosen = next ? keyOf(next) : "";
  }
  byId("no-models").hidden = event.models.length > 0;
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.key : "";
  byId("rows").replaceChildren(...event.models.map((model) => modelRow(model, event)));
  if (focused) [...byId("rows").querySelectorAll("button")].filter((node) => node.dataset.key === focused).forEach((node) => node.focus());
}

function modelRow(model, event) {
  const key = keyOf(model);
  const name = make("button", { type: "button", className: "pick", "data-key": key, onclick: () => { chosen = key; showRows(latest); showDetail(latest); } }, model.name);
  const title = make("span", { className: "what" }, name, make("small", {}, model.version ? `version ${model.version}` : ""), make("span", { className: "chip " + (COLOURS[model.state] || "") }, (model.state || "").toLowerCase()));
  const limit = model.limits_s.latency;
  const isLate = limit !== undefined && model.p99_s !== null && model.p99_s > limit;
  const burn = fastestBurn(event, model.name, "5m");
  const rate = make("span", { className: "rate" }, make("span", {}, number(model.answered)), spark(column(key, "answered").slice(-60)));
  const cells = [
    ["", title],
    ["Requests/s", rate],
    ["p50", duration(model.p50_s)],
    ["p99", make("span", { className: isLate ? "bad" : "" }, duration(model.p99_s))],
    ["Queue", number(model.num_waiting)],
    ["Batch", number(model.batch_rows)],
    ["Busy", model.busy === null ? UNKNOWN : percent(model.busy)],
    ["SLO burn", burn === null ? UNKNOWN : make("span", { className: "chip " + burnColour(burn) }, `${number(burn)}×`)],
  ];
  const row = make("tr", { className: key === chosen ? "chosen" : "" }, ...cells.map(([label, value]) => make("td", { "data-label": label }, value)));
  row.addEventListener("click", () => name.click());
  name.addEventListener("click", (click) => click.stopPropagation());
  return row;
}

// The chosen version.

class Detail {
  constructor(model) {
    this.key = keyOf(model);
    this.name = model.name;
    this.version = model.version;
    this.head = make("header", { className: "chosen-head" });
    this.reason = make("p", { className: "problem", hidden: true });
    this.requests = new LineChart({ title: "Requests/s", names: ["answered", "refused", "failed"], format: number });
    this.latency = new LineChart({ title: "Latency", note: "Last 10 s, from histogram buckets; dashed: SLO", names: ["p50", "p95", "p99"], format: duration, empty: "no requests" });
    this.queue = new LineChart({ title: "Requests in the queue", names: ["waiting"], format: number });
    this.busy = new LineChart({ title: "Busy instances", note: "Share of the last minute that they computed", names: ["busy"], format: percent, max: 1 });
    this.sizes = new BarChart({ title: "Batch sizes", note: "Rows of batches, last 10 s", empty: "no batches" });
    this.burn = make("div", {});
    this.facts = make("dl", { className: "facts" });
    this.text = make("div", { hidden: true });
    const charts = [this.requests, this.latency, this.queue, this.sizes, this.busy].map((chart) => chart.node);
    charts.push(panel("SLO burn rate", "1× uses up the error budget exactly; 14.4× pages", this.burn, this.facts));
    const whatIf = makeWhatIf(this);
    this.versions = new Versions(model.name, () => { this.refreshVersions(); showRepository(); });
    this.node = make("div", {}, make("section", { className: "card" }, this.head, this.reason, this.text, make("div", { className: "charts" }, ...charts)), whatIf, this.versions.node);
    this.refreshVersions();
  }

  async refreshVersions() {
    if (isAdmin() && start.has_versions) {
      try {
        await this.versions.refresh(canChange());
      } catch { /* The stream notices a server that is gone. */ }
    }
  }

  update(model, event) {
    this.showHead(model);
    const values = (name) => column(this.key, name);
    this.requests.update(times, ["answered", "refused", "failed"].map(values));
    this.latency.update(times, ["p50_s", "p95_s", "p99_s"].map(values), model.limits_s.latency);
    this.queue.update(times, [values("num_waiting")]);
    this.busy.update(times, [values("busy")]);
    const sizes = Object.entries(model.batch_sizes).map(([size, count]) => [Number(size), count]).sort((a, b) => a[0] - b[0]);
    const wait = model.queue_s === null ? "" : `; mean wait ${duration(model.queue_s)}`;
    this.sizes.update(sizes, model.batch_rows === null ? "" : `mean ${number(model.batch_rows)}${wait}`);
    this.showBurn(event.burn_rates[model.name] || {});
    this.showFacts(model);
    this.showText(model.text);
    if (!isAdmin() || !start.has_versions) this.versions.showLoaded(event.models.filter((each) => each.name === model.name), start.has_versions);
    this.versions.showRollout(event.rollouts[model.name]);
  }

  showHead(model) {
    const parts = [model.name, model.version, model.state, model.slo, canChange()].join("\n");
    this.reason.textContent = [model.reason, ...model.drift].filter(Boolean).join(" ");
    this.reason.hidden = !this.reason.textContent;
    if (parts === this.shown) return;
    this.shown = parts;
    const chip = make("span", { className: "chip " + (COLOURS[model.state] || "") }, model.state.toLowerCase());
    const slo = make("span", { className: "soft" }, model.slo ? `SLO ${model.slo}` : "no SLO");
    this.head.replaceChildren(make("h2", {}, model.name, make("small", {}, `version ${model.version}`)), chip, slo);
    if (canChange()) this.head.append(make("button", { type: "button", className: "small", onclick: () => askToUnload(this.name, showRepository) }, "Unload"));
  }

  showBurn(metrics) {
    if (!Object.keys(metrics).length) {
      this.burn.replaceChildren(make("p", { className: "note" }, "The model has no SLO with a percentile or goodput."));
      return;
    }
    const head = make("tr", {}, make("th", {}, ""), ...WINDOWS.map((window) => make("th", {}, window)));
    const rows = Object.entries(metrics).map(([metric, windows]) => make("tr", {}, make("th", {}, METRICS[metric] || metric),
      ...WINDOWS.map((window) => make("td", {}, make("span", { className: "chip " + burnColour(windows[window]) }, `${number(windows[window])}×`)))));
    this.burn.replaceChildren(make("table", { className: "burn" }, make("thead", {}, head), make("tbody", {}, ...rows)));
  }

  showFacts(model) {
    const devices = [...new Set(model.devices)].join(", ");
    const facts = [
      ["Instances", `${model.num_ready} of ${model.num_instances} ready on ${devices}`],
      ["Cost per million answers", model.cost_per_million === null ? "" : number(model.cost_per_million)],
      ["Joules per answer", model.joules_per_request === null ? "" : number(model.joules_per_request)],
      ["Mean time in the queue", model.queue_s === null ? "" : duration(model.queue_s)],
    ];
    this.facts.replaceChildren(...facts.filter(([, value]) => value).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  }

  showText(text) {
    this.text.hidden = !text;
    if (!text) return;
    const facts = [
      ["Running", number(text.num_running)], ["Waiting", number(text.num_waiting)], ["KV cache", percent(text.cache_use)],
      ["Generated tokens/s", number(text.generated_tokens)], ["Prompt tokens/s", number(text.prompt_tokens)],
      ["Time to first token, p50 / p99", `${duration(text.ttft_p50_s)} / ${duration(text.ttft_p99_s)}`],
      ["Time per output token, p50 / p99", `${duration(text.tpot_p50_s)} / ${duration(text.tpot_p99_s)}`],
    ];
    this.text.replaceChildren(make("dl", { className: "facts" }, ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))));
  }

}

function showDetail(event) {
  const model = event.models.find((each) => keyOf(each) === chosen);
  if (detail && (!model || detail.key !== chosen)) {
    detail = null;
    byId("detail").replaceChildren();
  }
  if (!model || !model.version) return;
  if (!detail) {
    detail = new Detail(model);
    byId("detail").replaceChildren(detail.node);
  }
  detail.update(model, event);
}

// What if.

function makeWhatIf(owner) {
  const rate = make("input", { type: "number", min: "0.1", max: "1000000", step: "any", required: true, placeholder: "requests/s", "aria-label": "Requests per second" });
  const instances = make("input", { type: "number", min: "1", max: "1024", placeholder: "as now", "aria-label": "Instances" });
  const button = make("button", { type: "submit" }, "Predict");
  const answer = make("div", { className: "answer" });
  const form = make("form", { className: "row what-if" }, make("label", {}, "Requests/s", rate), make("label", {}, "Instances", instances), button);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    answer.replaceChildren(make("p", { className: "note" }, "Simulating…"));
    const body = { model: owner.name, version: owner.version, rate: Number(rate.value), instances: Number(instances.value) || 0 };
    try {
      const response = await post("dashboard/what-if", body);
      if (!response.ok) throw new Error(await errorOf(response));
      answer.replaceChildren(...prediction(await response.json(), owner));
    } catch (error) {
      answer.replaceChildren(make("p", { className: "problem" }, error.message));
    }
    button.disabled = false;
  });
  const about = "Simulates the batcher with the batch times T(b) that this model measured here, and Poisson arrivals.";
  return make("section", { className: "card" }, make("h2", {}, "What if"), make("p", { className: "note" }, about), form, answer);
}

function prediction(found, owner) {
  const model = latest.models.find((each) => keyOf(each) === owner.key);
  const head = ["", "p50", "p95", "p99", "Refused", "Busy", "Batch", "SLO"].map((name) => make("th", {}, name));
  const line = (title, each) => {
    const slo = each.keeps_slo === null ? UNKNOWN : make("span", { className: "chip " + (each.keeps_slo ? "good" : "bad") }, each.keeps_slo ? "kept" : "missed");
    const cells = [["p50", duration(each.p50_s)], ["p95", duration(each.p95_s)], ["p99", duration(each.p99_s)], ["Refused", percent(each.refused)], ["Busy", percent(each.busy)], ["Batch", number(each.batch_rows)], ["SLO", slo]];
    return make("tr", {}, make("th", {}, title), ...cells.map(([label, value]) => make("td", { "data-label": label }, value)));
  };
  const plural = found.asked.num_instances === 1 ? "instance" : "instances";
  const rows = [line(`predicted at ${number(found.asked.rate)}/s, ${found.asked.num_instances} ${plural}`, found.asked)];
  if (found.current) rows.push(line(`predicted at the current ${number(found.current.rate)}/s`, found.current));
  if (found.current && model) {
    const measured = { p50_s: model.p50_s, p95_s: model.p95_s, p99_s: model.p99_s, refused: null, busy: model.busy, batch_rows: model.batch_rows, keeps_slo: null };
    rows.push(line("measured now", measured));
  }
  const times = Object.entries(found.times_s).map(([size, seconds]) => `T(${size}) = ${duration(seconds)}`).join(", ");
  const notes = [`Most that these instances can do: ${number(found.capacity)}/s. From ${found.basis}: ${times}.`, ...found.notes];
  return [make("table", { className: "predicted" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)), ...notes.map((text) => make("p", { className: "note" }, text))];
}

// Models that can be loaded.

async function showRepository() {
  byId("repository").hidden = true;
  if (!canChange() || !start.has_versions) return;
  const response = await post("v2/repository/index");
  if (!response.ok) return;
  const rows = (await response.json()).filter((row) => row.state !== "READY");
  byId("repository").hidden = !rows.length;
  byId("not-loaded").replaceChildren(...rows.map((row) => {
    const problem = make("span", { className: "problem" }, row.reason || "");
    const button = make("button", { type: "button", className: "small" }, "Load");
    button.addEventListener("click", async () => {
      button.disabled = true;
      problem.textContent = "";
      const loaded = await post(inRepository(row.name, "load"));
      if (!loaded.ok) problem.textContent = await errorOf(loaded);
      button.disabled = false;
      if (loaded.ok) showRepository();
    });
    return make("li", {}, make("b", {}, row.name), button, problem);
  }));
}

// The page.

onKey(listen);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && byId("key").hidden) listen();
  else if (document.hidden && controller) controller.abort();
});
window.addEventListener("resize", () => { if (latest && detail) showDetail(latest); });
setInterval(() => {
  if (!document.hidden && byId("key").hidden && attempt === 0 && Date.now() - heardAt > SILENCE_MS) listen();
}, 1000);
listen();
