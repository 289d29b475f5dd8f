// Draws a run from its summary (see batchwright.report.summary). No library, no build step.
// All text enters the page as text nodes, never as markup.
"use strict";
(() => {
const SVG = "http://www.w3.org/2000/svg";
const S = {main: null, other: null, pick: null, more: new Set(), hide: new Set(), open: new Set(),
  episode: null, bar: null, search: "", onlyInvalid: false, budget: null, edges: null, tables: false, drawn: {}};
const $ = (id) => document.getElementById(id);

// ---- elements and numbers

// Characters that turn the order of a line round, from anywhere in a run, are shown as escapes: the
// sentence around them stays as it is written here.
const TURNING = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const still = (text) => typeof text === "string" ? text.replace(TURNING, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0")) : text;
function add(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = still(value);
    else node.setAttribute(name, value === true ? "" : still(value));
  }
  node.append(...children.flat(9).filter((c) => c !== null && c !== undefined && c !== false).map(still));
  return node;
}
const el = (tag, attributes, ...children) => add(document.createElement(tag), attributes, children);
const sv = (tag, attributes, ...children) => add(document.createElementNS(SVG, tag), attributes, children);

function num(v) {
  if (v === null || v === undefined || !Number.isFinite(v)) return "–";
  if (Number.isInteger(v)) return v.toLocaleString("en-US");
  if (Math.abs(v) >= 1000) return v.toLocaleString("en-US", {maximumFractionDigits: 0});
  if (v !== 0 && Math.abs(v) < 1e-3) return v.toExponential(2);
  return v.toLocaleString("en-US", {maximumSignificantDigits: 4});
}
// What is not all is not shown as 100%.
const share = (v) => v === null || v === undefined || !Number.isFinite(v) ? "–" : (v < 1 && v >= 0.9995 ? "> 99.9" : (100 * v).toFixed(1)) + "%";
function secs(v) {
  if (v === null || v === undefined) return "–";
  if (v === 0) return "0 s";
  if (v < 1e-3) return (v * 1e6).toPrecision(3) + " µs";
  if (v < 1) return Number((v * 1e3).toPrecision(3)) + " ms";
  if (v < 60) return Number(v.toPrecision(3)) + " s";
  const whole = Math.round(v), h = Math.floor(whole / 3600), m = Math.floor(whole % 3600 / 60);
  return h ? `${h.toLocaleString("en-US")} h ${m} min` : `${m} min ${whole % 60} s`;
}
const formed = (v, form) => form === "share" ? share(v) : form === "signed" && v > 0 ? "+" + num(v) : num(v);
const sum = (list) => list.reduce((a, b) => a + (b || 0), 0);
const mean = (list) => { const f = list.filter((v) => v !== null && v !== undefined); return f.length ? sum(f) / f.length : null; };
const plural = (n, one, many) => `${num(n)} ${n === 1 ? one : many || one + "s"}`;

// ---- the selected steps

function range(s) {
  const steps = s.steps;
  if (!S.pick || !steps) return null;
  // The selection is by steps, so that it means the same in a second run.
  const [low, high] = S.pick;
  let a = 0, b = steps.last.length - 1;
  while (a < b && steps.last[a] < low) a++;
  while (b > a && steps.first[b] > high) b--;
  return {a, b, low: steps.first[a], high: steps.last[b], t0: a ? steps.t[a - 1] : 0, t1: steps.t[b]};
}
function inTime(t, r) { return !r || (t > r.t0 - 1e-9 && t <= r.t1 + 1e-9); }
function stepSum(s, name) {
  const r = range(s), list = s.steps.sums[name];
  return !list ? null : r ? sum(list.slice(r.a, r.b + 1)) : s.steps.totals[name];
}
function callSum(s, name) {
  const r = range(s), list = s.calls.sums[name];
  return !list ? null : r ? sum(list.filter((_, k) => inTime(s.calls.t[k], r))) : s.calls.totals[name];
}
function select(low, high) {
  const steps = S.main.steps;
  if (!steps) return;
  const first = steps.first[0], last = steps.last[steps.last.length - 1];
  if (low === null || (low <= first && high >= last)) S.pick = null;
  else S.pick = [Math.max(first, Math.min(low, high)), Math.min(last, Math.max(low, high))];
  draw();
}
function figure(s, cell) {
  if (!range(s)) return cell.value;
  const rate = (a, b) => b ? a / b : null;
  if (s.steps && "padded" in s.steps.sums) {
    if (cell.name === "useful tokens") return rate(stepSum(s, "tokens"), stepSum(s, "padded"));
    if (cell.name === "token ullage") return 1 - rate(stepSum(s, "tokens"), stepSum(s, "padded"));
    if (cell.name === "data wait") return rate(stepSum(s, "data_wait_s"), stepSum(s, "seconds"));
    if (cell.name === "tokens/s") return rate(stepSum(s, "tokens"), stepSum(s, "seconds"));
  }
  if (cell.name === "loss") { const r = range(s); return mean(s.steps.mean.loss.slice(r.a, r.b + 1)); }
  if (s.calls) {
    const ended = callSum(s, "done") + callSum(s, "failed");
    if (cell.name === "calls/s") return rate(callSum(s, "done"), callSum(s, "window_s"));
    if (cell.name === "cache hits") return rate(callSum(s, "hit"), ended);
    if (cell.name === "calls failed") return rate(callSum(s, "failed"), ended);
    if (cell.name === "call slots used") return Math.min(1, rate(callSum(s, "busy_s"), callSum(s, "room_s")));
  }
  return cell.value;
}

// ---- charts

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= raw) || power;
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return found;
}
// Labels of ticks: with as many digits as tell each from the next, no two alike.
function labels(values, form) {
  const steps = values.slice(1).map((v, k) => Math.abs(v - values[k])), step = Math.min(...steps, Infinity), most = Math.max(...values.map(Math.abs), 0);
  const short = (v, more) => {
    const [by, unit] = most >= 1e9 ? [1e9, "G"] : most >= 1e6 ? [1e6, "M"] : most >= 1e4 ? [1e3, "k"] : [1, ""];
    if (v && most < 1e-2) return v.toExponential(more);
    let digits = Number.isFinite(step) ? 0 : 2;
    while (Number.isFinite(step) && digits < 12 && Math.abs(step / by * 10 ** digits - Math.round(step / by * 10 ** digits)) > 1e-3) digits++;
    return (v / by).toLocaleString("en-US", {minimumFractionDigits: 0, maximumFractionDigits: Math.min(12, digits + more)}) + (v ? unit : "");
  };
  for (let more = 0; more < 9; more++) {
    const found = values.map((v) => (form || short)(v, more));
    const right = form || most >= 1e-2 || values.every((v, k) => Math.abs(Number(found[k]) - v) <= step * 0.01);
    if (right && (form || new Set(found).size === found.length)) return found.map((text, k) => text === found[k - 1] ? "" : text);
  }
  return values.map((v) => String(Number(v.toPrecision(12))));
}
function path(xs, ys, X, Y) {
  let d = "", on = false;
  for (let k = 0; k < xs.length; k++) {
    if (ys[k] === null || ys[k] === undefined) { on = false; continue; }
    d += (on ? "L" : "M") + X(xs[k]).toFixed(1) + " " + Y(ys[k]).toFixed(1);
    if (!on && (k + 1 >= xs.length || ys[k + 1] === null)) d += "h0.6";
    on = true;
  }
  return d;
}
function stairs(xs, ys, X, Y) {
  let d = "", last = null;
  for (let k = 0; k < xs.length; k++) {
    if (ys[k] === null || ys[k] === undefined) continue;
    d += last === null ? `M${X(xs[k]).toFixed(1)} ${Y(ys[k]).toFixed(1)}` : `H${X(xs[k]).toFixed(1)}V${Y(ys[k]).toFixed(1)}`;
    last = ys[k];
  }
  return d;
}
const marked = (values, form) => { const said = labels(values, form); return values.map((v, k) => [v, said[k]]); };
// Values without a neighbour: a line would not show them.
const alone = (s) => s.y.map((v, k) => k).filter((k) => known(s.y[k]) && !known(s.y[k - 1]) && !known(s.y[k + 1]));
const known = (v) => v !== null && v !== undefined;
// A chart of curves: series {name, x, y, low, high, c, stairs}; marks {x, y, text}.
function chart(key, o) {
  const W = o.wide && innerWidth > 600 ? 640 : 320, H = o.wide ? 150 : 128, L = 40, R = 8, T = 8, B = 20;
  const xs = o.series.flatMap((s) => s.x), ys = o.series.flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || [])]).filter((v) => v !== null && v !== undefined);
  const empty = !ys.length;
  let x0 = Math.min(...xs), x1 = Math.max(...xs), y0 = empty ? 0 : Math.min(...ys), y1 = empty ? 1 : Math.max(...ys);
  if (o.zero) y0 = Math.min(0, y0);
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (y0 === y1) { const gap = Math.abs(y0) * 0.1 || 1; y0 -= o.zero && y0 === 0 ? 0 : gap; y1 += gap; }
  const X = (v) => L + (v - x0) / (x1 - x0) * (W - L - R), Y = (v) => H - B - (v - y0) / (y1 - y0) * (H - B - T);
  const first = o.series[0], seen = first.y.filter(known);
  const ends = first.ends || [seen[0], seen[seen.length - 1], Math.min(...seen), Math.max(...seen)], told = o.shares ? share : o.form || num;
  const said = empty ? "no values" : `${plural(seen.length, "point")}, from ${told(ends[0])} to ${told(ends[1])}, lowest ${told(ends[2])}, highest ${told(ends[3])}`;
  const cross = sv("line", {class: "cross", y1: T, y2: H - B, visibility: "hidden"});
  const shade = sv("rect", {class: "pick", y: T, height: H - B - T, width: 0});
  const picked = o.brush && o.brush.now();
  if (picked) { shade.setAttribute("x", X(Math.max(x0, picked[0]))); shade.setAttribute("width", Math.max(2, X(Math.min(x1, picked[1])) - X(Math.max(x0, picked[0])))); }
  const body = sv("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", tabindex: 0, "data-key": key, "aria-label": `${o.title}: ${said}. Arrow keys read values.`},
    marked(ticks(y0, y1, 4), o.shares ? (v, more = 0) => Number((v * 100).toFixed(2)) + "%" : o.form).map(([v, text]) => [sv("line", {class: "grid", x1: L, x2: W - R, y1: Y(v), y2: Y(v)}), sv("text", {x: L - 5, y: Y(v) + 3.5, "text-anchor": "end", text})]),
    marked(ticks(x0, x1, o.wide ? 7 : 4).filter((v) => !o.whole || Number.isInteger(v)), o.time ? secs : null).map(([v, text]) => sv("text", {x: X(v), y: H - 5, "text-anchor": "middle", text})),
    shade,
    o.series.map((s) => s.low && sv("path", {class: `band ${s.c}`, d: path([...s.x, ...[...s.x].reverse()], [...s.high, ...[...s.low].reverse()], X, Y).replace(/(?!^)M/g, "L") + "Z"})),
    o.series.map((s) => sv("path", {class: `curve ${s.c}`, d: (s.stairs ? stairs : path)(s.x, s.y, X, Y)})),
    o.series.map((s) => alone(s).map((k) => sv("circle", {class: s.c + " alone", cx: X(s.x[k]), cy: Y(s.y[k]), r: 3}))),
    (o.marks || []).map((m) => sv("circle", {class: "c2", cx: X(Math.min(x1, Math.max(x0, m.x))), cy: Y(Math.min(y1, Math.max(y0, m.y))), r: 2}, sv("title", {text: m.text}))),
    cross);
  const near = (at) => { let best = 0; first.x.forEach((v, k) => { if (Math.abs(v - at) < Math.abs(first.x[best] - at)) best = k; }); return best; };
  const read = (k) => `${o.time ? secs(first.x[k]) : (o.unit || "step") + " " + num(first.x[k])}\n` + o.series.map((s) => {
    const j = s === first ? k : s.x.reduce((b, v, i) => Math.abs(v - first.x[k]) < Math.abs(s.x[b] - first.x[k]) ? i : b, 0);
    const spread = s.low && s.low[j] !== s.high[j] ? ` (${num(s.low[j])} to ${num(s.high[j])})` : "";
    return `${s.name} ${(o.shares ? share : o.form || num)(s.y[j])}${spread}`; }).join("\n");
  const point = (k, x, y) => { cross.setAttribute("x1", X(first.x[k])); cross.setAttribute("x2", X(first.x[k])); cross.setAttribute("visibility", "visible"); tip(read(k), x, y); };
  const value = (event) => { const box = body.getBoundingClientRect(); return x0 + ((event.clientX - box.left) / box.width * W - L) / (W - L - R) * (x1 - x0); };
  let from = null, here = first.x.length - 1;
  body.addEventListener("pointermove", (event) => {
    if (empty) return;
    point(near(value(event)), event.clientX, event.clientY);
    if (from !== null) { const a = X(Math.max(x0, Math.min(from, value(event)))), b = X(Math.min(x1, Math.max(from, value(event)))); shade.setAttribute("x", a); shade.setAttribute("width", Math.max(0, b - a)); }
  });
  body.addEventListener("pointerdown", (event) => { if (o.brush && event.button === 0) { from = value(event); body.setPointerCapture(event.pointerId); } });
  body.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const to = value(event), begun = from;
    from = null;
    if (Math.abs(X(to) - X(begun)) > 4) o.brush.set(Math.min(begun, to), Math.max(begun, to)); else if (S.pick) select(null);
  });
  body.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); tip(null); });
  body.addEventListener("keydown", (event) => {
    const move = {ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9}[event.key];
    if (!move || empty) return;
    event.preventDefault();
    here = Math.max(0, Math.min(first.x.length - 1, here + move));
    const box = body.getBoundingClientRect();
    point(here, box.left + X(first.x[here]) / W * box.width, box.top + 20);
    body.setAttribute("aria-label", still(`${o.title}: ${read(here).replace(/\n/g, ", ")}`));
  });
  body.addEventListener("blur", () => tip(null));
  return el("figure", null,
    el("figcaption", null, el("span", {text: o.title}), el("span", {class: "now", text: o.now === undefined ? "" : o.now})),
    o.series.length > 1 && legend(o.series.map((s) => [s.name, s.c])),
    body,
    table(`${key}-table`, `${o.title} as a table`, [o.time ? "time" : o.unit || "step", ...o.series.map((s) => s.name)],
      () => first.x.map((x, k) => [o.time ? secs(x) : num(x), ...o.series.map((s) => (o.shares ? share : o.form || num)(s.x === first.x ? s.y[k] : null))])));
}
const legend = (entries) => el("ul", {class: "legend"}, entries.map(([name, c]) => el("li", null, sv("svg", {viewBox: "0 0 22 8", "aria-hidden": "true"}, sv("path", {class: `curve ${c}`, d: "M0 4H22"})), name)));

