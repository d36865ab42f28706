"use strict";
// Draws the report from the JSON in #data. Texts of the run are inserted as text nodes only.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const COLORS = 8;

/** An HTML element with attributes and children; a string child becomes a text node. */
function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function svg(name, attributes = {}, text = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  return node;
}

/** A number with four significant digits. */
function short(value) {
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(3) + "G";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
  if (size >= 1e5) return (value / 1e3).toPrecision(3) + "k";
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

const shown = (value) => (value === null || value === undefined ? "null" : typeof value === "object" ? JSON.stringify(value) : String(value));

// ---- tooltip -----------------------------------------------------------------------------------------------------

function tip(event, text) {
  const box = $("tooltip");
  box.hidden = false;
  box.textContent = text;
  const left = event.clientX + 14 + box.offsetWidth > innerWidth ? event.clientX - 14 - box.offsetWidth : event.clientX + 14;
  box.style.left = Math.max(4, left) + "px";
  box.style.top = Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 4) + "px";
}
const untip = () => { $("tooltip").hidden = true; };

// ---- axes --------------------------------------------------------------------------------------------------------

/** About `count` round numbers between low and high. */
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

/** An empty plot with a grid: its SVG element and the scales x and y. */
function axes(host, title, xs, ys, height = 190, marks = null) {
  const width = Math.max(host.clientWidth, 240), left = 46, right = 16, top = 8, bottom = 22;
  const [x0, x1] = xs[0] === xs[1] ? [xs[0] - 1, xs[1] + 1] : xs;
  // a constant, but for a ten-thousandth, is drawn between 0 and twice its value
  const size = Math.max(Math.abs(ys[0]), Math.abs(ys[1]));
  const [y0, y1] = ys[1] - ys[0] > 1e-4 * size ? ys : [Math.min(0, 2 * ys[0]), size === 0 ? 1 : Math.max(0, 2 * ys[1])];
  const x = (value) => left + ((value - x0) / (x1 - x0)) * (width - left - right);
  const y = (value) => height - bottom - ((value - y0) / (y1 - y0)) * (height - top - bottom);
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": title });
  for (const value of marks || ticks(y0, y1, 5)) {
    node.append(svg("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), stroke: "var(--grid)" }));
    node.append(svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  for (const value of ticks(x0, x1, Math.min(6, width / 80)))
    if (Number.isInteger(value)) node.append(svg("text", { x: x(value), y: height - 6, "text-anchor": "middle" }, short(value)));
  host.append(node);
  const stepAt = (event) => {
    const box = node.getBoundingClientRect();
    return x0 + (((event.clientX - box.left) * (width / box.width) - left) / (width - left - right)) * (x1 - x0);
  };
  return { node, x, y, width, height, left, right, top, bottom, stepAt };
}

/** The point of a curve whose step is the nearest. */
function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - points[low - 1][0] <= points[low][0] - step ? points[low - 1] : points[low];
}

// ---- curves ------------------------------------------------------------------------------------------------------

function drawPanel(host, panel) {
  const all = panel.curves.flatMap((curve) => curve.points);
  const values = all.map((point) => point[1]), steps = all.map((point) => point[0]);
  const low = Math.min(...values), high = Math.max(...values), margin = (high - low) * 0.04;
  const limits = panel.limits || [low - margin, high + margin];
  const plot = axes(host, panel.title, [Math.min(...steps), Math.max(...steps)], limits);
  const clamp = (value) => Math.min(Math.max(plot.y(value), plot.top - 3), plot.height - plot.bottom + 3);
  const path = (points) => points.map(([s, v], i) => `${i ? "L" : "M"}${plot.x(s).toFixed(1)} ${clamp(v).toFixed(1)}`).join("");
  panel.curves.forEach((curve, i) => {
    const color = `var(--c${i % COLORS})`;
    if (curve.kind === "dots") {
      if (curve.points.length > 2) plot.node.append(svg("path", { d: path(curve.points), fill: "none", stroke: color, "stroke-dasharray": "2 3" }));
      for (const [s, v] of curve.points) plot.node.append(svg("circle", { cx: plot.x(s), cy: clamp(v), r: 3.2, fill: color, class: "dot" }));
      return;
    }
    const smooth = curve.smooth.length > 0;
    plot.node.append(svg("path", { d: path(curve.points), class: "raw", fill: "none", stroke: color, "stroke-width": smooth ? 1 : 1.7, opacity: smooth ? 0.35 : 1 }));
    if (smooth) plot.node.append(svg("path", { d: path(curve.points.map(([s], k) => [s, curve.smooth[k]])), fill: "none", stroke: color, "stroke-width": 2 }));
    if (curve.points.length === 1) plot.node.append(svg("circle", { cx: plot.x(curve.points[0][0]), cy: clamp(curve.points[0][1]), r: 3, fill: color }));
  });
  const cross = svg("line", { y1: plot.top, y2: plot.height - plot.bottom, stroke: "var(--dim)", visibility: "hidden" });
  plot.node.append(cross);
  plot.node.addEventListener("pointermove", (event) => {
    const at = nearest(panel.curves[0].points, plot.stepAt(event))[0];
    cross.setAttribute("x1", plot.x(at));
    cross.setAttribute("x2", plot.x(at));
    cross.setAttribute("visibility", "visible");
    const lines = panel.curves.map((curve) => {
      const [s, v] = nearest(curve.points, at);
      return `${curve.label}: ${short(v)}${s === at ? "" : ` (step ${s})`}`;
    });
    tip(event, [`step ${at}`, ...lines].join("\n"));
  });
  plot.node.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); untip(); });
}

