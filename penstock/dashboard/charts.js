// Charts as SVG, and numbers for people. Knows nothing of models.
"use strict";

const SVG = document.querySelector(".brand svg").namespaceURI;
const UNKNOWN = "–";
// Seconds that a chart shows.
const SPAN_S = 180;
const CHART_HEIGHT = 132;
const MARGIN = { left: 46, right: 10, top: 8, bottom: 18 };

function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size >= 1e6) return `${digits(value / 1e6)} M`;
  if (size >= 1e4) return `${digits(value / 1e3)} k`;
  return digits(value);
}

// Three significant digits, without zeros at the end.
function digits(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 100) return value.toFixed(0);
  return String(Number(value.toPrecision(size >= 10 ? 3 : 2)));
}

function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return UNKNOWN;
  if (seconds === 0) return "0";
  if (seconds < 1e-3) return `${digits(seconds * 1e6)} µs`;
  if (seconds < 1) return `${digits(seconds * 1e3)} ms`;
  return `${digits(seconds)} s`;
}

function percent(share) {
  if (share === null || share === undefined || !Number.isFinite(share)) return UNKNOWN;
  const value = 100 * share;
  return `${value > 0 && value < 10 ? Number(value.toPrecision(2)) : value.toFixed(0)} %`;
}

function bytes(size) {
  if (size === null || size === undefined) return UNKNOWN;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  let value = size;
  while (value >= 1000 && place < units.length - 1) { value /= 1000; place += 1; }
  return `${digits(value)} ${units[place]}`;
}

