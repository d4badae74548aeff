// The page: a prompt and its settings above one model, or two side by side.

import { Pane } from "./pane.js";
import { keepSettings, link, request, restoreLink, restoreSettings } from "./state.js";

// The prompts of the picture and of the first command in the README.
const FIRST_PROMPTS = {
  synthetic: "Ann sings. Ben cooks. The rain falls. Ann sings. A new chapter begins. Ben fishes. Ann waits. Ben fishes. Ann",
  other: "It was a dark and stormy night",
};

const $ = (id) => document.getElementById(id);
let panes = [];
let abort = null; // aborts the running requests
let prompt = ""; // of the text on screen
let answer = ""; // continuation by the first model

/// Continues the prompt in every pane.
async function write() {
  abort?.abort();
  abort = new AbortController();
  const { signal } = abort;
  prompt = $("prompt").value;
  answer = "";
  $("stop").disabled = false;
  $("status").textContent = "";
  const progress = panes.map(() => "");
  await Promise.all(panes.map(async (pane, at) => {
    const written = await pane.write({ prompt, ...request() }, prompt, signal, (words) => {
      progress[at] = words;
      if (abort.signal === signal) $("status").textContent = progress.filter(Boolean).join(" | ");
    });
    if (abort.signal !== signal) return; // superseded by another request
    if (at === 0) answer = written;
    const isFine = pane.parts.error.hidden;
    if (prompt + written && isFine) await pane.look(prompt + written);
  }));
  if (abort.signal === signal) $("stop").disabled = true;
}

/// Shows a text without a continuation.
async function look(text, view) {
  abort?.abort();
  $("status").textContent = "";
  await Promise.all(panes.map(async (pane) => {
    pane.clear();
    pane.promptEnd = Array.from(prompt).length;
    await pane.look(text, view);
  }));
}

/// Chooses the same token in the other pane where the texts agree up to it.
function follow(pane) {
  const character = pane.seen?.text_offset[pane.at];
  for (const other of panes) {
    if (other === pane || character === undefined || !other.seen) continue;
    other.modeWasChosen = true;
    other.setMode(pane.mode);
    const [own, its] = [pane, other].map(({ seen }) => Array.from(seen.text).slice(0, character + 1).join(""));
    if (own === its) other.chooseCharacter(character);
  }
}

async function copyLink() {
  const [pane] = panes;
  const view = {
    prompt: $("prompt").value,
    answer: $("prompt").value === prompt ? answer : "",
    head: pane.memory.seen && pane.memory.chosen ? pane.memory.chosen.join(",") : "",
    at: pane.memory.seen && pane.at !== null ? String(pane.at) : "",
    mode: pane.mode,
  };
  history.replaceState(null, "", link(view));
  try {
    await navigator.clipboard.writeText(location.href);
    $("status").textContent = "Link copied.";
  } catch {
    $("status").textContent = "The address bar has the link.";
  }
}

async function restore(view) {
  prompt = view.prompt;
  answer = view.answer;
  $("prompt").value = prompt;
  const [pane] = panes;
  if (view.mode) {
    pane.modeWasChosen = true;
    panes.forEach((pane) => pane.setMode(view.mode));
  }
  if (prompt + answer) await look(prompt + answer, view);
}

async function start() {
  restoreSettings();
  const view = restoreLink(location.hash);
  keepSettings();
  const config = await fetch("/page.json").then((reply) => reply.json()).catch(() => ({}));
  const listeners = { onChoose: follow, onRewrite: (text) => { $("prompt").value = text; write(); } };
  panes = ["", config.compare].filter((base) => typeof base === "string").map((base) => new Pane(base, listeners));
  $("panes").classList.toggle("two", panes.length > 1);
  $("panes").append(...panes.map((pane) => pane.root));
  const kinds = await Promise.all(panes.map((pane) => pane.connect()));
  document.title = `fox: ${panes.map((pane) => pane.parts.title.textContent).join(" and ")}`;
  if (view) return restore(view);
  if (!$("prompt").value) $("prompt").value = FIRST_PROMPTS[kinds[0]] ?? FIRST_PROMPTS.other;
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); write(); });
$("stop").addEventListener("click", () => abort?.abort());
$("look").addEventListener("click", () => {
  prompt = $("prompt").value;
  answer = "";
  look(prompt);
});
$("link").addEventListener("click", copyLink);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); write(); }
  if (event.key === "Escape") abort?.abort();
});
window.addEventListener("hashchange", () => {
  const view = restoreLink(location.hash);
  if (view) restore(view);
});
start();