/** The name of a curve: what it adds to the title of its panel. Its id is shown beside the pointer. */
function nameOf(curve, panel) {
  if (curve.kind === "dots") return curve.label;
  const words = curve.label.split("/").pop().replace(/_/g, " ");
  return panel.curves.filter((other) => other.kind !== "dots").length > 1 || panel.title === curve.label ? words : panel.title;
}

function panelCard(panel) {
  const card = el("div", { class: "card panel" }, el("h3", { title: panel.help }, panel.title));
  const host = el("div");
  const legend = el("div", { class: "legend" });
  panel.curves.forEach((curve, i) => {
    const last = curve.points[curve.points.length - 1][1];
    legend.append(el("span", {}, el("i", { style: `background: var(--c${i % COLORS})` }), `${nameOf(curve, panel)} ${short(last)}`));
  });
  card.append(host, legend);
  if (panel.limits) {
    const outside = panel.curves.flatMap((c) => c.points).filter(([, v]) => v < panel.limits[0] || v > panel.limits[1]);
    card.append(el("div", { class: "note" }, `${outside.length} outliers are drawn at the edge`));
  }
  if (panel.help) card.append(el("div", { class: "note" }, panel.help));
  onWidth(host, () => drawPanel(host, panel));
  return card;
}

/** Draws when the element gets a width, and again when it changes. */
function onWidth(host, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (!host.clientWidth || Math.abs(host.clientWidth - width) < 2) return;
    width = host.clientWidth;
    host.replaceChildren();
    draw();
  }).observe(host);
}

// ---- distributions and time --------------------------------------------------------------------------------------

function columnsOf(items, most) {
  const stride = Math.ceil(items.length / most);
  return items.filter((_, i) => i % stride === 0);
}

/** Share of the samples of each step in each of 20 bins, as a heatmap. */
function heatmap(host, title, name) {
  const records = columnsOf(data.steps.filter((record) => record[name].length), 100);
  const values = records.flatMap((record) => record[name].map(([value]) => value));
  const low = Math.min(...values), high = Math.max(...values), distinct = [...new Set(values)].sort((a, b) => a - b);
  const count = low === high ? 1 : distinct.length <= 12 ? Math.max(2, Math.min(20, Math.round((high - low) / Math.min(...distinct.slice(1).map((v, i) => v - distinct[i]))) + 1)) : 20;
  const size = count > 1 ? (high - low) / (count - 1) : 1;
  const marks = distinct.length <= 6 ? distinct : null;
  const plot = axes(host, title, [0, records.length], [low - size / 2, high + size / 2], 190, marks);
  for (const text of plot.node.querySelectorAll("text[text-anchor=middle]")) text.remove();
  records.forEach((record, i) => {
    const bins = new Map(), total = record[name].reduce((sum, [, number]) => sum + number, 0);
    for (const [value, number] of record[name]) {
      const bin = Math.round((value - low) / size);
      bins.set(bin, (bins.get(bin) || 0) + number);
    }
    for (const [bin, number] of bins) {
      const middle = low + bin * size, x = plot.x(i), y = plot.y(middle + size / 2);
      const cell = svg("rect", {
        x, y, width: plot.x(i + 1) - x, height: plot.y(middle - size / 2) - y, "shape-rendering": "crispEdges",
        fill: `rgba(var(--pos), ${(0.06 + 0.94 * Math.sqrt(number / total)).toFixed(3)})`,
      });
      cell.addEventListener("pointermove", (event) => tip(event, `step ${record.step}\n${title} about ${short(middle)}: ${number} of ${total}`));
      plot.node.append(cell);
    }
  });
  for (const i of [0, records.length >> 1, records.length - 1].filter((v, k, list) => list.indexOf(v) === k))
    plot.node.append(svg("text", { x: plot.x(i + 0.5), y: plot.height - 6, "text-anchor": i === 0 && records.length > 1 ? "start" : i ? i === records.length - 1 ? "end" : "middle" : "middle" }, String(records[i].step)));
  plot.node.addEventListener("pointerleave", untip);
}