function draw(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// The next of 1, 2, 2.5, 5, 10, 20 and so on.
function niceAbove(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

function panel(title, note, ...children) {
  const caption = make("figcaption", {}, make("h3", {}, title), note ? make("p", {}, note) : null);
  return make("figure", { className: "panel" }, caption, ...children);
}

// Lines over the last minutes; `names` are shown beside the latest value, or that under the pointer.
class LineChart {
  constructor({ title, note, names, format, max, empty }) {
    this.names = names;
    this.format = format;
    this.max = max;
    this.empty = empty || "nothing yet";
    this.svg = draw("svg", { class: "chart", role: "img", "aria-label": title });
    this.values = names.map(() => make("b", {}));
    const entries = names.map((name, index) => make("li", { className: `line${index}` }, make("i", {}), name, " ", this.values[index]));
    this.node = panel(title, note, this.svg, make("ul", { className: "legend" }, ...entries));
    this.at = null;
    this.svg.addEventListener("pointermove", (event) => { this.at = event.offsetX; this.render(); });
    this.svg.addEventListener("pointerleave", () => { this.at = null; this.render(); });
  }

  // `columns` has a list of values for each name, as long as `times`; `limit` is a dashed line.
  update(times, columns, limit) {
    this.times = times;
    this.columns = columns;
    this.limit = limit === undefined ? null : limit;
    this.render();
  }

  render() {
    const width = this.svg.clientWidth;
    if (!width || !this.times) return;
    const { times, columns } = this;
    const end = times.length ? times[times.length - 1] : 0;
    const right = width - MARGIN.right;
    const bottom = CHART_HEIGHT - MARGIN.bottom;
    const known = columns.flat().filter((value) => value !== null);
    const top = this.max || niceAbove(Math.max(...known, this.limit !== null && known.length ? this.limit : 0, 0));
    const x = (time) => right - ((end - time) / SPAN_S) * (right - MARGIN.left);
    const y = (value) => bottom - (Math.min(value, top) / top) * (bottom - MARGIN.top);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${CHART_HEIGHT}`);
    this.svg.replaceChildren(...this.grid(width, right, bottom, top, y));
    if (this.limit !== null && this.limit <= top) this.svg.append(draw("path", { class: "limit", d: `M${MARGIN.left} ${y(this.limit)}H${right}` }));
    columns.forEach((values, index) => {
      for (const path of paths(times, values, x, y, MARGIN.left)) this.svg.append(draw("path", { class: `line line${index}`, d: path }));
    });
    this.point(times, columns, x, bottom);
    if (!known.length) this.svg.append(draw("text", { class: "empty", x: (MARGIN.left + right) / 2, y: CHART_HEIGHT / 2 }, this.empty));
  }

  grid(width, right, bottom, top, y) {
    const lines = [0, 0.5, 1].map((share) => draw("path", { class: "rule", d: `M${MARGIN.left} ${y(share * top)}H${right}` }));
    const labels = [0, 0.5, 1].map((share) => draw("text", { class: "y", x: MARGIN.left - 6, y: y(share * top) + 4 }, this.format(share * top)));
    const times = [[MARGIN.left, "start", "−3 min"], [(MARGIN.left + right) / 2, "middle", "−1:30"], [right, "end", "now"]];
    return [...lines, ...labels, ...times.map(([at, anchor, text]) => draw("text", { class: "x", x: at, y: CHART_HEIGHT - 4, "text-anchor": anchor }, text))];
  }

  point(times, columns, x, bottom) {
    let place = times.length - 1;
    if (this.at !== null && times.length) {
      const distance = (index) => Math.abs(x(times[index]) - this.at);
      place = times.reduce((best, _, index) => (distance(index) < distance(best) ? index : best), 0);
      this.svg.append(draw("path", { class: "pointer", d: `M${x(times[place])} ${MARGIN.top}V${bottom}` }));
    }
    this.values.forEach((node, index) => { node.textContent = this.format(place < 0 ? null : columns[index][place]); });
  }
}

// One path for each stretch of known values.
function paths(times, values, x, y, left) {
  const found = [];
  let path = "";
  values.forEach((value, index) => {
    const at = x(times[index]);
    if (value === null || at < left) {
      if (path) found.push(path);
      path = "";
    } else {
      path += `${path ? "L" : "M"}${at.toFixed(1)} ${y(value).toFixed(1)}`;
    }
  });
  if (path) found.push(path);
  return found;
}

// Counts by size, as bars from left to right.
class BarChart {
  constructor({ title, note, empty }) {
    this.empty = empty;
    this.svg = draw("svg", { class: "chart", role: "img", "aria-label": title });
    this.text = make("p", { className: "legend" });
    this.node = panel(title, note, this.svg, this.text);
  }

  update(counts, text) {
    this.counts = counts;
    this.text.textContent = text;
    this.render();
  }

  render() {
    const width = this.svg.clientWidth;
    if (!width || !this.counts) return;
    const bottom = CHART_HEIGHT - MARGIN.bottom;
    const total = this.counts.reduce((sum, [, count]) => sum + count, 0);
    const most = Math.max(1, ...this.counts.map(([, count]) => count));
    const step = Math.min(64, (width - 20) / Math.max(1, this.counts.length));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${CHART_HEIGHT}`);
    this.svg.replaceChildren(draw("path", { class: "rule", d: `M10 ${bottom}H${width - 10}` }));
    this.counts.forEach(([name, count], index) => {
      const height = Math.max(1, (count / most) * (bottom - 26));
      const middle = 10 + (index + 0.5) * step;
      const bar = { class: "bar", x: middle - step * 0.35, y: bottom - height, width: step * 0.7, height, rx: 2 };
      this.svg.append(draw("rect", bar), draw("text", { class: "x", x: middle, y: CHART_HEIGHT - 4, "text-anchor": "middle" }, String(name)));
      if (step > 30) this.svg.append(draw("text", { class: "x", x: middle, y: bottom - height - 5, "text-anchor": "middle" }, percent(count / total)));
    });
    if (!this.counts.length) this.svg.append(draw("text", { class: "empty", x: width / 2, y: CHART_HEIGHT / 2 }, this.empty));
  }
}

// A line without axes, for a cell of a table.
function spark(values) {
  const most = Math.max(1e-9, ...values.filter((value) => value !== null));
  const x = (index) => (index / Math.max(1, values.length - 1)) * 80;
  const y = (value) => 19 - (value / most) * 18;
  const lines = paths(values.map((_, index) => index), values, x, y, 0);
  return draw("svg", { class: "spark", viewBox: "0 0 80 20", "aria-hidden": "true" }, ...lines.map((d) => draw("path", { class: "line line0", d })));
}

// A share from 0 to 1.
function meter(share, text) {
  return make("span", { className: "meter" }, make("progress", { max: 1, value: share || 0 }), make("span", {}, text));
}
