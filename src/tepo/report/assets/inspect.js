"use strict";
// The token view: rows are drawn when they come near the screen, and given up when they are far from it.

const byId = (id) => document.getElementById(id);
const state = { colour: objectives.length ? "weight" : "surprise", objective: 0, beside: false, columns: new Set(objectives.keys()), now: null };

let start = 0;
const rows = data.rows.map((row, index) => {
  const from = start;
  start += row.tokens;
  let sum = 0;
  for (let at = from; at < start; at += 1) sum += fields.entropy[at];
  const pieces = Array.from({ length: row.tokens }, (_, place) => row.joined?.[place] ?? data.texts[ids[from + place]]);
  return { ...row, index, from, pieces, entropy: sum / Math.max(row.tokens, 1),
    searched: `${row.problem}\n${row.given ?? ""}${pieces.join("")}`.toLowerCase(), body: null, box: null };
});

function nodes(piece) {
  return visible(piece === "" ? "\u00b7" : piece.replaceAll("\n", "\u21b5\n"));
}

/** A token by itself, its spaces shown. */
function alone(token) {
  return element("code", {}, visible(data.texts[token].replaceAll(" ", "\u2423").replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5")));
}

/** One response under one objective. */
function strip(row, place) {
  const text = element("div", { className: "text tokens", tabIndex: 0 });
  text.setAttribute("role", "group");
  text.setAttribute("aria-label", `Response ${row.index + 1}${objectives.length ? ` under ${objectives[place].name}` : ""}: arrow keys go from token to token`);
  if (row.given) text.append(element("span", { className: "given" }, visible(row.given)));
  row.pieces.forEach((piece, at) => {
    const token = element("span", { className: "token" }, nodes(piece));
    token.dataset.at = row.from + at;
    text.append(token);
  });
  text.dataset.objective = place;
  paint(text);
  return text;
}

function paint(text) {
  const shown = quantity(state.colour, objectives[text.dataset.objective]);
  for (const token of text.querySelectorAll(".token")) {
    const ground = background(shown, Number(token.dataset.at));
    token.style.backgroundColor = ground ?? "";
    token.classList.toggle("unknown", ground === null);
    token.classList.toggle("flagged", shown.kind === "flag" && Boolean(ground));
  }
}

function body(row) {
  const places = !state.beside ? [state.objective] : [...state.columns].sort((a, b) => a - b);
  return places.map((place) => {
    const column = element("div", { className: "column" });
    if (state.beside) column.append(element("h4", { textContent: objectives[place].name }));
    column.append(strip(row, place));
    return column;
  });
}

function facts(row) {
  const meta = element("div", { className: "meta" });
  const say = (text, className = "") => meta.append(element("span", { className }, text));
  if (row.verdict) say(row.verdict.replace("_", " "), `verdict ${row.verdict}`);
  if (row.gold) meta.append(element("span", {}, "answer ", visible(row.answer ?? "none"), ", gold ", visible(row.gold)));
  if (row.reward !== undefined) say(`reward ${number(row.reward)}`);
  if (objectives.length && row.tokens) say(`advantage ${number(objectives[0].advantage[row.from])}`);
  say(`${row.tokens.toLocaleString("en")} tokens${row.cut ? ", cut off" : ""}`);
  say(`mean entropy ${number(row.entropy)}`);
  return meta;
}

for (const row of rows) {
  row.body = element("div", { className: "columns" });
  row.body.style.minHeight = `${Math.ceil(row.tokens / 25) * 1.6 + 1.6}rem`; // until it is drawn
  row.box = element("article", { className: "row" }, facts(row), element("div", { className: "text problem" }, visible(row.problem)), row.body);
}

function fill(row) {
  row.body.replaceChildren(...body(row));
  row.body.style.minHeight = "";
}

function empty(row) {
  row.body.style.minHeight = `${row.body.offsetHeight}px`;
  row.body.replaceChildren();
}

const near = new IntersectionObserver((changes) => {
  for (const change of changes) {
    const row = rows.find((one) => one.body === change.target);
    if (change.isIntersecting && !row.body.firstChild) fill(row);
    if (!change.isIntersecting && row.body.firstChild) empty(row);
  }
}, { rootMargin: "1200px 0px" });

function list() {
  const [field, low, high] = [byId("field").value, byId("low").valueAsNumber, byId("high").valueAsNumber];
  const wanted = byId("search").value.trim().toLowerCase();
  const inside = (row) => !((Number.isNaN(low) && Number.isNaN(high)) ? false : row[field] === undefined || row[field] < low || row[field] > high);
  const found = rows.filter((row) => inside(row) && row.searched.includes(wanted));
  const key = byId("sort").value;
  if (key !== "order") found.sort((a, b) => (b[key] ?? -Infinity) - (a[key] ?? -Infinity) || a.index - b.index);
  near.disconnect();
  for (const row of rows) if (row.body.firstChild && !found.includes(row)) row.body.replaceChildren();
  byId("rows").replaceChildren(...found.map((row) => row.box));
  for (const row of found) near.observe(row.body);
  byId("count").textContent = `${found.length} of ${rows.length} responses`;
}

function redraw() {
  for (const row of rows) if (row.body.firstChild) fill(row);
}

function recolour() {
  for (const text of document.querySelectorAll(".tokens")) paint(text);
  key();
  if (state.now !== null) detail();
}

/** The legend, with numbers. */
function key() {
  const { label, about, kind, ends, own } = QUANTITIES[state.colour];
  const shown = quantity(state.colour, objectives[state.objective]);
  const whose = own && !state.beside ? ` ${objectives[state.objective].title}.` : "";
  byId("about").textContent = `${label[0].toUpperCase()}${label.slice(1)}. ${about}${whose}`;
  const scale = element("div", { className: `scale ${kind}` });
  if (!shown.values) scale.append("This objective has no KL mask.");
  else if (kind === "flag") scale.append(element("span", { className: "swatch" }), "yes", element("span", { className: "swatch off" }), "no");
  else {
    scale.append(element("span", { className: "ramp" }));
    const marks = kind === "both" ? [[`\u2264 ${number(-shown.most)}`, ends[0]], ["0", ""], [`\u2265 ${number(shown.most)}`, ends[1]]] : [["0", ""], [`\u2265 ${number(shown.most)}`, ""]];
    scale.append(element("div", { className: "marks" }, ...marks.map(([value, word]) => element("span", {}, value, element("small", { textContent: word })))));
  }
  byId("scale").replaceChildren(scale);
}

function table(heads, lines) {
  const made = element("table");
  if (heads) made.append(element("tr", {}, ...heads.map((head) => element("th", { textContent: head, scope: "col" }))));
  for (const [head, ...values] of lines) {
    made.append(element("tr", {}, element("th", { scope: "row" }, head), ...values.map((value) => element("td", {}, value))));
  }
  return made;
}

function likely(at) {
  const lines = [];
  for (let rank = 0; rank < likeliest.count; rank += 1) {
    const token = likeliest.ids[at * likeliest.count + rank];
    const probability = likeliest.probs[at * likeliest.count + rank];
    const bar = element("span", { className: "bar" });
    bar.style.width = `${Math.max(100 * probability, 0.5)}%`;
    lines.push(element("li", { className: token === ids[at] ? "taken" : "" }, alone(token),
      element("span", { textContent: `${(100 * probability).toPrecision(3)} %` }), bar));
  }
  return element("ol", { className: "likely" }, ...lines);
}

/** What is known of the token under the pointer or the cursor. */
function detail() {
  const at = state.now;
  const row = rows.find((one) => at >= one.from && at < one.from + one.tokens);
  const value = (name) => number(fields[name][at]);
  const parts = [
    element("h3", {}, "Token ", alone(ids[at])),
    element("p", { textContent: `${at - row.from + 1} of ${row.tokens.toLocaleString("en")}, id ${ids[at]}, probability ${(100 * Math.exp(fields.logp[at])).toPrecision(3)} %` }),
    table(["", "now", "at sampling", "change"], [
      ["log-prob", value("logp"), value("old_logp"), value("log_ratio")],
      ["entropy", value("entropy"), value("old_entropy"), value("entropy_change")],
    ]),
  ];
  if (objectives.length) {
    parts.push(table(["objective", "weight", "advantage", "log-ratio", ""], objectives.map((one) => [one.name, number(one.weight[at]),
      number(one.advantage[at]), number(one.ratio[at]), [one.clipped[at] ? "clipped" : "", one.mask?.[at] ? "masked" : ""].filter(Boolean).join(", ")])));
  }
  parts.push(element("h4", { textContent: "Likeliest here" }), likely(at));
  byId("detail").replaceChildren(...parts);
}

function point(token) {
  document.querySelector(".current")?.classList.remove("current");
  token.classList.add("current");
  state.now = Number(token.dataset.at);
  detail();
}

for (const happening of ["pointerover", "click"]) {
  byId("rows").addEventListener(happening, (event) => {
    const token = event.target.closest(".token");
    if (token) point(token);
  });
}
byId("rows").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step || !event.target.classList.contains("tokens")) return;
  event.preventDefault();
  const current = event.target.querySelector(".current");
  const next = current ? (step > 0 ? current.nextElementSibling : current.previousElementSibling) : event.target.querySelector(".token");
  if (next?.classList.contains("token")) { point(next); next.scrollIntoView({ block: "nearest" }); }
});

