// Versions of a model, its rollout and its history; and the changes that operators make.
"use strict";

const CHECK_COLOURS = { holds: "good", broken: "bad", open: "" };
const DECISIONS = { running: "mixed", promoted: "good", "rolled back": "bad", stopped: "" };
const MAX_HISTORY = 12;

// A change: asks for a reason, posts, and shows why it was refused.
const change = { post: null, done: null, hasForce: false };

function askForChange({ title, text, button, hasMode, hasForce, post, done }) {
  change.post = post;
  change.done = done;
  change.hasForce = Boolean(hasForce);
  byId("change-title").textContent = title;
  byId("change-text").textContent = text;
  byId("change-do").textContent = button;
  byId("change-how-label").hidden = !hasMode;
  byId("change-how").value = "";
  byId("change-force-label").hidden = true;
  for (const id of ["change-reason", "change-force"]) byId(id).value = "";
  byId("change-problem").hidden = true;
  byId("change").showModal();
}

async function submitChange() {
  const button = byId("change-do");
  button.disabled = true;
  byId("change-problem").hidden = true;
  const how = byId("change-how-label").hidden ? "" : byId("change-how").value;
  let problem = "";
  try {
    const response = await change.post({ reason: byId("change-reason").value.trim(), force: byId("change-force").value.trim(), how });
    if (!response.ok) problem = await errorOf(response);
  } catch (error) {
    problem = `The server does not answer: ${error.message}`;
  }
  button.disabled = false;
  if (!problem) {
    byId("change").close();
    change.done();
    return;
  }
  byId("change-problem").textContent = problem;
  byId("change-problem").hidden = false;
  byId("change-force-label").hidden = !change.hasForce;
}

byId("change-form").addEventListener("submit", (event) => { event.preventDefault(); submitChange(); });
byId("change-cancel").addEventListener("click", () => byId("change").close());

function post(path, body) {
  return ask(path, { method: "POST", body: JSON.stringify(body || {}), headers: { "Content-Type": "application/json" } });
}

const inRepository = (name, action) => `v2/repository/models/${encodeURIComponent(name)}/${action}`;

function askToPromote(name, version, done) {
  askForChange({
    title: `Promote version ${version} of ${name}?`,
    text: "It is loaded beside the served version; if it cannot be loaded, nothing changes.",
    button: "Promote",
    hasMode: true,
    hasForce: true,
    done,
    post: ({ reason, force, how }) => {
      const body = { version, reason };
      if (force) body.force = force;
      if (how === "canary") body.canary = "5%";
      if (how === "shadow") body.shadow = true;
      return post(inRepository(name, "promote"), body);
    },
  });
}

function askToRollBack(name, isRunning, done) {
  askForChange({
    title: isRunning ? `Stop the rollout of ${name}?` : `Roll ${name} back?`,
    text: isRunning ? "The stable version answers all requests again." : "The version from before the last promotion is served again.",
    button: isRunning ? "Stop the rollout" : "Roll back",
    done,
    post: ({ reason }) => post(inRepository(name, "rollback"), { reason, rollout_only: isRunning }),
  });
}

function askToUnload(name, done) {
  askForChange({
    title: `Unload ${name}?`,
    text: "Requests that are in flight are still answered; new ones get 404.",
    button: "Unload",
    done,
    post: () => post(inRepository(name, "unload")),
  });
}

// The panel of a model.

class Versions {
  constructor(name, done) {
    this.name = name;
    this.done = done;
    this.rollout = make("div", { className: "rollout", hidden: true });
    this.table = make("div", {});
    this.history = make("ol", { className: "events history" });
    this.note = make("p", { className: "note" });
    this.node = make("section", { className: "card" }, make("h2", {}, "Versions"), this.rollout, this.table, this.note, make("h3", {}, "History"), this.history);
    this.isRunning = false;
    this.canChange = false;
  }

  // Without the scope admin, or without a repository, only loaded versions are known.
  showLoaded(models, hasVersions) {
    const text = models.map((model) => `version ${model.version}`).join(", ");
    const why = hasVersions ? "An API key with the scope admin shows all versions and their history." : "The server serves no repository, so there are no other versions.";
    this.note.textContent = `Loaded: ${text}. ${why}`;
    this.history.previousSibling.hidden = true;
  }

