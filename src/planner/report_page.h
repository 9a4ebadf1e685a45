// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The page that report_json.cc fills: DATA is replaced by one JSON object, TITLE by text. Nothing is loaded from
// anywhere. Kept together here, as one reads and changes it.
#pragma once

namespace cortado {

constexpr char kReportPage[] = R"html(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>TITLE</title>
<style>
:root { --ink: #1d2733; --quiet: #5c6b7a; --line: #d7dde3; --compute: #8d99a6; --codec: #d9822b; --copy: #b3a369; --link: #2b6cb0; --link2: #63a3dd; --good: #2f7d4f; }
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); margin: 0 auto; padding: 1rem; max-width: 76rem; }
h1 { font-size: 1.35rem; margin: 0 0 .2rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
p { margin: .3rem 0; } .quiet { color: var(--quiet); }
.numbers { display: flex; flex-wrap: wrap; gap: .5rem 1.8rem; margin: .8rem 0; }
.numbers div { min-width: 6.5rem; } .numbers b { display: block; font-size: 1.25rem; }
.scroll { overflow-x: auto; -webkit-overflow-scrolling: touch; }
svg { display: block; width: 100%; height: auto; font: 11px system-ui, sans-serif; }
svg rect.event:hover { stroke: #000; stroke-width: 1; }
.key span { display: inline-block; margin-right: 1rem; } .key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; vertical-align: -1px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: .25rem .5rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td button { font: inherit; border: 0; background: none; padding: 0; cursor: pointer; color: var(--link); text-decoration: underline dotted; }
tr.why td { background: #f4f6f8; } tr.why ul { margin: .1rem 0; padding-left: 1.1rem; }
th button { font: inherit; font-weight: 600; border: 0; background: none; padding: 0; cursor: pointer; color: inherit; }
th[aria-sort=ascending] button::after { content: " \25B2"; } th[aria-sort=descending] button::after { content: " \25BC"; }
td { overflow-wrap: anywhere; } td code { font-size: 12px; } td.name { min-width: 9rem; } td.what { white-space: nowrap; } td.codec { min-width: 8.5rem; }
tr.chosen { font-weight: 600; }
#tip { position: fixed; z-index: 9; max-width: min(26rem, 92vw); padding: .4rem .6rem; border-radius: 4px; background: #1d2733; color: #fff; font-size: 12px; white-space: pre-line; pointer-events: none; display: none; }
@media (max-width: 40rem) { body { padding: .6rem; } .wide { display: none; } td.codec { min-width: 5rem; } th, td { padding: .25rem .3rem; } .numbers { gap: .5rem 1.2rem; } }
@media print { body { max-width: none; padding: 0; font-size: 11px; } #tip { display: none !important; } .scroll { overflow: visible; } table { font-size: 10px; } td code { font-size: 9px; } h2 { break-after: avoid; } tr { break-inside: avoid; } }
</style>
</head>
<body>
<h1>TITLE</h1>
<p class="quiet" id="about"></p>
<div class="numbers" id="numbers"></div>
<div id="notes"></div>
<h2>One step</h2>
<p class="key quiet"><span><i style="background:var(--compute)"></i>computation</span><span><i style="background:var(--codec)"></i>compression</span><span><i style="background:var(--copy)"></i>copies</span><span><i style="background:var(--link)"></i><i style="background:var(--link2)"></i>links, buckets alternating</span></p>
<div id="timelines"></div>
<div id="compared" hidden><h2>Predicted and measured</h2>
<p class="quiet">Exchange: from the first encode or transfer of a step to the end of the last one, as a trace has no computation. Encode, decode: all of them together. Measured: the median over the steps of the trace.</p>
<div class="scroll"><table><thead><tr><th></th><th class="n">predicted, ms</th><th class="n">measured, ms</th><th class="n">off by</th></tr></thead><tbody></tbody></table></div></div>
<h2>Against other ways to choose</h2>
<div class="scroll"><table id="totals"><thead><tr><th>strategy</th><th class="n">step, ms</th><th class="n">times this plan</th></tr></thead><tbody></tbody></table></div>
<h2>Tensors</h2>
<p class="quiet">Gain: by how much the step would be longer, went the tensor's bucket uncompressed. Click a heading to sort, a bucket to see the best other way with each codec and why it is not taken.</p>
<div class="scroll"><table id="tensors"><thead><tr></tr></thead><tbody></tbody></table></div>
<div id="tip" role="tooltip"></div>
<noscript><p>This page draws its figures with JavaScript, which is switched off.</p></noscript>
<script id="data" type="application/json">DATA</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const ms = (ns, digits = 3) => ns < 0 ? "\u2013" : (ns / 1e6).toFixed(digits);
const signedMs = (ns) => ns === null ? "\u2013" : (ns / 1e6).toFixed(3);
const add = (parent, tag, text, attributes = {}) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return parent.appendChild(node);
};
const svgNode = (parent, tag, attributes, text) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return parent.appendChild(node);
};

document.getElementById("about").textContent = data.about;
for (const [name, value] of data.numbers) {
  const box = add(document.getElementById("numbers"), "div", name, {class: "quiet"});
  box.prepend(Object.assign(document.createElement("b"), {textContent: value}));
}
for (const note of data.notes) add(document.getElementById("notes"), "p", note, {class: "quiet"});

const tip = document.getElementById("tip");
const showTip = (event, text) => {
  tip.textContent = text;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 4)) + "px";
  tip.style.top = Math.max(4, event.clientY + 16 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 16) + "px";
};
document.addEventListener("click", (event) => { if (!event.target.classList.contains("event")) tip.style.display = "none"; });