// A table that is made when it is opened.
function table(key, title, heads, rows, open) {
  const holder = el("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": title});
  const fill = () => { if (!holder.firstChild) holder.append(grid(heads, rows())); };
  const box = el("details", {"data-key": key, open: open || S.open.has(key) || S.tables}, el("summary", {"aria-label": title, text: /as a table$/.test(title) ? "Table" : title}), holder);
  if (box.open) fill();
  box.addEventListener("toggle", () => { if (box.open) { S.open.add(key); fill(); } else S.open.delete(key); });
  return box;
}
function grid(heads, rows, here) {
  const right = heads.map((_, k) => rows.length > 0 && rows.every((row) => /^(≈ |> )?[-+–]?[\d.,]*\s?(%|s|ms|µs|min|h|x)?( \d+ (s|min))?$/.test(String(row[k]))));
  return el("table", null,
    el("thead", null, el("tr", null, heads.map((head, k) => el("th", {scope: "col", class: right[k] ? "n" : null, text: head})))),
    el("tbody", null, rows.map((row, n) => el("tr", {class: here === n ? "here" : null}, row.map((cell, k) => el("td", {class: right[k] ? "n" : null, text: cell}))))));
}
function tip(text, x, y) {
  const box = $("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = still(text);
  const w = box.offsetWidth, h = box.offsetHeight;
  box.style.left = Math.max(4, Math.min(innerWidth - w - 4, x + 14)) + "px";
  box.style.top = Math.max(4, Math.min(innerHeight - h - 4, y + 14)) + "px";
}
// Bars over bins: {labels, counts, text(k), on(k), lines:[{at, text}]}
function bars(key, o) {
  const W = innerWidth > 600 ? 480 : 320, H = 128, L = 40, R = 8, T = 10, B = 20, n = o.counts.length, top = Math.max(1, ...o.counts);
  const w = (W - L - R) / n, Y = (v) => H - B - v / top * (H - B - T);
  const body = sv("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", tabindex: 0, "data-key": key, "aria-label": `${o.title}. ${plural(sum(o.counts), "value")} in ${plural(n, "bin")}; the largest bin, ${o.text(o.counts.indexOf(top))}.`},
    marked(ticks(0, top, 3).filter(Number.isInteger)).map(([v, text]) => [sv("line", {class: "grid", x1: L, x2: W - R, y1: Y(v), y2: Y(v)}), sv("text", {x: L - 5, y: Y(v) + 3.5, "text-anchor": "end", text})]),
    o.counts.map((v, k) => sv("rect", {class: o.on && o.on(k) === false ? "cp" : "c1", x: L + k * w + 0.5, width: Math.max(0.8, w - 1), y: v ? Math.min(Y(v), H - B - 1) : H - B, height: v ? Math.max(1, H - B - Y(v)) : 0})),
    (o.lines || []).map((line) => [sv("line", {class: "edge", x1: L + line.at * w, x2: L + line.at * w, y1: T - 4, y2: H - B}), sv("text", {x: L + line.at * w + 3, y: T + 3, text: line.text})]),
    [0, Math.floor(n / 4), Math.floor(n / 2), Math.floor(3 * n / 4), n].filter((k, i, all) => all.indexOf(k) === i).map((k) => sv("text", {x: L + k * w, y: H - 5, "text-anchor": k === n ? "end" : "middle", text: o.labels(k)})));
  if (o.edges) {
    body.setAttribute("role", "group");
    body.append(...o.edges.values.map((_, k) => handle(key, o.edges, k, body, {W, H, L, R, T, B, X: (v) => L + Math.max(0, Math.min(n, o.edges.place(v))) * w, at: (x) => o.edges.length((x - L) / w)})));
  }
  let here = 0;
  const where = (event) => { const box = body.getBoundingClientRect(); return Math.floor(((event.clientX - box.left) / box.width * W - L) / w); };
  body.addEventListener("pointermove", (event) => { const k = where(event); tip(k >= 0 && k < n ? o.text(k) : null, event.clientX, event.clientY); });
  body.addEventListener("pointerleave", () => tip(null));
  body.addEventListener("blur", () => tip(null));
  if (o.click) body.addEventListener("click", (event) => { const k = where(event); if (k >= 0 && k < n) o.click(k); });
  body.addEventListener("keydown", (event) => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (event.key === "Enter" && o.click) o.click(here);
    if (!move) return;
    event.preventDefault();
    here = Math.max(0, Math.min(n - 1, here + move));
    const box = body.getBoundingClientRect();
    tip(o.text(here), box.left + (L + here * w) / W * box.width, box.top);
    body.setAttribute("aria-label", o.text(here));
  });
  return el("figure", null, el("figcaption", null, el("span", {text: o.title}), el("span", {class: "now", text: o.now || ""})), body,
    table(`${key}-table`, `${o.title} as a table`, o.heads, () => o.counts.map((v, k) => o.row(k))));
}