const share = (part, whole) => `${whole ? ((100 * part) / whole).toFixed(1) : 0} %`;

function drawTiming(host) {
  const { steps, operators, step_seconds: whole } = data.timing;
  const large = operators.filter((operator, i) => i < COLORS - 1 && operator.total > 0.005 * data.timing.total);
  const sums = steps.map((_, i) => large.reduce((sum, operator) => sum + operator.seconds[i], 0));
  const heights = steps.map((_, i) => Math.max(whole[i], sums[i])), ordered = [...heights].sort((a, b) => a - b);
  // the first step often loads and compiles: it must not flatten the others
  const usual = ordered[Math.floor(0.97 * (ordered.length - 1))] * 1.4, top = Math.min(ordered[ordered.length - 1], usual);
  const plot = axes(host, "seconds of each operator per step", [0, steps.length], [0, top], 230);
  for (const text of plot.node.querySelectorAll("text[text-anchor=middle]")) text.remove();
  steps.forEach((step, i) => {
    let base = 0;
    const column = svg("g", { class: "column" });
    const bar = (seconds, color) => {
      const y1 = plot.y(Math.min(base + seconds, top)), y0 = plot.y(Math.min(base, top));
      column.append(svg("rect", { x: plot.x(i) + 0.3, width: Math.max(plot.x(i + 1) - plot.x(i) - 0.6, 0.5), y: y1, height: Math.max(y0 - y1, 0), fill: color }));
      base += seconds;
    };
    large.forEach((operator, k) => bar(operator.seconds[i], `var(--c${k})`));
    bar(Math.max(whole[i] - sums[i], 0), "var(--c7)");
    column.addEventListener("pointermove", (event) => tip(event, [`step ${step}: ${short(whole[i])} s`, ...large.map((o) => `${o.name}: ${short(o.seconds[i])} s`), `other: ${short(Math.max(whole[i] - sums[i], 0))} s`].join("\n")));
    plot.node.append(column);
  });
  for (const [i, anchor] of [[0, "start"], [steps.length - 1, "end"]])
    plot.node.append(svg("text", { x: plot.x(i + (anchor === "end" ? 1 : 0)), y: plot.height - 6, "text-anchor": anchor }, `step ${steps[i]}`));
  plot.node.addEventListener("pointerleave", untip);
  return large;
}

function showTiming() {
  if (!data.timing.steps.length) return $("time").remove();
  const host = el("div"), card = el("div", { class: "card" }, host);
  $("timing").append(card);
  onWidth(host, () => drawTiming(host));
  const large = data.timing.operators.filter((operator, i) => i < COLORS - 1 && operator.total > 0.005 * data.timing.total);
  const legend = el("div", { class: "legend" });
  large.forEach((operator, k) => legend.append(el("span", {}, el("i", { style: `background: var(--c${k})` }), `${operator.name} ${share(operator.total, data.timing.total)}`)));
  const rest = Math.max(data.timing.total - large.reduce((sum, operator) => sum + operator.total, 0), 0);
  legend.append(el("span", {}, el("i", { style: "background: var(--c7)" }), `other ${share(rest, data.timing.total)}`));
  const testing = data.timing.testing ? `; validations took ${short(data.timing.testing)} s more` : "";
  card.append(legend, el("div", { class: "note" }, `seconds per step; all steps took ${short(data.timing.total)} s${testing}. With overlap, operators add up to more than the step.`));
}