// All timelines on one scale, so that lengths compare.
const longest = Math.max(...data.timelines.map((timeline) => timeline.step_ns), 1);
// One unit is one pixel at first, so that text is as large on a phone.
const left = 104, high = 18, width = Math.max(200, Math.min(1100, document.getElementById("timelines").clientWidth - left - 8));
const ticks = width < 400 ? 3 : 5;
for (const timeline of data.timelines) {
  const used = timeline.rows.map((name, row) => ({name, row})).filter(({row}) => timeline.events.some((event) => event[0] === row));
  const place = new Map(used.map(({row}, index) => [row, index]));
  add(document.getElementById("timelines"), "p", timeline.title + ": " + ms(timeline.step_ns) + " ms");
  const holder = add(document.getElementById("timelines"), "div", undefined, {class: "scroll"});
  const height = used.length * high + 20;
  const svg = svgNode(holder, "svg", {viewBox: "0 0 " + (left + width + 8) + " " + height, role: "img", "aria-label": timeline.title});
  const at = (ns) => left + ns / longest * width;
  for (const {name, row} of used) {
    svgNode(svg, "text", {x: left - 6, y: place.get(row) * high + 13, "text-anchor": "end", fill: "currentColor"}, name);
    svgNode(svg, "line", {x1: left, x2: left + width, y1: (place.get(row) + 1) * high, y2: (place.get(row) + 1) * high, stroke: "#d7dde3"});
  }
  for (const [row, start, end, bucket, name] of timeline.events) {
    const kind = timeline.kinds[row];
    const fill = kind === "link" ? (bucket % 2 ? "var(--link2)" : "var(--link)") : "var(--" + kind + ")";
    const rect = svgNode(svg, "rect", {class: "event", x: at(start).toFixed(2), y: place.get(row) * high + 2, width: Math.max((end - start) / longest * width, 0.4).toFixed(2), height: high - 4, fill, "fill-opacity": name === "forward" || name === "optimizer" ? 0.55 : 1});
    const text = name + (bucket >= 0 ? ", bucket " + bucket : "") + "\n" + ms(start) + " to " + ms(end) + " ms, " + ms(end - start) + " ms long" + (bucket >= 0 && timeline.labels[bucket] ? "\n" + timeline.labels[bucket] : "");
    rect.addEventListener("pointermove", (event) => showTip(event, text));
    rect.addEventListener("pointerdown", (event) => showTip(event, text));
    rect.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") tip.style.display = "none"; });
  }
  svgNode(svg, "line", {x1: at(timeline.step_ns), x2: at(timeline.step_ns), y1: 0, y2: used.length * high, stroke: "#b00020", "stroke-dasharray": "3 2"});
  for (let i = 0; i <= ticks; ++i) svgNode(svg, "text", {x: left + width * i / ticks, y: height - 4, "text-anchor": i === ticks ? "end" : "middle", fill: "#5c6b7a"}, ms(longest * i / ticks, 1) + (i === ticks ? " ms" : ""));
}

