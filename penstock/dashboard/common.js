// Shared by the pages: nodes, requests with the visitor's API key, and answers in a dialog.
"use strict";

const BASE = new URL(".", document.baseURI).href;
const COLOURS = { READY: "good", UNAVAILABLE: "bad", LOADING: "mixed" };
const STATES = { ready: "good", "not ready": "bad", loading: "mixed", "shutting down": "mixed" };
// In memory only.
let secret = "";

const byId = (id) => document.getElementById(id);

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

function ask(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (secret) headers.Authorization = "Bearer " + secret;
  return fetch(new URL(path, BASE), { ...options, headers, credentials: "same-origin" });
}

async function errorOf(response) {
  const text = await response.text();
  let told = text || response.statusText;
  try {
    const error = JSON.parse(text).error;
    told = typeof error === "string" ? error : error.message;
  } catch { /* Not JSON: the text itself. */ }
  return `${response.status}: ${told}`;
}

// Why no answer came: a key that cannot be sent, or a server that is gone.
function isKeyProblem(error) {
  return error instanceof TypeError && /[^\x20-\x7e]/.test(secret);
}

function complain(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = !text;
}

function showKeyForm(problem) {
  byId("key").hidden = false;
  byId("key-problem").textContent = problem;
  byId("key-problem").hidden = !problem;
  byId("state").hidden = true;
  complain("");
}

function showServer(name, version, state) {
  byId("name").textContent = name === "penstock" ? "Penstock" : name;
  byId("version").textContent = `Penstock ${version}`;
  byId("state").textContent = state;
  byId("state").className = "chip " + (STATES[state] || "");
  byId("state").hidden = false;
}

// JSON with short lists in one line.
function pretty(value) {
  const text = JSON.stringify(value, null, 2);
  return text.replace(/\[\n\s+([^[\]{}]*?)\n\s*\]/g, (_, inside) => `[${inside.replace(/\n\s*/g, " ")}]`);
}

// Links to what needs the key.
document.addEventListener("click", async (event) => {
  const link = event.target.closest && event.target.closest("a.fetched");
  if (!link || !secret || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const response = await ask(link.getAttribute("href"));
  const text = response.ok ? await response.text() : await errorOf(response);
  const isJson = response.ok && (response.headers.get("Content-Type") || "").includes("json");
  byId("shown-title").textContent = link.textContent;
  byId("shown-text").textContent = isJson ? pretty(JSON.parse(text)) : text;
  byId("shown").showModal();
});
byId("shown-close").addEventListener("click", () => byId("shown").close());

// Calls `use` once a key was given.
function onKey(use) {
  byId("key").addEventListener("submit", (event) => {
    event.preventDefault();
    secret = byId("secret").value.trim();
    byId("secret").value = "";
    use();
  });
}