// An edge of a bucket that can be moved: dragged, or with the arrow keys.
function handle(key, edges, k, body, g) {
  const line = sv("line", {class: "edge", y1: g.T - 4, y2: g.H - g.B}), label = sv("text", {y: g.T + 3 + (k % 3) * 10}), grip = sv("circle", {r: 4, cy: g.H - g.B}), reach = sv("rect", {class: "reach", y: g.T - 4, width: 16, height: g.H - g.B - g.T + 12});
  const node = sv("g", {class: "handle", role: "slider", tabindex: 0, "data-key": `${key}-edge-${k}`, "aria-orientation": "horizontal"}, reach, line, grip, label);
  const show = () => {
    const v = edges.values[k], x = g.X(v), late = x > g.W - 40;
    for (const [name, value] of [["x1", x], ["x2", x]]) line.setAttribute(name, value);
    grip.setAttribute("cx", x); reach.setAttribute("x", x - 8);
    label.setAttribute("x", late ? x - 4 : x + 4); label.setAttribute("text-anchor", late ? "end" : "start"); label.textContent = num(v);
    const [low, high] = edges.between(k);
    for (const [name, value] of [["aria-label", `Edge ${k + 1} of ${edges.values.length} of the buckets`], ["aria-valuenow", v], ["aria-valuemin", low], ["aria-valuemax", high], ["aria-valuetext", `${num(v)} tokens, ${edges.text()}`]]) node.setAttribute(name, value);
  };
  const move = (v) => { const [low, high] = edges.between(k); edges.values[k] = Math.max(low, Math.min(high, Math.round(v))); edges.moved(); show(); };
  let held = false;
  node.addEventListener("pointerdown", (event) => { if (event.button === 0) { held = true; node.setPointerCapture(event.pointerId); event.stopPropagation(); event.preventDefault(); node.focus({preventScroll: true}); } });
  node.addEventListener("pointermove", (event) => {
    event.stopPropagation();
    const box = body.getBoundingClientRect();
    if (held) move(g.at((event.clientX - box.left) / box.width * g.W));
    tip(`edge at ${num(edges.values[k])} tokens\n${edges.text()}`, event.clientX, event.clientY);
  });
  // The one that was moved last lies on top, so that it can be moved back from over another.
  for (const name of ["pointerup", "pointercancel"]) node.addEventListener(name, () => { held = false; if (node.parentNode.lastChild !== node) { node.parentNode.append(node); node.focus({preventScroll: true}); } });
  node.addEventListener("click", (event) => event.stopPropagation());
  node.addEventListener("keydown", (event) => {
    const step = {ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -16, PageUp: 16}[event.key], ends = {Home: 0, End: 1}[event.key];
    if (step === undefined && ends === undefined) return;
    event.preventDefault(); event.stopPropagation();
    move(ends === undefined ? edges.values[k] + step * (event.shiftKey ? 16 : 1) : edges.between(k)[ends]);
  });
  show();
  return node;
}
// What buckets with these edges would give, from the lengths alone. Batches of a bucket are drawn at
// random from its samples, so a batch padded to its longest has an expected width.
function bucketed(p, edges, budget) {
  const fit = (v) => Math.ceil(v / p.width_multiple) * p.width_multiple, d = p.distinct, uppers = [...edges, Math.max(p.row_width, edges[edges.length - 1] || 0)];
  let useful = 0, padded = 0, batches = 0, from = 0;
  for (const upper of uppers) {
    let to = from, n = 0, tokens = 0;
    while (to < d.length.length && (d.length[to] <= upper || upper === uppers[uppers.length - 1])) { n += d.count[to]; tokens += d.tokens[to]; to++; }
    const size = Math.max(1, Math.floor(budget / fit(upper))), full = Math.floor(n / size), rest = p.drop_last ? 0 : n - full * size;
    const width = (m) => {
      if (p.pad_policy === "pad_to_bucket") return fit(upper);
      // Of m samples without replacement: the probability that none is longer than each length.
      let expected = 0, below = n, above = 1;
      for (let k = to - 1; k >= from && above > 1e-9; k--) {
        below -= d.count[k];
        let none = 1;
        for (let i = 0; i < m && none > 1e-12; i++) none *= Math.max(0, below - i) / (n - i);
        expected += (above - none) * fit(d.length[k]);
        above = none;
      }
      return expected;
    };
    if (n) {
      const kept = full * size + rest;
      useful += tokens * kept / n;
      padded += (full ? full * size * width(size) : 0) + (rest ? rest * width(rest) : 0);
      batches += full + (rest ? 1 : 0);
    }
    from = to;
  }
  return {efficiency: padded ? useful / padded : null, microbatches: batches, token_budget: budget};
}

// ---- panels

const KEYS = {plan: 1, packing: 2, steps: 3, ranks: 4, rollouts: 5, calls: 6};
const TITLES = {plan: "Plan", packing: "Packing", steps: "Steps", ranks: "Time and ranks", rollouts: "Rollouts", calls: "Calls"};
function panel(id, parts, why) {
  const box = $(id), title = el("h2", {id: `${id}-title`}, el("span", {class: "key", "aria-hidden": "true", text: KEYS[id]}), TITLES[id]);
  box.classList.toggle("absent", !parts);
  box.replaceChildren(title, ...(parts ? parts.flat(9).filter(Boolean) : [el("p", {text: why})]));
}
const lead = (...parts) => el("p", {class: "lead"}, parts);
const b = (text) => el("b", {text});

