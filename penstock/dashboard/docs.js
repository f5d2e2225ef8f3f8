// The description of the API: shows openapi.json. Everything is set as text, never as markup.
"use strict";

const BASE = new URL(".", document.baseURI).href;
const MAX_DEPTH = 4;

const byId = (id) => document.getElementById(id);

function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children.filter((child) => child));
  return node;
}

let documented = {};

function resolve(value) {
  let found = value;
  while (found && found.$ref) found = found.$ref.split("/").slice(1).reduce((at, name) => at[name], documented);
  return found || {};
}

function kind(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(kind).filter((each, index, all) => all.indexOf(each) === index).join(" or ");
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" or ");
  if (schema.type === "array") return schema.items ? `list of ${kind(schema.items)}` : "list";
  return schema.type || "anything";
}

function inner(schema) {
  const options = schema.anyOf ? schema.anyOf : [schema];
  const found = options.map((each) => resolve(each.type === "array" ? each.items || {} : each));
  return found.find((each) => each.properties) || null;
}

function fields(schema, depth = 0) {
  const found = resolve(schema);
  const list = make("ul", "fields");
  for (const [name, each] of Object.entries(found.properties || {})) {
    const row = make("li", "", make("code", "", name), " ", make("span", "kind", kind(each)));
    if ((found.required || []).includes(name)) row.append(" ", make("b", "", "required"));
    const below = inner(each);
    if (below && depth < MAX_DEPTH) row.append(fields(below, depth + 1));
    list.append(row);
  }
  return list;
}

function contents(title, content) {
  const nodes = [];
  for (const [media, { schema }] of Object.entries(content || {})) {
    nodes.push(make("h3", "", title, " ", make("span", "kind", media)));
    const shown = schema ? inner(schema) : null;
    if (shown) nodes.push(fields(shown));
    else if (schema && schema.type === "object") nodes.push(make("p", "note", "An object."));
  }
  return nodes;
}

function route(path, method, operation) {
  const summary = make(
    "summary", "", make("span", `method ${method}`, method.toUpperCase()), make("code", "", path),
    make("span", "what", operation.summary),
    operation.responses["200"] ? null : make("span", "chip mixed", "not supported"),
    make("span", `chip ${operation["x-scope"] === "open" ? "good" : ""}`, operation["x-scope"]),
  );
  const node = make("details", "route", summary);
  node.dataset.search = `${method} ${path} ${operation.summary}`.toLowerCase();
  node.addEventListener("toggle", () => {
    if (node.children.length === 1) node.append(inside(operation));
  });
  return node;
}

function inside(operation) {
  const node = make("div", "inside");
  if (operation.requestBody) node.append(...contents("Request", operation.requestBody.content));
  if (operation.responses["200"]) node.append(...contents("Answer", operation.responses["200"].content));
  const statuses = make("dl", "statuses");
  for (const [status, response] of Object.entries(operation.responses)) {
    statuses.append(make("dt", "", status), make("dd", "", resolve(response).description));
  }
  node.append(make("h3", "", "Status"), statuses);
  return node;
}

function show() {
  const { info, tags, paths } = documented;
  byId("about").textContent = info.description;
  byId("version").textContent = `Penstock ${info.version}`;
  const groups = tags.map((tag) => {
    const routes = [];
    for (const [path, item] of Object.entries(paths)) {
      for (const method of ["get", "post"]) {
        if (item[method] && item[method].tags.includes(tag.name)) routes.push(route(path, method, item[method]));
      }
    }
    return make("section", "", make("h2", "group", tag.name, make("small", "", tag.description)), ...routes);
  });
  byId("routes").replaceChildren(...groups);
}

byId("filter").addEventListener("input", () => {
  const words = byId("filter").value.toLowerCase().split(/\s+/);
  for (const node of document.querySelectorAll(".route")) node.hidden = !words.every((word) => node.dataset.search.includes(word));
  for (const group of document.querySelectorAll("#routes > section")) group.hidden = !group.querySelector(".route:not([hidden])");
});

fetch(new URL("openapi.json", BASE)).then(async (response) => {
  documented = await response.json();
  show();
}).catch((error) => {
  byId("problem").textContent = `The description cannot be read: ${error.message}`;
  byId("problem").hidden = false;
});
