// The page: a prompt, its continuation token by token, and what was likely instead.

import { complain, make } from "./draw.js";
import { look } from "./memory.js";

const $ = (id) => document.getElementById(id);
let abort = null; // ends the request that runs
let answer = ""; // what was written to the prompt on screen
let prompt = ""; // that prompt
let chosen = null; // the token that is explained

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/// Sends a request; an error has the server's words.
async function send(path, body, signal) {
  const options = { headers: headers(), signal };
  const response = await fetch(path, body ? { ...options, method: "POST", body: JSON.stringify(body) } : options);
  if (response.status === 401) $("key-form").hidden = false;
  if (!response.ok) {
    const told = await response.json().catch(() => null);
    throw new Error(told?.error?.message ?? `the server said ${response.status}`);
  }
  return response;
}

const ask = async (path, body) => (await send(path, body)).json();

async function connect() {
  try {
    const model = (await ask("/v1/models")).data[0];
    const info = await ask("/tokenizer_info");
    $("model").textContent =
      `${model.id}: ${model.layers} layers of ${model.heads} heads, up to ${model.max_model_len} tokens`;
    document.title = `fox: ${model.id}`;
    if (!$("prompt").value) {
      $("prompt").value = info.tokenizer_class === "synthetic"
        ? "Ann sings. Ben cooks. The rain falls. Ann" : "Once upon a time";
    }
    complain($("error"));
  } catch (error) {
    $("model").textContent = "not connected";
    complain($("error"), error.message);
  }
}

function settings() {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const numbers = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];
  return {
    ...Object.fromEntries(numbers.map((id) => [id, number(id)])),
    stop: $("stop_text").value || undefined,
    echo: $("echo").checked,
    ignore_eos: $("ignore_eos").checked,
    logprobs: 5,
    stream: true,
  };
}

/// The events of a response, parsed, until the last.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function write() {
  abort?.abort();
  abort = new AbortController();
  const { signal } = abort;
  prompt = $("prompt").value;
  answer = "";
  $("text").replaceChildren();
  $("token").replaceChildren();
  complain($("error"));
  busy(true);
  const request = { prompt, ...settings() };
  if (!request.echo) $("text").append(make("span", prompt, { class: "prompt" }));
  const started = performance.now();
  let first = null, count = 0, reason = "stopped", prompted = !request.echo;
  try {
    for await (const event of events(await send("/v1/completions", request, signal))) {
      const part = event.choices[0];
      show(part, !prompted);
      if (prompted) {
        answer += part.text;
        first ??= performance.now();
        count += part.logprobs?.tokens.length ?? 0;
      }
      prompted = true;
      reason = part.finish_reason ?? reason;
      const seconds = (performance.now() - (first ?? started)) / 1000;
      const speed = count > 1 && seconds > 0 ? `, ${((count - 1) / seconds).toFixed(1)} tokens/s` : "";
      $("status").textContent = `${count} tokens${speed}`;
    }
    $("status").textContent += `, end: ${reason}`;
  } catch (error) {
    if (error.name !== "AbortError") complain($("error"), error.message);
    else $("status").textContent += ", stopped";
  }
  if (abort.signal !== signal) return; // another request has begun
  busy(false);
  if (prompt + answer && $("error").hidden) await look(ask, prompt + answer);
}

/// Adds a chunk, a span per token.
function show(part, isPrompt) {
  const box = $("text");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  const list = part.logprobs;
  const kind = isPrompt ? { class: "prompt" } : {};
  if (!list) {
    if (part.text) box.append(make("span", part.text, kind));
  } else {
    // Offsets count characters, not the halves of them that strings are made of.
    const characters = Array.from(part.text);
    const start = list.text_offset[0];
    list.tokens.forEach((name, i) => {
      const end = list.text_offset[i + 1] ?? start + characters.length;
      const words = characters.slice(list.text_offset[i] - start, end - start).join("");
      const span = make("span", words, { ...kind, "data-token": name });
      const logprob = list.token_logprobs[i];
      if (logprob !== null) {
        span.style.setProperty("--doubt", Math.min(1, -logprob / 8));
        span.facts = { name, logprob, top: list.top_logprobs[i] };
      }
      if (words) box.append(span);
    });
  }
  if (atEnd) box.scrollTop = box.scrollHeight;
}

/// Explains a token: its probability, and what was likely instead.
function explain(span) {
  chosen?.classList.remove("chosen");
  chosen = span;
  span.classList.add("chosen");
  if (!span.facts) return $("token").replaceChildren(make("p", "No log-probability for this."));
  const table = make("table");
  for (const [name, logprob] of Object.entries(span.facts.top)) {
    const row = make("tr");
    const own = name === span.facts.name ? "chosen" : "";
    const cell = make("td");
    cell.append(make("code", JSON.stringify(name).slice(1, -1)));
    row.append(cell, make("td", `${(100 * Math.exp(logprob)).toFixed(2)}%`), make("td", logprob.toFixed(4)), make("td", own));
    table.append(row);
  }
  $("token").replaceChildren(table);
}

function busy(is) {
  $("stop").disabled = !is;
  $("keep").disabled = is || !answer;
  $("text").setAttribute("aria-busy", String(is));
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); write(); });
$("stop").addEventListener("click", () => abort?.abort());
$("keep").addEventListener("click", () => { $("prompt").value = prompt + answer; $("keep").disabled = true; });
$("look").addEventListener("click", () => look(ask, answer ? prompt + answer : $("prompt").value));
$("key").addEventListener("change", connect);
$("key-form").addEventListener("submit", (event) => event.preventDefault());
$("text").addEventListener("click", (event) => {
  const span = event.target.closest("span");
  if (span) explain(span);
});
$("text").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const spans = [...$("text").children];
  if (!step || !spans.length) return;
  event.preventDefault();
  const at = spans.indexOf(chosen);
  const next = at < 0 ? 0 : Math.min(spans.length - 1, Math.max(0, at + step));
  explain(spans[next]);
  spans[next].scrollIntoView({ block: "nearest" });
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); write(); }
  if (event.key === "Escape") abort?.abort();
});
connect();