for (const [name, { label, own }] of Object.entries(QUANTITIES)) {
  if (!own || objectives.length) byId("colour").append(element("option", { value: name, textContent: label, selected: name === state.colour }));
}
byId("colour").addEventListener("change", (event) => { state.colour = event.target.value; recolour(); });
if (objectives.length) {
  objectives.forEach((one, place) => {
    byId("objective").append(element("option", { value: String(place), textContent: one.name }));
    const chip = element("button", { type: "button", textContent: one.name });
    chip.setAttribute("aria-pressed", "true");
    chip.addEventListener("click", () => {
      if (!state.columns.delete(place)) state.columns.add(place);
      chip.setAttribute("aria-pressed", String(state.columns.has(place)));
      redraw();
    });
    byId("columns").append(chip);
  });
  byId("objective").addEventListener("change", (event) => {
    state.objective = Number(event.target.value);
    redraw();
    key();
  });
  byId("beside").addEventListener("click", (event) => {
    state.beside = !state.beside;
    event.target.setAttribute("aria-pressed", String(state.beside));
    byId("columns").hidden = !state.beside;
    document.body.classList.toggle("wide", state.beside);
    redraw();
    key();
  });
}
for (const id of ["sort", "field", "low", "high", "search"]) byId(id).addEventListener("input", list);
byId("controls").addEventListener("submit", (event) => event.preventDefault());
byId("detail").append(element("p", { className: "hint", textContent: "Point at a token, or go through a response with the arrow keys, to see its numbers and what else was likely." }));
key();
list();
performance.mark("readable");
