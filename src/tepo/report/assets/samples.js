"use strict";
// The responses of a report: search and filters.

const PAGE = 25;
const shown = { verdicts: new Set(), count: PAGE };
const byId = (id) => document.getElementById(id);

function options(select, all, values, say) {
  select.append(element("option", { value: "", textContent: all }));
  for (const value of values) select.append(element("option", { value: String(value), textContent: say(value) }));
}

options(byId("source"), "all", [...new Set(data.samples.map((sample) => sample.source))], (name) => name);
options(byId("step"), "all", [...new Set(data.samples.map((sample) => sample.step))].sort((a, b) => a - b), (step) => `after ${step}`);

for (const verdict of [...new Set(data.samples.map((sample) => sample.verdict))].sort()) {
  const count = data.samples.filter((sample) => sample.verdict === verdict).length;
  const chip = element("button", { type: "button", textContent: `${verdict.replace("_", " ")} ${count}` });
  chip.dataset.verdict = verdict;
  chip.setAttribute("aria-pressed", "false");
  chip.addEventListener("click", () => {
    const on = !shown.verdicts.delete(verdict) && shown.verdicts.add(verdict);
    chip.setAttribute("aria-pressed", String(Boolean(on)));
    shown.count = PAGE;
    list();
  });
  byId("verdicts").append(chip);
}

const texts = data.samples.map((sample) => [sample.problem, sample.response, sample.gold, sample.answer].join("\n").toLowerCase());

function matching() {
  const wanted = byId("search").value.trim().toLowerCase();
  const source = byId("source").value;
  const step = byId("step").value;
  return data.samples.filter((sample, at) =>
    (!shown.verdicts.size || shown.verdicts.has(sample.verdict)) && (!source || sample.source === source)
    && (!step || String(sample.step) === step) && texts[at].includes(wanted));
}

function response(sample, hit) {
  const meta = element("div", { className: "meta" },
    element("span", { className: `verdict ${sample.verdict}`, textContent: sample.verdict.replace("_", " ") }),
    element("span", {}, "answer ", visible(sample.answer ?? "none", hit), ", gold ", visible(sample.gold, hit)));
  const facts = [`step ${sample.step}`, sample.source, `${sample.tokens.toLocaleString("en")} tokens${sample.cut ? ", cut off" : ""}`];
  if (sample.reward !== undefined) facts.push(`reward ${sample.reward}`);
  if (sample.advantage !== undefined) facts.push(`advantage ${sample.advantage}`);
  for (const fact of facts) meta.append(element("span", { textContent: fact }));
  const text = element("div", { className: "text folded" }, visible(sample.response, hit));
  if (sample.response.length > 900) text.tabIndex = 0; // it scrolls: the keyboard must reach it
  return element("li", {}, meta, element("div", { className: "text problem" }, visible(sample.problem, hit)), text);
}

function list() {
  const found = matching();
  const hit = byId("search").value.trim().toLowerCase();
  byId("list").replaceChildren(...found.slice(0, shown.count).map((sample) => response(sample, hit)));
  byId("more").hidden = found.length <= shown.count;
  byId("count").textContent = `${found.length} of ${data.samples.length} responses`
    + (found.length > shown.count ? `, the first ${shown.count} shown` : "");
}

byId("more").addEventListener("click", () => { shown.count += 2 * PAGE; list(); });
byId("controls").addEventListener("input", () => { shown.count = PAGE; list(); });
byId("controls").addEventListener("submit", (event) => event.preventDefault());
list();
performance.mark("readable");