/** When each rank of a step worked: one lane per process, one bar per call. */
function drawLanes(host, record, color) {
  const lanes = new Map();
  for (const call of record.calls) lanes.set(call[0], [...(lanes.get(call[0]) || []), call]);
  const name = (calls) => `${[...new Set(calls.map((call) => call[2]))].join("+")} ${calls[0][1]}`;
  const rows = [...lanes].sort((a, b) => name(a[1]).localeCompare(name(b[1]), undefined, { numeric: true }));
  const end = Math.max(...record.calls.map((call) => call[4] + call[5])) || 1, width = Math.max(host.clientWidth, 240), left = Math.min(170, width / 3), height = 24 * rows.length + 24;
  const x = (seconds) => left + (seconds / end) * (width - left - 28);
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "calls of each rank in a step" });
  for (const value of ticks(0, end, Math.min(6, width / 90))) {
    node.append(svg("line", { x1: x(value), x2: x(value), y1: 0, y2: height - 22, stroke: "var(--grid)" }));
    node.append(svg("text", { x: x(value), y: height - 6, "text-anchor": "middle" }, `${short(value)} s`));
  }
  rows.forEach(([process, calls], i) => {
    node.append(svg("text", { x: 0, y: 24 * i + 16 }, name(calls)));
    for (const [, rank, role, method, start, seconds] of calls) {
      const bar = svg("rect", { x: x(start), width: Math.max(x(start + seconds) - x(start), 1), y: 24 * i + 3, height: 18, fill: color(`${role}.${method}`) });
      bar.addEventListener("pointermove", (event) => tip(event, `${role}.${method}: ${short(seconds)} s, from ${short(start)} s\nrank ${rank}, ${process}`));
      node.append(bar);
    }
  });
  node.addEventListener("pointerleave", untip);
  host.append(node);
}

function showLanes() {
  const records = data.steps.filter((record) => record.calls?.length), totals = {};
  if (!records.length) return;
  for (const [, , role, method, , seconds] of records.flatMap((record) => record.calls)) totals[`${role}.${method}`] = (totals[`${role}.${method}`] || 0) + seconds;
  const names = Object.keys(totals).sort((a, b) => totals[b] - totals[a]), color = (name) => `var(--c${Math.min(names.indexOf(name), COLORS - 1)})`;
  const host = el("div"), legend = el("div", { class: "legend" }), value = el("output");
  const range = el("input", { type: "range", min: 0, max: records.length - 1, value: records.length - 1 });
  const draw = () => { host.replaceChildren(); value.textContent = String(records[range.value].step); drawLanes(host, records[range.value], color); };
  names.slice(0, COLORS - 1).forEach((name) => legend.append(el("span", {}, el("i", { style: `background: ${color(name)}` }), name)));
  if (names.length >= COLORS) legend.append(el("span", {}, el("i", { style: "background: var(--c7)" }), "other"));
  $("timing").append(el("div", { class: "card", id: "lanes" }, el("h3", {}, "Lanes of a step"), el("label", {}, "step ", range, " ", value), host, legend, el("div", { class: "note" }, "calls of each rank, by the clock of its host; gaps: the rank waits for others, or the controller works")));
  range.addEventListener("input", draw);
  onWidth(host, draw);
}

// ---- samples -----------------------------------------------------------------------------------------------------

/** What a token can be colored by: its value, and the legend. */
const COLORINGS = {
  "log-prob (rollout)": { value: (s, i) => s.rollout_log_probs?.[i], from: 0, to: -5, note: "0 to -5 and below" },
  "log-prob (trainer)": { value: (s, i) => s.log_probs?.[i], from: 0, to: -5, note: "0 to -5 and below" },
  "mismatch": { value: (s, i) => (s.log_probs && s.rollout_log_probs ? Math.abs(s.log_probs[i] - s.rollout_log_probs[i]) : undefined), from: 0, to: 0.2, note: "|trainer - rollout|: 0 to 0.2 and above" },
  "advantage": { value: (s, i) => s.advantages?.[i], signed: 2, note: "-2 to 2" },
  "KL to the reference": { value: (s, i) => s.ref_kl?.[i], from: 0, to: 1, note: "0 to 1 and above" },
  "value (critic)": { value: (s, i) => s.values?.[i], signed: 1, note: "-1 to 1" },
  "mask": { value: (s, i) => s.mask?.[i], from: 0, to: 1, note: "0: not sampled by the policy, such as tool output; 1: trained on" },
};

