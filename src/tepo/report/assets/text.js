"use strict";
// What all pages share: their data, texts as text, the colours.

const data = JSON.parse(document.getElementById("data").textContent);
const MARKS = new RegExp(data.marks, "gu");

/** An element with properties and children; texts become text nodes, never markup. */
function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** A text as nodes, its invisible characters shown as code points; what `hit` (lower case) finds is marked. */
function visible(text, hit = "") {
  const nodes = document.createDocumentFragment();
  let done = 0;
  for (const found of text.matchAll(MARKS)) {
    nodes.append(marked(text.slice(done, found.index), hit));
    const code = found[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    nodes.append(element("span", { className: "mark", textContent: `U+${code}` }));
    done = found.index + found[0].length;
  }
  nodes.append(marked(text.slice(done), hit));
  return nodes;
}

function marked(text, hit) {
  const nodes = document.createDocumentFragment();
  const lower = text.toLowerCase();
  // Lower case may be longer than the text ("İ"); places in one are then not places in the other.
  if (!hit || lower.length !== text.length) {
    nodes.append(text);
    return nodes;
  }
  let done = 0;
  for (let at = lower.indexOf(hit); at >= 0; at = lower.indexOf(hit, done)) {
    nodes.append(text.slice(done, at), element("mark", { className: "hit", textContent: text.slice(at, at + hit.length) }));
    done = at + hit.length;
  }
  nodes.append(text.slice(done));
  return nodes;
}

/** A colour of the page as it is now. */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const repaint = []; // functions to call when the colours have changed
const themes = [
  ["", "Auto", "as the system has them"], ["light", "Light", "light"], ["dark", "Dark", "dark"],
];

document.getElementById("theme").addEventListener("click", (event) => {
  const now = themes.findIndex(([theme]) => theme === (document.documentElement.dataset.theme ?? ""));
  const [theme, label, said] = themes[(now + 1) % themes.length];
  document.documentElement.dataset.theme = theme;
  event.target.textContent = label;
  event.target.setAttribute("aria-label", `Colours: ${said}`);
  for (const paint of repaint) paint();
});
for (const query of ["(prefers-color-scheme: dark)", "print"]) {
  matchMedia(query).addEventListener("change", () => { for (const paint of repaint) paint(); });
}