const noPlan = (s) => s.planning ? "is being worked out." : s.notes.some((note) => note.startsWith("The plan cannot be shown")) ? "cannot be shown; the note above says why." : "this run has no batch plan.";
function drawPlan(s, o) {
  const p = s.plan;
  if (!p) return panel("plan", null, noPlan(s));
  const h = p.histogram, place = (v) => (v - h.low) / h.step;
  const free = p.layout === "bucketed" && p.distinct && p.edges.length > 0;
  const lines = free ? [] : p.edges.filter((e) => e >= h.low && e < h.longest).map((e) => ({at: place(e + 1), text: num(e)}));
  if (!S.edges || S.edges.of !== p.fingerprint) S.edges = {of: p.fingerprint, values: [...p.edges]};
  const edges = S.edges.values, moved = () => edges.some((v, k) => v !== p.edges[k]);
  const other = o && o.plan;
  const about = (yes, text) => yes ? "≈ " + text : text;
  const layouts = p.layouts.map((row) => [row.layout, about(row.about, share(row.efficiency)), about(row.about, (row.cost / p.layouts[0].cost).toFixed(2))]);
  const here = p.layouts.findIndex((row) => row.layout === p.layout);
  if (S.budget === null || S.budget >= p.budgets.length) S.budget = Math.max(0, p.budgets.findIndex((row) => row.token_budget === p.token_budget));
  const perToken = s.steps && s.steps.totals.padded ? s.steps.totals.seconds / s.steps.totals.padded : null;
  const widest = p.layout === "packed" ? "pack_max_length" : "overflow_max";
  const budget = () => p.budgets[S.budget].token_budget, row = () => moved() ? bucketed(p, edges, budget()) : p.budgets[S.budget];
  const toml = () => `layout = "${p.layout}"\ntoken_budget = ${budget()}\n${widest} = ${p.row_width}` + (free ? `\nbucket_edges = [${edges.join(", ")}]` : "");
  const command = () => `batchwright data batchplan build --lengths lengths.jsonl --layout ${p.layout} --token-budget ${budget()} ${p.layout === "packed" ? "--pack-max-len" : "--overflow-max"} ${p.row_width}` + (free ? ` --bucket-edges ${edges.join(",")}` : "") + " --output batch_plan/";
  const result = el("output", {id: "whatif-result"}), code = el("pre", {id: "whatif-toml"}), line = el("pre", {id: "whatif-command"}), back = el("button", {type: "button", text: "Edges as planned", hidden: true, onclick: () => { S.edges = null; drawPlan(S.main, S.other); }});
  const tell = () => {
    // Other edges are estimated from the lengths alone, and compared with the same estimate of those planned.
    const found = row(), guess = moved() || (p.replanned < p.counts.planned_pieces && found.token_budget !== p.token_budget && p.layout !== "packed");
    const here = !moved() && found.token_budget === p.token_budget, useful = here ? p.efficiency : found.efficiency, batches = here ? p.microbatches : found.microbatches;
    result.replaceChildren(b(num(found.token_budget)), " tokens: ", b(about(guess, num(batches))), " microbatches per epoch, ", b(about(guess, share(useful))), " useful",
      moved() ? ` by estimate with edges ${edges.map(num).join(", ")}, against ≈ ${share(bucketed(p, p.edges, budget()).efficiency)} by the same estimate with those of the plan` : "",
      perToken === null ? "" : `, ≈ ${secs(p.useful_tokens / useful / batches * perToken)} each at the measured speed`);
    code.textContent = toml(); line.textContent = command(); back.hidden = !moved();
  };
  const slider = el("input", {type: "range", min: 0, max: p.budgets.length - 1, step: 1, value: S.budget, "data-key": "budget", "aria-label": "Token budget", "aria-valuetext": num(budget()), oninput: (event) => { S.budget = Number(event.target.value); event.target.setAttribute("aria-valuetext", num(budget())); tell(); }});
  const copies = [["Copy as TOML", toml, code], ["Copy as command", command, line]].map(([name, text, from]) => { const button = el("button", {type: "button", text: name, onclick: async () => {
    try { await navigator.clipboard.writeText(text()); button.textContent = "Copied"; setTimeout(() => { button.textContent = name; }, 1500); } catch { from.closest("details").open = true; getSelection().selectAllChildren(from); button.textContent = "Select and copy below"; }
  }}); return button; });
  const between = (k) => [(k ? edges[k - 1] : 0) + 1, (k + 1 < edges.length ? edges[k + 1] : p.row_width) - 1];
  const handles = free ? {values: edges, place: (v) => place(v + 1), length: (at) => h.low + at * h.step - 1, between, text: () => `≈ ${share(bucketed(p, edges, budget()).efficiency)} useful`, moved: () => tell()} : null;
  tell();
  panel("plan", [
    lead(b(num(p.samples)), " samples, ", b(num(p.useful_tokens)), " tokens an epoch, ", p.layout, ": ", b(num(p.microbatches)), ` microbatches of up to ${num(p.token_budget)} tokens (fewest possible ${num(p.bound)}), `, b(share(p.efficiency)), " useful",
      other ? el("span", {text: `; ${o.run}: ${num(other.microbatches)} microbatches, ${share(other.efficiency)}`}) : ""),
    p.skipped ? lead(b(num(p.skipped)), " samples are in no batch.") : null,
    bars("lengths", {title: "Samples by length in tokens", now: `median ${num(h.p50)}, 95% below ${num(h.p95)}, longest ${num(h.longest)}`, counts: h.samples, lines, edges: handles,
      labels: (k) => num(h.low + k * h.step), text: (k) => `${num(h.low + k * h.step)} to ${num(h.low + (k + 1) * h.step - 1)} tokens: ${plural(h.samples[k], "sample")}, ${num(h.tokens[k])} tokens`,
      heads: ["length", "samples", "tokens"], row: (k) => [`${num(h.low + k * h.step)} to ${num(h.low + (k + 1) * h.step - 1)}`, num(h.samples[k]), num(h.tokens[k])]}),
    p.buckets.length ? [el("h3", {text: "Useful tokens by bucket"}),
      el("div", {class: "scroll"}, grid(["bucket", "microbatches", "samples", "useful"], p.buckets.map((k) => [`${num(k.low)} to ${num(k.high)}`, num(k.microbatches), num(k.samples), share(k.useful / k.padded)])))] : null,
    el("h3", {text: free ? "What if: another token budget, other edges" : "What if: another token budget"}),
    free ? lead("Drag an edge in the chart, or move it with the arrow keys.") : null,
    el("div", {class: "whatif"}, slider, copies, back), el("p", {class: "lead"}, result), el("details", {"data-key": "toml", open: S.open.has("toml"), ontoggle: (event) => event.target.open ? S.open.add("toml") : S.open.delete("toml")}, el("summary", {text: "As TOML and as a command"}), code, line),
    el("h3", {text: "What if: another layout"}),
    el("div", {class: "scroll"}, grid(["layout", "useful", "compute"], layouts, here)),
    p.repacked < p.counts.planned_pieces ? lead(`What-ifs marked ≈ are worked out from an even sample of ${num(p.replanned)} of ${num(p.counts.planned_pieces)} pieces, packing from ${num(p.repacked)}.`) : null,
  ]);
}