function background(coloring, value) {
  if (value === undefined || value === null) return "transparent";
  if (coloring.signed) {
    const strength = Math.min(Math.abs(value) / coloring.signed, 1);
    return `rgba(var(${value < 0 ? "--neg" : "--pos"}), ${(0.75 * strength).toFixed(3)})`;
  }
  const strength = Math.min(Math.max((value - coloring.from) / (coloring.to - coloring.from), 0), 1);
  return `rgba(var(--seq), ${(0.7 * strength).toFixed(3)})`;
}

const SHOWN_ABOVE = new Set(["input", "output", "images", "tokens", "mask", "rollout_log_probs", "log_probs", "advantages", "values", "ref_kl"]);

function sampleCard(sample, step) {
  const head = el("div", { class: "head" }, el("b", {}, `step ${step}`));
  for (const [name, value] of Object.entries(sample))
    if (!SHOWN_ABOVE.has(name) && name !== "uid" && name !== "step" && value !== null && value !== "") head.append(el("span", {}, `${name} `, el("b", {}, typeof value === "number" ? short(value) : shown(value))));
  const output = el("div", { class: "output" });
  if (sample.tokens) {
    sample.tokens.forEach((token, i) => {
      const span = el("span", { "data-i": i }, token === "" ? "\u2205" : token);
      if (sample.mask[i] === 0) span.className = "off";
      output.append(span);
    });
    if (sample.length > sample.tokens.length) output.append(el("span", { class: "note" }, ` … ${sample.length - sample.tokens.length} more tokens`));
    output.sample = sample;
    for (const kind of ["pointerover", "click"]) output.addEventListener(kind, (event) => describeToken(event, sample));
  } else output.append(sample.output);
  return el("div", { class: "card sample" }, head, ...thumbnails(sample), el("div", { class: "prompt" }, sample.input), output);
}

/** The images of a sample's prompt. */
function thumbnails(sample) {
  const images = (Array.isArray(sample.images) ? sample.images : []).filter((uri) => String(uri).startsWith("data:image/"));
  return images.map((src) => el("img", { src, alt: "image of the prompt", class: "thumbnail" }));
}

function describeToken(event, sample) {
  const i = event.target.dataset.i;
  if (i === undefined) return;
  const values = Object.entries(COLORINGS).map(([name, coloring]) => [name, coloring.value(sample, i)]).filter(([, value]) => value !== undefined && value !== null);
  $("token").textContent = [`token ${i} ${JSON.stringify(sample.tokens[i])}`, ...values.map(([name, value]) => `${name} ${short(value)}`)].join(" · ");
}

function paint() {
  const coloring = COLORINGS[$("color").value];
  if (!coloring) return;
  for (const output of document.querySelectorAll(".output"))
    if (output.sample) for (const span of output.querySelectorAll("[data-i]")) span.style.background = background(coloring, coloring.value(output.sample, span.dataset.i));
  const ramp = coloring.signed ? "rgba(var(--neg), .75), transparent, rgba(var(--pos), .75)" : "transparent, rgba(var(--seq), .7)";
  $("scale").replaceChildren(el("i", { style: `background: linear-gradient(to right, ${ramp})` }), coloring.note);
}

function browse() {
  const which = $("which").value, browser = $("browser");
  $("stepper").hidden = which !== "of a step";
  $("token").textContent = data.steps.length ? "Point at a token, or touch it, to see its values." : "";
  const index = Number($("step").value);
  const at = new Map(data.steps.map((record) => [record.step, record]));
  let chosen;
  if (which === "of a step") {
    $("step-value").textContent = String(data.steps[index].step);
    chosen = data.steps[index].samples.map((sample) => [sample, data.steps[index].step]);
  } else if (which === "of the last validation") chosen = data.validation.map((sample) => [sample, sample.step]);
  else chosen = data.extremes[which.split(" ")[0]].map(([step, i]) => [at.get(step).samples[i], step]);
  browser.replaceChildren(...chosen.map(([sample, step]) => sampleCard(sample, step)));
  paint();
}

