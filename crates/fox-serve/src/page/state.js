// Stored settings, and links that restore a view.

const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];
const CHECKS = ["echo", "ignore_eos"];
const FIELDS = [...NUMBERS, "stop_text", ...CHECKS];
const STORE = "fox.settings";

const field = (id) => document.getElementById(id);
const isCheck = (id) => CHECKS.includes(id);
const value = (id) => (isCheck(id) ? String(field(id).checked) : field(id).value);
const standard = (id) => (isCheck(id) ? String(field(id).defaultChecked) : field(id).defaultValue);

function put(id, text) {
  if (isCheck(id)) field(id).checked = text === "true";
  else field(id).value = text; // a number field rejects other text
}

/// The settings as a request for a continuation has them.
export function request() {
  const number = (id) => (field(id).value === "" ? undefined : Number(field(id).value));
  return {
    ...Object.fromEntries(NUMBERS.map((id) => [id, number(id)])),
    stop: field("stop_text").value || undefined,
    echo: field("echo").checked,
    ignore_eos: field("ignore_eos").checked,
    logprobs: 5,
    stream: true,
  };
}

/// Stores every change for the next visit.
export function keepSettings() {
  const save = () => {
    const changed = FIELDS.filter((id) => value(id) !== standard(id)).map((id) => [id, value(id)]);
    try { localStorage.setItem(STORE, JSON.stringify(Object.fromEntries(changed))); } catch { /* private window */ }
  };
  for (const id of FIELDS) field(id).addEventListener("change", save);
  field("reset").addEventListener("click", () => {
    for (const id of FIELDS) put(id, standard(id));
    save();
  });
}

/// Restores the settings of the last visit.
export function restoreSettings() {
  let kept = {};
  try { kept = JSON.parse(localStorage.getItem(STORE)) ?? {}; } catch { /* nothing kept */ }
  for (const id of FIELDS) if (typeof kept[id] === "string") put(id, kept[id]);
}

/// The part of an address after `#` that restores a view: its texts, head, position and colouring, and the settings.
export function link(view) {
  const parts = new URLSearchParams();
  for (const [name, text] of Object.entries(view)) if (text) parts.set(name, text);
  for (const id of FIELDS) if (value(id) !== standard(id)) parts.set(id, value(id));
  return `#${parts}`;
}

/// Reads such a part: sets the settings and gives the view, or `null` when there is none.
export function restoreLink(hash) {
  if (hash.length < 2) return null;
  const parts = new URLSearchParams(hash.slice(1));
  for (const id of FIELDS) if (parts.has(id)) put(id, parts.get(id));
  const pair = /^(\d{1,4}),(\d{1,4})$/.exec(parts.get("head") ?? "");
  const at = /^\d{1,7}$/.test(parts.get("at") ?? "") ? Number(parts.get("at")) : null;
  return {
    prompt: parts.get("prompt") ?? "",
    answer: parts.get("answer") ?? "",
    head: pair ? [Number(pair[1]), Number(pair[2])] : null,
    at,
    mode: parts.get("mode"),
  };
}