function tone(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function drawPacking(s) {
  const p = s.plan;
  if (!p) return panel("packing", null, noPlan(s));
  const rows = p.packing.rows, canvas = el("canvas", {tabindex: 0, role: "img", "data-key": "packing-canvas",
    "aria-label": `Packing: ${plural(rows.length, "row")} of ${num(p.packing.width)} tokens, one block for each sample, the rest is padding. Arrow keys go from sample to sample, Enter shows one.`});
  const height = rows.length > 80 ? 3 : rows.length > 40 ? 5 : 9, gap = height > 3 ? 1 : 0;
  const boxes = [];
  const paint = () => {
    const width = canvas.clientWidth || 480, scale = devicePixelRatio || 1, tall = rows.length * (height + gap);
    canvas.width = width * scale; canvas.height = tall * scale; canvas.style.height = tall + "px";
    const c = canvas.getContext("2d");
    c.scale(scale, scale);
    const pad = tone("--pad"), dark = tone("--one"), light = tone("--six"), soft = tone("--four");
    boxes.length = 0;
    rows.forEach((row, n) => {
      const y = n * (height + gap), unit = width / p.packing.width;
      c.fillStyle = pad; c.fillRect(0, y, row.width * unit, height);
      let x = 0;
      row.lengths.forEach((length, k) => {
        const w = length * unit;
        c.fillStyle = k % 3 === 0 ? dark : k % 3 === 1 ? light : soft;
        c.fillRect(x, y, Math.max(0.5, w - (w > 3 ? 1 : 0)), height);
        boxes.push({x, y, w, row, n, k, item: row.items[k], length});
        x += w;
      });
    });
  };
  const about = (box) => `${p.packing.ids[box.item]}: ${plural(box.length, "token")}\nmicrobatch ${num(box.row.batch)}, row ${box.row.row}, ${share(sum(box.row.lengths) / box.row.width)} of the row used`;
  const find = (event) => { const r = canvas.getBoundingClientRect(), x = event.clientX - r.left, y = event.clientY - r.top; return boxes.find((k) => x >= k.x && x < k.x + k.w && y >= k.y && y < k.y + height + gap); };
  let at = -1;
  canvas.addEventListener("pointermove", (event) => { const box = find(event); tip(box ? about(box) : "padding", event.clientX, event.clientY); });
  canvas.addEventListener("pointerleave", () => tip(null));
  canvas.addEventListener("blur", () => tip(null));
  canvas.addEventListener("click", (event) => { const box = find(event); if (box) sample(s, box.item, about(box)); });
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && boxes[at]) { sample(s, boxes[at].item, about(boxes[at])); return; }
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key], jump = {ArrowUp: -1, ArrowDown: 1}[event.key];
    if (!move && !jump) return;
    event.preventDefault();
    if (move) at = Math.max(0, Math.min(boxes.length - 1, at + move));
    else { const row = (at < 0 ? -1 : boxes[at].n) + jump, found = boxes.findIndex((k) => k.n === row); if (found >= 0) at = found; }
    const r = canvas.getBoundingClientRect(), box = boxes[at];
    tip(about(box), r.left + box.x, r.top + box.y);
    canvas.setAttribute("aria-label", about(box));
  });
  const batches = new Set(rows.map((row) => row.batch)).size;
  panel("packing", [
    lead(batches < p.microbatches ? `Rows of ${num(batches)} of ${num(p.microbatches)} microbatches, spread over epoch 0; ` : "Every microbatch of epoch 0; ", "a block is a sample, the pale rest is padding. ", b(share(p.ullage)), " of all tokens is padding (ullage)."),
    canvas,
    chart("fill", {title: p.sampled < p.microbatches ? `Useful share of microbatches (${num(p.sampled)} of ${num(p.microbatches)})` : "Useful share of every microbatch", unit: "microbatch", shares: true, zero: true, wide: true,
      series: [{name: "useful", x: p.fill.map((k) => k[0]), y: p.fill.map((k) => k[1]), c: "c1"}]}),
    table("rows-table", "The rows with their samples", ["microbatch", "row", "samples (tokens)", "used"], () => rows.map((row) => [num(row.batch), num(row.row), row.items.map((item, k) => `${p.packing.ids[item]} (${row.lengths[k]})`).join(", "), share(sum(row.lengths) / row.width)])),
    el("div", {id: "sample", hidden: true, role: "status"}),
  ]);
  paint();
  new ResizeObserver(() => { if (canvas.isConnected) paint(); }).observe(canvas);
}
async function sample(s, item, where) {
  const box = $("sample");
  let found = (s.texts || {})[item];
  if (!found && !BOOT.runs && s.kind !== "plan") found = await ask("api/sample", {run: s.key, item});
  box.hidden = false;
  box.replaceChildren(el("p", {class: "lead", text: where}),
    found && found.text !== undefined ? el("pre", {text: found.text}) : el("p", {class: "lead", text: (found && found.error) || "The text of this sample is not in this file; open the run with batchwright view."}),
    found && found.cut ? el("p", {class: "lead", text: `${num(found.cut)} more characters are not shown.`}) : "",
    found && found.loss_tokens !== undefined ? el("p", {class: "lead", text: `${num(found.loss_tokens)} of ${plural(found.length, "token")} carry loss; shown as ${found.as}.`}) : "");
}

const FIRST = ["loss", "charts/episodic_return", "reward", "return", "eval: loss", "eval: mrr", "losses/approx_kl", "approx_kl", "losses/entropy", "entropy", "tokens_per_s", "charts/SPS", "grad_norm", "proved", "eval: proved", "losses/value_loss", "useful"];
const NEVER = new Set(["epoch", "padded", "tokens", "loss_tokens", "losses/minibatches", "charts/global_step"]);
const NAMES = {loss: "loss", tokens_per_s: "useful tokens per second", grad_norm: "gradient norm", lr: "learning rate", useful: "useful share of the batch", data_wait_s: "seconds waited for data", seconds: "seconds",
  "charts/episodic_return": "reward of an episode", "losses/approx_kl": "approximate KL", "losses/entropy": "entropy", "charts/SPS": "environment steps per second", "losses/value_loss": "value loss", "eval: mrr": "MRR on valid", "eval: loss": "loss on held-out samples", "eval: proved": "share proved, on valid"};
function metric(s, name) {
  if (!s) return null;
  const from = name.startsWith("eval: ") ? s.evals : s.steps, plainName = name.replace(/^eval: /, "");
  if (!from || !(plainName in from.mean)) return null;
  return {x: from.at || from.last, y: from.mean[plainName], low: from.low[plainName], high: from.high[plainName], ends: from.ends[plainName], newest: from.newest[plainName]};
}
const stepBrush = {now: () => { const r = S.main && range(S.main); return r ? [r.low, r.high] : null; }, set: (a, z) => select(a, z)};
function drawSteps(s, o) {
  const t = s.steps;
  if (!t && !s.evals) return panel("steps", null, s.kind === "plan" ? "a plan has no steps yet." : "no steps are recorded.");
  const unit = t ? t.unit : "step", r = range(s);
  const names = [...(t ? Object.keys(t.mean) : []), ...(s.evals ? Object.keys(s.evals.mean).map((n) => "eval: " + n) : [])].filter((n) => !NEVER.has(n));
  const usual = FIRST.filter((n) => names.includes(n)).slice(0, 8), shown = [...usual.filter((n) => !S.hide.has(n)), ...names.filter((n) => S.more.has(n) && !usual.includes(n))];
  const tiles = shown.map((name) => {
    const one = metric(s, name), two = metric(o, name);
    let now = num(one.newest);
    if (r && !name.startsWith("eval: ")) now = "mean " + num(mean(one.y.slice(r.a, r.b + 1)));
    const series = [{name: o ? s.run : NAMES[name] || name, ...one, c: "c1"}];
    if (two) { series.push({name: o.run, ...two, c: "c2"}); now += ` / ${num(two.newest)}`; }
    return chart("m-" + name, {title: NAMES[name] || name, now, unit, series, brush: stepBrush});
  });
  const toggle = (name) => (event) => {
    if (usual.includes(name)) { if (event.target.checked) S.hide.delete(name); else S.hide.add(name); }
    else if (event.target.checked) S.more.add(name); else S.more.delete(name);
    drawSteps(S.main, S.other);
  };
  const parts = t && Object.keys(t.parts).length > 1 ? lead("Parts: ", Object.entries(t.parts).map(([name, [a, z]]) => `${name} ${num(a)} to ${num(z)}`).join(", "), ".") : null;
  panel("steps", [
    t ? lead(t.times && sum(t.times.of) > t.rows ? [b(plural(sum(t.times.of), unit)), ` in ${plural(t.rows, "record")}`] : [b(plural(t.rows, unit)), " recorded"], t.width > 1 ? `; a point is the mean of ${num(t.width)}, the band their range` : "", ". Drag over a chart to select.") : null, parts,
    el("div", {class: "tiles"}, tiles),
    el("details", {"data-key": "metrics", open: S.open.has("metrics"), ontoggle: (event) => event.target.open ? S.open.add("metrics") : S.open.delete("metrics")}, el("summary", {text: `All ${names.length} metrics`}),
      el("div", {class: "filters"}, names.map((name) => el("label", null, el("input", {type: "checkbox", "data-key": "metric-" + name, checked: shown.includes(name), onchange: toggle(name)}), " " + name)))),
  ]);
}

function drawRanks(s) {
  const t = s.steps, times = t && t.times;
  if (!times) return panel("ranks", null, "no times of steps are recorded.");
  const r = range(s), unit = t.unit, cut = (list) => r ? list.slice(r.a, r.b + 1) : list;
  // Seconds per step: a point may be of several records, and a record of several episodes.
  const kinds = Object.entries(times.kinds).map(([name, sums], k) => [name, sums.map((v, i) => times.of[i] ? v / times.of[i] : null), `c${k + 1}`, sum(cut(sums))]);
  const total = sum(kinds.map((k) => k[3])), of = sum(cut(times.of));
  const slow = times.slowest.filter((row) => !r || (row[0] >= r.low && row[0] <= r.high)), worst = slow.slice(0, 10), some = r && worst.length < 10 && times.slowest.length < t.rows;
  const ranks = t.ranks.map((rank) => ({rank: rank.rank, padded: sum(cut(rank.padded)), wait: sum(cut(rank.data_wait_s))}));
  const most = Math.max(1, ...ranks.map((k) => k.padded)), all = sum(cut(t.rank_busiest));
  panel("ranks", [
    kinds.length > 1 && lead("Where the time of ", r ? "the selected " : "all ", unit + "s went: ", kinds.map(([name, , , spent], k) => [k ? ", " : "", name + " ", b(share(spent / total))]), ` of ${secs(total)}.`),
    chart("time", {title: `Seconds per ${unit}`, now: secs(total / of) + " on average", unit, zero: true, form: secs, wide: true, brush: stepBrush, series: kinds.map(([name, y, c]) => ({name, x: t.last, y, c}))}),
    ranks.length > 1 ? [el("h3", {text: "Tokens computed by each rank"}), lead("The most loaded rank sets the pace: ranks are idle ", b(share(all ? 1 - sum(ranks.map((k) => k.padded)) / ranks.length / all : 0)), " of the computation, by tokens."),
      el("div", {class: "scroll"}, el("table", null, el("thead", null, el("tr", null, ["rank", "", "tokens", "waited for data"].map((head, k) => el("th", {scope: "col", class: k > 1 ? "n" : null, text: head})))),
        el("tbody", null, ranks.map((k) => el("tr", null, el("td", {text: k.rank}), el("td", null, sv("svg", {viewBox: "0 0 200 8", "aria-hidden": "true"}, sv("rect", {class: "cp", width: 200, height: 8}), sv("rect", {class: "c1", width: 200 * k.padded / most, height: 8}))), el("td", {class: "n", text: num(k.padded)}), el("td", {class: "n", text: secs(k.wait)}))))))]
      : null,
    table("worst", some ? `The slowest ${unit}s, as far as they are among the ${num(times.slowest.length)} slowest of the run` : `The slowest ${unit}s`, [of > t.rows ? `${unit}s up to` : unit, ...kinds.map((k) => k[0])], () => worst.map((row) => [num(row[0]), ...row.slice(1).map(secs)])),
  ]);
}

