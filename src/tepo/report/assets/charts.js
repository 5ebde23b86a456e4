"use strict";
// The curves of a report, drawn by plotly.

const CONFIG = { displayModeBar: false, responsive: false, doubleClick: "reset", scrollZoom: false };

const PRINTED = { one: 308, wide: 654, height: 168 }; // pixels inside the columns that page.css has for paper
let printing = false;

function faded(hex, opacity) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return `rgba(${r},${g},${b},${opacity})`;
}

function trace(series, unit) {
  const ink = colour(`c${series.colour % 6}`);
  const made = {
    x: series.x, y: series.y, name: series.name, type: "scatter", mode: "lines", line: { color: ink, width: 2 },
    hovertemplate: `%{y:.4~g}${unit && " " + unit}<extra>${series.kind === "stack" ? "" : "%{fullData.name}"}</extra>`,
    yaxis: series.axis === 2 ? "y2" : "y",
  };
  if (series.kind === "raw") Object.assign(made, { line: { color: faded(ink, 0.35), width: 1 }, hoverinfo: "skip", hovertemplate: null });
  if (series.kind === "points") Object.assign(made, { mode: "lines+markers", marker: { size: 8 }, line: { color: ink, width: 1.5, dash: "dot" } });
  if (series.kind === "path") Object.assign(made, { mode: "markers", marker: { size: 7, opacity: 0.8 } });
  if (series.kind === "stack") Object.assign(made, { stackgroup: "time", line: { color: ink, width: 0 }, fillcolor: faded(ink, 0.75),
    hovertemplate: `%{y:.3~g} s<extra>${series.name.split(":")[0]}</extra>` });
  if (series.above) made.error_y = { type: "data", symmetric: false, array: series.above, arrayminus: series.below, thickness: 1.5, width: 3 };
  return made;
}

function axis(more) {
  return { gridcolor: colour("line"), linecolor: colour("line"), zeroline: false, tickfont: { size: 12 }, automargin: true,
    fixedrange: true, ...more };
}

function layout(chart) {
  const second = chart.series.some((series) => series.axis === 2);
  const long = chart.x !== "step";
  const values = chart.series.flatMap((series) => series.y);
  const decades = chart.log ? Math.log10(Math.max(...values) / Math.min(...values)) : 0;
  return {
    ...(printing && { width: chart.wide ? PRINTED.wide : PRINTED.one, height: PRINTED.height }),
    margin: { l: 44, r: second ? 44 : 10, t: 6, b: long ? 44 : 34 }, showlegend: false, dragmode: false,
    hovermode: long ? "closest" : "x unified", paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("soft"), family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { bgcolor: colour("paper"), bordercolor: colour("line"), font: { color: colour("ink") } },
    xaxis: axis({ title: { text: chart.x, font: { size: 12 }, standoff: 4 }, showgrid: false }),
    yaxis: axis({ type: chart.log ? "log" : "linear", ticksuffix: chart.unit === "%" ? " %" : "", nticks: 6,
      exponentformat: "power", ...(decades > 1.5 && { dtick: Math.ceil(decades / 6) }), title: { text: second ? chart.series[0].name : "", font: { size: 12 } } }),
    ...(second && { yaxis2: axis({ overlaying: "y", side: "right", showgrid: false, ticksuffix: " %",
      title: { text: "held-out accuracy", font: { size: 12 } } }) }),
  };
}

function legend(chart) {
  const list = element("ul", { className: "legend" });
  for (const series of chart.series.filter((one) => one.kind !== "raw")) {
    const entry = element("li", { className: series.kind }, series.name);
    entry.style.setProperty("--key", `var(--c${series.colour % 6})`);
    list.append(entry);
  }
  return list;
}

function frame(chart) {
  const plot = element("div", { className: "plot" });
  const titled = element("h3", { id: `chart-${chart.id}`, textContent: chart.title });
  const figure = element("figure", { className: chart.wide ? "chart wide" : "chart" }, titled,
    element("p", { textContent: chart.about }), legend(chart), plot);
  figure.setAttribute("aria-labelledby", titled.id);
  document.getElementById("charts").append(figure);
  return plot;
}

const plots = data.charts.map((chart) => ({ chart, plot: frame(chart), drawn: false }));

function draw(entry) {
  entry.drawn = true;
  Plotly.react(entry.plot, entry.chart.series.map((series) => trace(series, entry.chart.unit)), layout(entry.chart), CONFIG);
}

// What is on the screen first, the others one by one whenever there is time: the page can be read at once.
const seen = new IntersectionObserver((changes) => {
  for (const change of changes.filter((one) => one.isIntersecting)) {
    const entry = plots.find(({ plot }) => plot === change.target);
    if (!entry.drawn) draw(entry);
  }
});
for (const { plot } of plots) seen.observe(plot);

function drawNext() {
  const next = plots.find((entry) => !entry.drawn);
  if (!next) { document.documentElement.dataset.drawn = "all"; performance.mark("drawn"); return; }
  draw(next);
  setTimeout(drawNext, 0);
}
setTimeout(drawNext, 50);

repaint.push(() => { for (const entry of plots) draw(entry); });

let width = innerWidth;
function fit() { for (const entry of plots) if (entry.drawn) Plotly.Plots.resize(entry.plot); }
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; fit(); } });
for (const [event, value] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => { printing = value; for (const entry of plots) draw(entry); });
}