function showSamples() {
  const kinds = [...(data.steps.length ? ["of a step", "best of the last quarter", "worst of the last quarter"] : []), ...(data.validation.length ? ["of the last validation"] : [])];
  if (!kinds.length) {
    $("controls").remove();
    $("token").remove();
    return $("browser").append(el("p", { class: "note" }, "No samples are recorded: trainer.log_tokens is 0, or this trainer records none."));
  }
  $("which").append(...kinds.map((kind) => el("option", {}, kind)));
  const samples = data.steps.flatMap((record) => record.samples);
  const present = Object.keys(COLORINGS).filter((name) => samples.some((sample) => sample.tokens.length && COLORINGS[name].value(sample, 0) !== undefined));
  $("color").append(...present.map((name) => el("option", {}, name)));
  $("step").max = data.steps.length - 1;
  $("step").value = data.steps.length - 1;
  for (const id of ["which", "step"]) $(id).addEventListener("input", browse);
  $("color").addEventListener("input", paint);
  browse();
}

// ---- tables ------------------------------------------------------------------------------------------------------

/** A text with line breaks allowed after dots, slashes and underscores. */
const breakable = (text) => text.split(/(?<=[._/])/).flatMap((part) => [el("wbr"), part]);

/** Rows of cells: texts, or lists of nodes. */
function table(head, rows) {
  const nodes = (cell) => (Array.isArray(cell) ? cell : breakable(cell));
  const body = rows.map((row) => el("tr", {}, ...row.map((cell, i) => el("td", i === 0 ? { class: "key" } : {}, ...nodes(cell)))));
  return el("table", {}, el("thead", {}, el("tr", {}, ...head.map((name) => el("th", {}, name)))), el("tbody", {}, ...body));
}

function showGroups() {
  const recent = data.steps.filter((record) => record.groups.examples.length).slice(-5).reverse();
  if (!data.steps.length) return $("groups").remove();
  const last = data.steps[data.steps.length - 1].groups;
  $("zero").append(el("p", {}, last.count ? `In the last recorded step, all responses have the same score in ${last.zero_variance} of ${last.count} groups. These groups have no advantage to learn from.` : "The last recorded step has no groups of several responses."));
  const row = (step, example) => [String(step), short(example.score), [...thumbnails(example), ...breakable(example.input.slice(-400))], example.output.slice(0, 400)];
  const rows = recent.flatMap((record) => record.groups.examples.map((example) => row(record.step, example)));
  if (rows.length) $("zero").append(el("div", { class: "card" }, table(["step", "score", "prompt", "one response"], rows)));
}

function showWarnings() {
  if (!data.warnings.length) return $("messages").append(el("p", { class: "note" }, "No warnings are recorded."));
  for (const warning of data.warnings) $("messages").append(el("div", { class: "message" }, `step ${warning.step} · ${warning.level} · ${warning.message}`));
}

function main() {
  document.title = data.title;
  $("title").textContent = data.title;
  const { state, ...rest } = data.about;
  $("about").append(el("span", { class: `badge ${state}` }, state), ` ${Object.entries(rest).map(([name, value]) => `${name}: ${value}`).join(" · ")} · written ${data.written}`);
  for (const [label, value, note] of data.tiles) $("tiles").append(el("div", {}, el("span", {}, label), el("b", {}, value), el("span", {}, note)));
  $("panels").append(...data.panels.map(panelCard));
  $("all").addEventListener("toggle", () => { if (!$("metrics").children.length) $("metrics").append(...data.metrics.map(panelCard)); });
  for (const [title, name] of [["score", "scores"], ["response length (tokens)", "lengths"]]) {
    const host = el("div");
    if (data.steps.some((record) => record[name].length)) {
      $("histograms").append(el("div", { class: "card" }, el("h3", {}, title), host, el("div", { class: "note" }, "share of the samples of each step; darker is more")));
      onWidth(host, () => heatmap(host, title, name));
    }
  }
  if (!$("histograms").children.length) $("distributions").remove();
  showTiming();
  showLanes();
  showSamples();
  showGroups();
  showWarnings();
  const changed = Object.entries(data.changed).map(([key, { value, default: plain }]) => [key, shown(value), shown(plain)]);
  $("changed").append(el("div", { class: "card" }, table(["setting", "value", "default"], changed)));
  $("config").append(el("div", { class: "card" }, table(["setting", "value"], Object.entries(data.config).map(([key, value]) => [key, shown(value)]))));
  if (data.command) {
    const packages = Object.entries(data.packages).map(([name, version]) => `${name} ${version}`).join(", ");
    $("reproduce").append(el("pre", {}, data.command), el("p", { class: "note" }, packages));
  } else $("reproduce").remove();
  for (const link of document.querySelectorAll("nav a")) if (!document.querySelector(link.getAttribute("href"))) link.remove();
}

main();