// A proof as nested lists: a goal, by which rule or fact it holds, and the goals of the rule.
function branch(node, deep = 0) {
  if (typeof node === "string" && node) return el("ul", {class: "tree"}, el("li", {text: node}));
  if (!node || typeof node !== "object") return null;
  const kind = {fact: "fact", embedding: "fact", open: "left"}[node.by] || "rule";
  const item = el("li", null, el("span", {class: "goal", text: node.goal}), " ", el("span", {class: "by " + kind, text: node.by}), Array.isArray(node.children) && node.children.length ? node.children.map((child) => branch(child, deep + 1)) : null);
  return el("ul", {class: "tree", "aria-label": deep ? null : "Proof"}, item);
}
function drawRollouts(s) {
  const o = s.rollouts, r = range(s);
  if (!o && !s.windows.length) return panel("rollouts", null, s.kind === "plan" ? "a plan has no rollouts." : "no episodes are recorded.");
  const windows = s.windows.length ? table("windows", `${plural(s.windows.length, "window")} of samples from the stream`, ["window", "at", "buffer", "trained on", "evicted", "failed", "success rate"],
    () => s.windows.map((w) => [num(w.window), secs(w.t), num(w.buffer), num(w.trained_on), num(w.evicted), num(w.failed), share(w.success_rate)]), !o) : null;
  if (!o) return panel("rollouts", [windows]);
  const h = o.histogram, edges = h.edges;
  const inBar = (e) => S.bar === null || e.turns.some((t) => { const v = t.gain ?? t.reward; return v !== null && v !== undefined && v >= edges[S.bar] && (v < edges[S.bar + 1] || (S.bar === h.counts.length - 1 && v <= edges[S.bar + 1])); });
  const inRange = (e) => !r || !/^\d+$/.test(e.file) || (Number(e.file) >= r.low && Number(e.file) <= r.high);
  const words = S.search.toLowerCase();
  const found = [...o.shown].reverse().filter((e) => inBar(e) && inRange(e) && (!S.onlyInvalid || e.invalid) && (!words || JSON.stringify(e).toLowerCase().includes(words)));
  const chosen = found.find((e) => S.episode === `${e.file}/${e.env}/${e.episode}`);
  const state = (e) => e.invalid ? ["off", "invalid: not learnt from"] : e.reward > 0 ? ["up", "gained " + num(e.reward)] : e.reward < 0 ? ["down", "lost " + num(-e.reward)] : ["", "no gain"];
  panel("rollouts", [
    lead(b(num(o.episodes)), " episodes, ", b(num(o.turns)), " turns, ", b(num(o.invalid)), " of them invalid", Object.keys(o.reasons).length ? ` (${Object.entries(o.reasons).map(([why, n]) => `${why} ${num(n)}`).join(", ")})` : "", "; mean reward of valid turns ", b(num(o.mean_reward)), "."),
    o.envs.length ? [el("h3", {text: `${plural(o.envs.length, "environment")}: how the last episode of each went`}),
      el("ul", {class: "grid-envs", "aria-label": "Environments"}, o.envs.map((e) => el("li", {class: state(e)[0], title: `environment ${e.env}: ${state(e)[1]}, ${plural(e.episodes, "episode")}`, text: `environment ${e.env}: ${state(e)[1]}`}))),
      lead("square: gain or none; circle: loss; hatched: invalid")] : null,
    h.counts.length ? bars("rewards", {title: "Valid turns by reward", now: S.bar === null ? "click a bar to filter" : `filtered: ${num(edges[S.bar])} to ${num(edges[S.bar + 1])}`, counts: h.counts, on: (k) => S.bar === null || S.bar === k,
      labels: (k) => num(edges[k]), text: (k) => `${num(edges[k])} to ${num(edges[k + 1])}: ${plural(h.counts[k], "turn")}`, click: (k) => { S.bar = S.bar === k ? null : k; drawRollouts(S.main); },
      heads: ["reward", "turns"], row: (k) => [`${num(edges[k])} to ${num(edges[k + 1])}`, num(h.counts[k])]}) : null,
    el("h3", {text: o.shown.length < o.episodes ? `Episodes: the newest of ${num(o.episodes)}, and the newest with invalid turns` : "Episodes"}),
    el("div", {class: "filters"},
      el("input", {type: "search", placeholder: "Search", "aria-label": "Search episodes", "data-key": "search", value: S.search, oninput: (event) => { S.search = event.target.value; keep(() => drawRollouts(S.main)); }}),
      el("label", null, el("input", {type: "checkbox", "data-key": "only-invalid", checked: S.onlyInvalid, onchange: (event) => { S.onlyInvalid = event.target.checked; drawRollouts(S.main); }}), " with invalid turns"),
      el("span", {text: plural(found.length, "episode")})),
    el("div", {class: "scroll"}, el("table", null, el("thead", null, el("tr", null, ["episode", "question", "turns", "reward"].map((head, k) => el("th", {scope: "col", class: k > 1 ? "n" : null, text: head})))),
      el("tbody", null, found.slice(0, 200).map((e) => { const key = `${e.file}/${e.env}/${e.episode}`, go = () => { S.episode = S.episode === key ? null : key; keep(() => drawRollouts(S.main)); };
        return el("tr", {class: "open-row", onclick: go}, el("td", null, el("button", {type: "button", "data-key": "e-" + key, "aria-expanded": String(S.episode === key), "aria-label": `${Number(e.file) || e.file}, environment ${e.env}, episode ${e.episode}: ${e.question}`, text: `${Number(e.file) || e.file}, env ${e.env}`})), el("td", {text: e.question}), el("td", {class: "n", text: num(e.turns.length) + (e.invalid ? ` (${num(e.invalid)} invalid)` : "")}), el("td", {class: "n", text: num(e.reward)})); })))),
    chosen ? el("ol", {class: "turns", "aria-label": "Transcript"}, chosen.turns.map((t) => el("li", {class: t.invalid ? "invalid" : null},
      el("div", {class: "meta", text: [t.proof ? (t.proved ? t.right ? "proved, the right answer" : "proved, another answer" : "not proved") : `turn ${t.step ?? ""}`, t.operator, t.depth === undefined ? null : plural(t.depth, "step"), t.score === undefined ? null : `score ${num(t.score)}`, `reward ${num(t.gain ?? t.reward)}`, t.why ? `${t.invalid ? "invalid, not learnt from" : "note"}: ${t.why}` : null].filter(Boolean).join(" · ")}),
      [t.wording, t.prompt].filter(Boolean).map((text) => el("p", {text: String(text)})), branch(t.proof), [["answer: ", t.answer], ["answer: ", t.response], ["expected: ", t.expected]].filter(([, text]) => text).map(([what, text]) => el("p", null, el("span", {class: "meta", text: what}), String(text)))))) : null,
    windows,
  ]);
}