for (const [what, predicted, measured] of data.compared) {
  document.getElementById("compared").hidden = false;
  const row = add(document.querySelector("#compared tbody"), "tr");
  add(row, "td", what, {class: "what"});
  add(row, "td", ms(predicted), {class: "n"});
  add(row, "td", ms(measured), {class: "n"});
  const share = Math.round(100 * (predicted / measured - 1));
  add(row, "td", measured > 0 ? (share > 0 ? "+" : "") + share + " %" : "\u2013", {class: "n"});
}

const totals = document.querySelector("#totals tbody");
for (const [name, ns] of data.totals) {
  const row = add(totals, "tr", undefined, name === "this plan" ? {class: "chosen"} : {});
  add(row, "td", name);
  add(row, "td", ms(ns), {class: "n"});
  add(row, "td", ns < 0 ? "not possible here" : (ns / Math.max(data.step_ns, 1)).toFixed(3), {class: "n"});
}

// [heading, field, is a number, class, how to show]
const columns = [["tensor", "name", false, "name"], ["elements", "elems", true, "wide"], ["ready, ms", "ready_ns", true, "wide", ms], ["bucket", "bucket", true, ""], ["codec", "codec", false, "codec"], ["option", "option", false, "wide"], ["error", "error", true, "wide", (x) => x === null ? "\u2013" : x.toPrecision(2)], ["gain, ms", "gain_ns", true, "", signedMs], ["runner-up", "runner_up", false, "wide"], ["step longer by, ms", "runner_up_ns", true, "wide", signedMs]];
// The other ways of a tensor's bucket, as a row below it; again: gone.
const toggleWays = (row, button, bucket) => {
  const shown = button.getAttribute("aria-expanded") === "true";
  button.setAttribute("aria-expanded", String(!shown));
  if (shown) { row.nextSibling.remove(); return; }
  const below = document.createElement("tr");
  below.className = "why";
  row.after(below);
  const list = add(add(below, "td", undefined, {colspan: columns.length}), "ul");
  for (const [way, reason] of data.ways[bucket]) {
    const item = add(list, "li");
    add(item, "code", way);
    item.append(": " + reason);
  }
  if (data.ways[bucket].length === 0) add(list, "li", "no other way is known");
};
const head = document.querySelector("#tensors thead tr"), body = document.querySelector("#tensors tbody");
const fillTensors = () => {
  body.replaceChildren();
  for (const tensor of data.tensors) {
    const row = add(body, "tr");
    for (const [, field, isNumber, kind, show] of columns) {
      const cell = add(row, "td", undefined, {class: (isNumber ? "n " : "") + kind});
      const text = show ? show(tensor[field]) : isNumber ? tensor[field].toLocaleString("en") : tensor[field];
      if (field === "option" || field === "runner_up" || field === "name") add(cell, "code", text);
      else if (field === "bucket") {
        const button = add(cell, "button", text, {type: "button", "aria-expanded": "false", title: "how else, and why not"});
        button.addEventListener("click", () => toggleWays(row, button, tensor.bucket));
      } else cell.textContent = text;
    }
  }
};
for (const [title, field, isNumber, kind] of columns) {
  const heading = add(head, "th", undefined, {class: (isNumber ? "n " : "") + kind, scope: "col"});
  add(heading, "button", title, {type: "button"}).addEventListener("click", () => {
    const descending = heading.getAttribute("aria-sort") === "ascending" || (isNumber && !heading.hasAttribute("aria-sort"));
    for (const other of head.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    data.tensors.sort((a, b) => (descending ? -1 : 1) * (isNumber ? (a[field] ?? -1) - (b[field] ?? -1) : a[field] < b[field] ? -1 : a[field] > b[field] ? 1 : 0));
    fillTensors();
  });
}
fillTensors();
</script>
</body>
</html>
)html";

}  // namespace cortado