  async refresh(canChange) {
    this.canChange = canChange;
    const [versions, history] = await Promise.all([ask(inRepository(this.name, "versions")), ask(inRepository(this.name, "history"))]);
    if (!versions.ok || !history.ok) {
      this.note.textContent = await errorOf(versions.ok ? history : versions);
      return;
    }
    this.note.textContent = "";
    this.showVersions(await versions.json());
    this.showHistory(await history.json());
  }

  showVersions(rows) {
    const head = ["Version", "", "Evidence", "p99", "Rate", "Accuracy", "Size", ""];
    const body = rows.slice().sort((a, b) => Number(b.version) - Number(a.version)).map((row) => this.row(row));
    this.table.replaceChildren(make("table", { className: "versions" }, make("thead", {}, make("tr", {}, ...head.map((name) => make("th", {}, name)))), make("tbody", {}, ...body)));
  }

  row(row) {
    const states = [];
    if (row.is_served) states.push(make("span", { className: "chip good" }, "served"));
    if (row.is_loaded && !row.is_served) states.push(make("span", { className: "chip mixed" }, "loaded"));
    if (row.is_rollback_target) states.push(make("span", { className: "chip" }, "rollback target"));
    const promote = make("button", { type: "button", className: "small", onclick: () => askToPromote(this.name, row.version, this.done) }, "Promote");
    const rollBack = make("button", { type: "button", className: "small", onclick: () => askToRollBack(this.name, false, this.done) }, "Roll back");
    const action = row.is_served ? "" : row.is_rollback_target ? rollBack : promote;
    const cells = [
      ["Version", row.version],
      ["", make("span", { className: "chips" }, ...states)],
      ["Evidence", row.problems.length ? row.problems.join("; ") : row.slo ? `${row.slo}: ${row.outcome || "not judged"}` : "none"],
      ["p99", duration(row.p99_s)],
      ["Rate", row.max_rate === null ? UNKNOWN : `${number(row.max_rate)}/s`],
      ["Accuracy", row.accuracy === null ? UNKNOWN : `${digits(row.accuracy)} ${row.metric}`],
      ["Size", bytes(row.num_bytes)],
      ["", this.canChange ? action : ""],
    ];
    return make("tr", {}, ...cells.map(([label, value]) => make("td", { "data-label": label }, value)));
  }

  showHistory(events) {
    this.history.previousSibling.hidden = false;
    const shown = events.slice(-MAX_HISTORY).reverse().map((event) => {
      const from = event.previous.length ? ` (before: ${event.previous.join(", ")})` : "";
      const who = event.actor ? ` by ${event.actor}` : "";
      return make("li", {}, make("time", {}, when(event.time)), make("b", {}, event.kind), ` version ${event.version}${from}${who}`, event.reason ? make("span", { className: "soft" }, event.reason) : "");
    });
    this.history.replaceChildren(...(shown.length ? shown : [make("li", {}, "nothing yet")]));
  }

  showRollout(state) {
    this.rollout.hidden = !state;
    this.isRunning = Boolean(state) && state.decision === "running";
    if (!state) return;
    const decision = make("span", { className: "chip decision " + (DECISIONS[state.decision] || "") }, state.decision);
    const head = make("header", {}, make("h3", {}, `${state.mode === "shadow" ? "Shadow" : "Canary"}: version ${state.candidate} beside ${state.stable}`), decision);
    if (this.isRunning && this.canChange) head.append(make("button", { type: "button", className: "small", onclick: () => askToRollBack(this.name, true, this.done) }, "Stop"));
    const steps = state.steps.map((share, index) => make("li", { className: index < state.step ? "past" : index === state.step && this.isRunning ? "now" : "" }, percent(share)));
    const checks = state.checks.map((check) => make("li", {}, make("span", { className: "chip " + CHECK_COLOURS[check.state] }, check.state), make("b", {}, check.name), ` ${check.text}`));
    this.rollout.replaceChildren(head, meter(state.share, `${percent(state.share)} of the requests`), make("ol", { className: "steps" }, ...steps), make("p", { className: "reason" }, state.reason), make("ul", { className: "checks" }, ...checks));
  }
}

// The date only if it is not today's.
function when(text) {
  const time = new Date(text);
  const isToday = time.toDateString() === new Date().toDateString();
  return isToday ? time.toLocaleTimeString() : time.toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}