function drawCalls(s, o) {
  const c = s.calls;
  if (!c) return panel("calls", null, s.kind === "plan" ? "a plan makes no calls." : "this run made no calls.");
  const r = range(s), inside = c.t.map((t) => inTime(t, r)), cut = (list) => list.filter((_, k) => inside[k]), t = cut(c.t);
  const per = (name) => cut(c.sums[name].map((v, k) => c.sums.window_s[k] ? v / c.sums.window_s[k] : null));
  const total = (name) => callSum(s, name) ?? 0, ended = total("done") + total("failed");
  const limits = c.limits.filter((k) => inTime(k.t, r));
  const timeBrush = s.steps ? {now: () => r ? [r.t0, r.t1] : null, set: (x, y) => { const k = s.steps.t.map((v, i) => v >= x && v <= y ? i : -1).filter((i) => i >= 0); if (k.length) select(s.steps.first[k[0]], s.steps.last[k[k.length - 1]]); }} : null;
  const endpoints = [...new Set(limits.map((k) => k.endpoint))];
  const level = [{name: "in flight", x: t, y: cut(c.mean.in_flight || []), c: "c1"}];
  if (c.mean.limit) level.push({name: "limit", x: t, y: cut(c.mean.limit), c: "c2", stairs: true});
  else if (limits.length) level.push({name: "limit", x: [limits[0].t, ...limits.map((k) => k.t)], y: [limits[0].from, ...limits.map((k) => k.to)], c: "c2", stairs: true});
  const rates = [["answered", "done", "c1"], ["from the cache", "hit", "c3"], ["retried", "retry", "c4"], ["failed", "failed", "c2"]].filter(([, name]) => name in c.sums && (name === "done" || total(name)));
  const quantiles = [["p50", "c1"], ["p95", "c3"], ["p99", "c2"]].filter(([name]) => name in c.mean);
  const cost = c.cost ? [", cost ", b(num(c.cost))] : "";
  const failed = Object.entries(c.failed_by), errors = Object.entries(c.errors);
  panel("calls", [
    lead(b(num(ended)), " calls ended: ", b(num(total("done"))), " answered, ", b(num(total("hit"))), " of them from the cache, ", b(num(total("dedup"))), " shared with an equal one, ", b(num(total("retry"))), " retries, ", b(num(total("failed"))), " failed", c.totals.again ? [", ", b(num(c.totals.again)), " failed and were made again"] : "", c.totals.cancelled ? [", ", b(num(c.totals.cancelled)), " cancelled"] : "", cost, ".",
      o && o.calls ? ` ${o.run}: ${num(o.calls.totals.done)} answered, ${num(o.calls.totals.failed)} failed.` : ""),
    t.length ? el("div", {class: "tiles"},
      chart("level", {title: "Calls in flight and limit", now: `${num(c.newest.in_flight)} in flight`, time: true, zero: true, series: level, brush: timeBrush, marks: endpoints.length < 2 ? limits.map((k) => ({x: k.t, y: k.to, text: `${k.from} to ${k.to}: ${k.why}`})) : []}),
      chart("rate", {title: "Calls per second", now: `${num(total("window_s") ? total("done") / total("window_s") : null)} answered`, time: true, zero: true, brush: timeBrush, series: rates.map(([name, key, cls]) => ({name, x: t, y: per(key), c: cls}))}),
      quantiles.length ? chart("latency", {title: "Latency", now: `median ${secs(c.newest.p50)}`, time: true, zero: true, form: secs, brush: timeBrush, series: quantiles.map(([name, cls]) => ({name, x: t, y: cut(c.mean[name]), c: cls}))}) : null) : lead("No calls in the selected steps."),
    c.limit_changes ? table("limits", `${plural(c.limit_changes, "change")} of the limit: ${Object.entries(c.reasons).map(([why, n]) => `${why} ${num(n)}`).join(", ")}`, ["at", "endpoint", "from", "to", "why"], () => limits.map((k) => [secs(k.t), k.endpoint, num(k.from), num(k.to), k.why])) : null,
    failed.length ? [el("h3", {text: c.totals.again ? "Failed calls by kind, with those that were made again" : "Failed calls by kind"}), grid(["kind", "calls"], failed.map(([k, n]) => [k, num(n)]))] : null,
    errors.length ? [el("h3", {text: "Most frequent errors"}), grid(["error", "calls"], errors.map(([k, n]) => [k, num(n)]))] : null,
  ]);
}

// ---- the page

const coded = (text) => text.split("`").map((part, k) => k % 2 ? el("code", {text: part}) : part);
function drawTop(s, o) {
  $("name").textContent = still(s.run + (o ? ` compared with ${o.run}` : ""));
  document.title = still(`${s.run} · batchwright`);
  const p = s.progress, at = p.at === null ? "" : ` · ${p.unit} ${num(p.at)}${p.of ? ` of ${num(p.of)}` : ""}`;
  $("state").dataset.state = s.state.name;
  $("state").replaceChildren(el("span", {class: "dot", "aria-hidden": "true"}), still(`${s.state.text}${s.kind === "plan" ? "" : ` · ${s.kind}${at} · ${secs(p.seconds)}`}${s.read < 1 ? ` · reading, ${share(s.read)}` : ""}`));
  const others = new Map((o ? o.strip : []).map((cell) => [cell.name, cell]));
  $("strip").replaceChildren(...s.strip.map((cell) => {
    const value = figure(s, cell), two = others.get(cell.name), low = /ullage|wait|failed/.test(cell.name);
    const bar = el("i", {class: low ? "low" : null});
    if (cell.form === "share") bar.style.width = 100 * Math.max(0, Math.min(1, value || 0)) + "%";
    return el("li", null, el("a", {href: "#" + cell.panel, title: cell.hint, "data-key": "cell-" + cell.name}, el("span", {class: "what", text: cell.name}), el("span", {class: "figure", "data-figure": cell.name, text: formed(value, cell.form)}),
      two ? el("span", {class: "versus", text: `${o.run}: ${formed(figure(o, two), two.form)}`}) : null, cell.form === "share" ? el("span", {class: "bar", "aria-hidden": "true"}, bar) : null));
  }));
  $("strip").hidden = !s.strip.length;
  $("notes").replaceChildren(...s.notes.map((text) => el("p", {class: "note", role: "note", text})));
  $("advice").replaceChildren(el("h2", {id: "advice-title", text: "Advice"}), s.advice.length ? el("ul", null, s.advice.map((a) => el("li", null, el("a", {href: "#" + a.panel, text: a.seen}), " ", el("span", {class: "do"}, coded(a.do)))))
    : el("span", {class: "do", text: s.kind === "plan" || s.steps || s.calls ? "Nothing stands out." : "Nothing to say yet."}));
}
function drawBrush(s) {
  const box = $("brush"), t = s.steps;
  box.hidden = !t || t.last.length < 3;
  if (box.hidden) return;
  const r = range(s), end = t.last.length - 1, a = r ? r.a : 0, z = r ? r.b : end;
  const slide = (which) => (event) => { const v = Number(event.target.value); keep(() => which ? select(t.first[Math.min(a, v)], t.last[v]) : select(t.first[v], t.last[Math.max(z, v)])); };
  const input = (label, value, which) => el("label", null, label + " ", el("input", {type: "range", min: 0, max: end, value, "data-key": "brush-" + label, "aria-valuetext": `${t.unit} ${num(which ? t.last[value] : t.first[value])}`, onchange: slide(which)}));
  box.replaceChildren(...[el("span", {role: "status"}, r ? ["Selected: ", b(`${t.unit}s ${num(r.low)} to ${num(r.high)}`)] : [`All ${t.unit}s`]), input("from", a, 0), input("to", z, 1),
    r ? el("button", {type: "button", text: "Select all", "data-key": "brush-all", onclick: () => keep(() => select(null))}) : null].filter(Boolean));
}
function drawFoot(s) {
  const v = s.stamp.versions || {}, facts = [s.stamp.batchwright && `batchwright ${s.stamp.batchwright}`, s.stamp.python && `Python ${s.stamp.python}`, v.torch && `torch ${v.torch}`, s.stamp.system, s.stamp.commit && `commit ${s.stamp.commit.slice(0, 10)}`, s.stamp.seed !== undefined && `seed ${s.stamp.seed}`, s.plan && `plan ${s.plan.fingerprint.slice(0, 16)}`].filter(Boolean).join(" · ");
  const lines = Object.entries(s.config).map(([name, value]) => `${name} = ${JSON.stringify(value)}`).join("\n");
  $("foot").replaceChildren(el("div", {text: facts}), lines ? el("details", {"data-key": "config", open: S.open.has("config"), ontoggle: (event) => event.target.open ? S.open.add("config") : S.open.delete("config")}, el("summary", {text: "Settings as TOML"}), el("pre", {text: lines})) : "");
}
// Redraw, and give the focus back to what had it.
function keep(work) {
  const active = document.activeElement, key = active && active.dataset ? active.dataset.key : null, caret = active && active.type === "search" ? active.selectionStart : null;
  work();
  if (!key || (document.activeElement && document.activeElement.dataset.key === key)) return;
  const again = [...document.querySelectorAll("[data-key]")].find((node) => node.dataset.key === key);
  if (again) { again.focus({preventScroll: true}); if (caret !== null) again.setSelectionRange(caret, caret); }
}
function draw(all = true) {
  const s = S.main, o = S.other;
  if (!s) return;
  keep(() => {
    drawTop(s, o);
    drawBrush(s);
    // What did not change is left as it stands: opened tables, a tip, a selection of text.
    const parts = {plan: [drawPlan, s.plan, o && o.plan], packing: [drawPacking, s.plan], steps: [drawSteps, s.steps, s.evals, o && o.steps], ranks: [drawRanks, s.steps], rollouts: [drawRollouts, s.rollouts, s.windows], calls: [drawCalls, s.calls, o && o.calls]};
    for (const [id, [render, ...on]] of Object.entries(parts)) {
      const now = JSON.stringify([s.run, o && o.run, s.planning, on]);
      if (all && !["plan", "packing"].includes(id) || S.drawn[id] !== now) render(s, o);
      S.drawn[id] = now;
    }
    drawFoot(s);
    // One of two neighbours alone takes the whole line.
    for (const [id, beside] of [["ranks", "rollouts"], ["rollouts", "ranks"]]) $(id).classList.toggle("wide", $(beside).classList.contains("absent"));
  });
  document.body.dataset.ready = s.read >= 1 && !s.planning ? "yes" : "partly";
}
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  S.drawn = {};
  draw();
}

