"use strict";
// The numbers of tokens, and their colours.

function bytes(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

/** Half precision, lowest byte first, as numbers. */
function halves(text) {
  const words = new Uint16Array(bytes(text).buffer);
  return Float32Array.from(words, (word) => {
    const sign = word & 0x8000 ? -1 : 1;
    const exponent = (word >> 10) & 31;
    const fraction = word & 1023;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? 2 ** (exponent - 25) * (1024 + fraction) : fraction * 2 ** -24);
  });
}

const ids = new Int32Array(bytes(data.ids).buffer);
const fields = Object.fromEntries(Object.entries(data.fields).map(([name, text]) => [name, halves(text)]));
const objectives = data.objectives.map((one) => ({
  name: one.name, title: one.title, weight: halves(one.weight), advantage: halves(one.advantage), ratio: halves(one.ratio),
  clipped: bytes(one.clipped), mask: one.mask ? bytes(one.mask) : null,
}));
const likeliest = { count: data.top.count, ids: new Int32Array(bytes(data.top.ids).buffer), probs: halves(data.top.probs) };

// kind: "both" around 0, "from" 0 upwards, "flag". of: the values, for those of an objective given that.
const QUANTITIES = {
  weight: { label: "gradient weight", kind: "both", of: (objective) => objective.weight, own: true, ends: ["less likely", "likelier"],
    about: "What the update does to each token: minus the derivative of the objective's loss by the token's log-prob, times the number of tokens." },
  advantage: { label: "advantage", kind: "both", of: (objective) => objective.advantage, own: true, ends: ["below the group", "above"],
    about: "How much better than its group a token did, as the objective has it." },
  clipped: { label: "clipped or not", kind: "flag", of: (objective) => objective.clipped, own: true,
    about: "Tokens whose ratio lies outside the clip range on the side where the objective cuts off their gradient." },
  mask: { label: "KL mask", kind: "flag", of: (objective) => objective.mask, own: true,
    about: "Tokens that gain reward while losing entropy, which the objective's KL mask holds back." },
  log_ratio: { label: "log-ratio", kind: "both", of: () => fields.log_ratio, ends: ["less likely now", "likelier now"],
    about: "Log-prob of the token now, minus that when it was sampled." },
  entropy: { label: "entropy now", kind: "from", of: () => fields.entropy,
    about: "Of the distribution that the token is drawn from, in nats, by the policy that looks." },
  old_entropy: { label: "entropy at sampling", kind: "from", of: () => fields.old_entropy,
    about: "The same by the policy that sampled; not known for responses that could have no gradient." },
  entropy_change: { label: "entropy change", kind: "both", of: () => fields.entropy_change, ends: ["falling", "rising"],
    about: "Entropy now, minus that at sampling." },
  surprise: { label: "surprise", kind: "from", of: () => surprise,
    about: "Minus the log-prob of the token now, in nats: what the policy did not expect is dark." },
};
const surprise = fields.logp.map((value) => -value);

/** The value that has the full colour: nearly the largest, so that one odd token does not blank all others. */
function largest(values) {
  const sizes = Array.from(values).filter(Number.isFinite).map(Math.abs).sort((a, b) => a - b);
  const value = sizes.length ? sizes[Math.floor(0.98 * (sizes.length - 1))] : 0;
  return value || (sizes.length ? sizes[sizes.length - 1] : 0) || 1;
}

const largests = new Map();

/** {kind, values, most}: what to draw; values are null where the objective has none. */
function quantity(name, objective) {
  const { kind, of } = QUANTITIES[name];
  const values = of(objective);
  if (!values || kind === "flag") return { kind, values, most: 1 };
  if (!largests.has(values)) largests.set(values, largest(values));
  return { kind, values, most: largests.get(values) };
}

const STRONGEST = 78; // per cent of colour: the text stays readable on it

function background({ kind, values, most }, at) {
  const value = values ? values[at] : NaN;
  if (Number.isNaN(value)) return null;
  if (kind === "flag") return value ? mixed("plus", STRONGEST) : "";
  const strength = Math.min(Math.abs(value) / most, 1);
  return strength < 0.01 ? "" : mixed(value < 0 ? "minus" : "plus", Math.round(STRONGEST * strength));
}

function mixed(name, percent) {
  return `color-mix(in srgb, var(--${name}) ${percent}%, transparent)`;
}

function number(value) {
  if (value === undefined || Number.isNaN(value)) return "not known";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e4 || size < 1e-3 ? value.toExponential(2) : value.toPrecision(3);
}