const BOOT = JSON.parse(($("data") || {textContent: "{}"}).textContent || "{}");
async function ask(path, query) {
  try {
    const answer = await fetch(path + (query ? "?" + new URLSearchParams(query) : ""), {cache: "no-store"});
    const found = await answer.json();
    return answer.ok ? found : {error: found.error || answer.statusText};
  } catch { return {error: "The server does not answer; is batchwright view still running?"}; }
}
function say(text) { $("notes").replaceChildren(el("p", {class: "note", role: "alert", text})); }

// What is shown while a run is read, and instead of one that cannot be: never another's figures.
function blank(text) {
  S.drawn = {};
  for (const id of ["name", "strip", "notes", "advice", "foot"]) $(id).replaceChildren();
  $("strip").hidden = $("brush").hidden = true;
  $("state").dataset.state = "none";
  $("state").replaceChildren(text);
  document.title = "batchwright";
  for (const id of Object.keys(KEYS)) panel(id, null, "");
  document.body.dataset.ready = "no";
}
// Draw, or say why not.
function show(all) {
  try { draw(all); } catch (error) { S.main = null; blank("cannot be shown"); say(`This run cannot be drawn: ${error.message}`); throw error; }
}

const streams = {}, timers = {};
function stop(slot) {
  if (streams[slot]) streams[slot].close();
  clearTimeout(timers[slot]);
  delete streams[slot];
}
// Follow a run: by a stream while it is live and the server has one for us, else by asking again.
function follow(slot, key, seen = "") {
  stop(slot);
  if (!key) { S[slot] = null; S.drawn = {}; show(); return; }
  const source = new EventSource("api/events?" + new URLSearchParams({run: key, seen}));
  let newest = seen;
  streams[slot] = source;
  source.addEventListener("summary", (event) => {
    const found = JSON.parse(event.data), before = S[slot];
    newest = event.lastEventId;
    // The plan is sent once; it does not change while a run is trained.
    if (found.plan === "same") found.plan = before && before.plan;
    found.key = key;
    const first = !before || before.key !== key;
    S[slot] = found;
    if (first && slot === "main") S.pick = null;
    show(first);
  });
  source.addEventListener("ask", (event) => { stop(slot); timers[slot] = setTimeout(() => follow(slot, key, newest), 1000 * JSON.parse(event.data).after_s); });
  source.addEventListener("end", () => stop(slot));
  source.addEventListener("gone", (event) => { stop(slot); lost(slot, JSON.parse(event.data).error); });
  source.onopen = () => { if (S.silent) { S.silent = false; show(false); } };
  source.onerror = () => {
    if (source.readyState === 2) lost(slot, "The server refused this run; reload the page, or choose another.");
    else { S.silent = true; say("The server does not answer; is batchwright view still running? The page goes on asking."); }
  };
}
function lost(slot, text) {
  if (slot === "main" && !S.main) blank("cannot be shown");
  if (slot === "other") { S.other = null; S.drawn = {}; show(); }
  say(text);
}
function choose(slot, key) {
  S[slot] = null;
  if (slot === "main") blank("reading ...");
  follow(slot, key);
}
function address(run, other) {
  const query = new URLSearchParams({run});
  if (other) query.set("other", other);
  history.replaceState(null, "", "?" + query + location.hash);
}
const AGAIN_MS = 3000;
let listed = "";
// The runs of the folder, which grow while the page is open.
async function list() {
  const found = await ask("api/runs");
  if (found.error) { if (!S.main) say(found.error); return null; }
  const now = JSON.stringify(found.runs);
  if (now !== listed) {
    listed = now;
    const option = (r) => el("option", {value: r.key, text: r.name}), run = $("run").value, other = $("other").value;
    $("run").replaceChildren(...found.runs.map(option));
    $("other").replaceChildren(el("option", {value: "", text: "nothing"}), ...found.runs.map(option));
    $("run").value = run; $("other").value = other;
    $("pick-run").hidden = $("pick-other").hidden = found.runs.length < 2;
  }
  return found.runs.map((r) => r.key);
}
async function live() {
  const known = await list(), asked = new URLSearchParams(location.search), wanted = asked.get("run");
  const later = () => setTimeout(live, AGAIN_MS);
  if (!known) return later();
  if (!known.length) { say("There is no run in this folder yet; it is shown here when one has started."); return later(); }
  $("run").onchange = () => { address($("run").value, $("other").value); choose("main", $("run").value); };
  $("other").onchange = () => { address($("run").value, $("other").value); choose("other", $("other").value); };
  $("other").value = known.includes(asked.get("other")) ? asked.get("other") : "";
  const there = wanted === null || known.includes(wanted);
  $("run").value = there ? wanted ?? known[0] : "";
  if (!there) { blank("nothing is shown"); $("pick-run").hidden = false; say(`There is no run ${wanted} in this folder; choose another.`); }
  else choose("main", $("run").value);
  if ($("other").value) choose("other", $("other").value);
  setInterval(() => { if (!document.hidden) list(); }, AGAIN_MS);
  // A tab that nobody looks at needs no connection, of which browsers allow six to a server.
  document.addEventListener("visibilitychange", () => {
    for (const slot of ["main", "other"]) { const key = $(slot === "main" ? "run" : "other").value; if (document.hidden) stop(slot); else if (key) follow(slot, key); }
  });
}
addEventListener("beforeprint", () => { S.theme = document.documentElement.dataset.theme; if (S.theme === "dark") setTheme("light"); });
addEventListener("afterprint", () => { if (S.theme === "dark") setTheme("dark"); });

function shift(by, grow) {
  const t = S.main && S.main.steps;
  if (!t) return;
  const r = range(S.main) || {a: 0, b: t.last.length - 1}, end = t.last.length - 1, size = r.b - r.a;
  let a = r.a, z = r.b;
  if (grow) { const d = Math.max(1, Math.round((size + 1) / 4)) * grow; a = Math.max(0, a - d); z = Math.min(end, z + d); if (a > z) a = z = Math.round((r.a + r.b) / 2); }
  else { const d = Math.max(1, Math.round((size + 1) / 4)) * by; a = Math.max(0, Math.min(end - size, a + d)); z = a + size; }
  select(t.first[a], t.last[z]);
}
document.addEventListener("keydown", (event) => {
  const typing = event.target.matches && event.target.matches("input[type=search], select");
  if (event.ctrlKey || event.metaKey || event.altKey || (typing && event.key !== "Escape")) return;
  const id = Object.keys(KEYS).find((name) => String(KEYS[name]) === event.key);
  if (id) { $(id).scrollIntoView(); $(id).focus({preventScroll: true}); }
  else if (event.key === "[") shift(-1);
  else if (event.key === "]") shift(1);
  else if (event.key === "+" || event.key === "=") shift(0, -1);
  else if (event.key === "-") shift(0, 1);
  else if (event.key === "Escape") { tip(null); $("keys").hidden = true; $("help").setAttribute("aria-expanded", "false"); S.bar = S.episode = null; S.pick = null; draw(); }
  else if (event.key === "t") { S.tables = !S.tables; if (!S.tables) S.open.clear(); S.drawn = {}; draw(); }
  else if (event.key === "d") $("theme").click();
  else if (event.key === "?") $("help").click();
});
$("theme").addEventListener("click", () => { const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; try { localStorage.setItem("theme", next); } catch { /* a file has no storage in some browsers */ } setTheme(next); });
$("help").addEventListener("click", () => { const keys = $("keys"); keys.hidden = !keys.hidden; $("help").setAttribute("aria-expanded", String(!keys.hidden)); });
let wanted = null;
try { wanted = localStorage.getItem("theme"); } catch { /* as above */ }
setTheme(wanted || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
if (BOOT.runs) { [S.main, S.other] = [BOOT.runs[0], BOOT.runs[1] || null]; draw(); } else live();
})();
