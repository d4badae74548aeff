// One model: the text token by token, its colours, and the token that was chosen.

import { complain, make, short } from "./draw.js";
import { Memory } from "./memory.js";
import { Server } from "./server.js";

const LEGENDS = {
  probability: ["likely", "unlikely"],
  memory: ["forgotten", "no decay"],
  attention: ["no attention", "most of it"],
};

export class Pane {
  /// `onChoose(pane)` is called for a chosen token, `onRewrite(text)` to generate from one.
  constructor(base, { onChoose, onRewrite }) {
    this.root = document.getElementById("pane").content.firstElementChild.cloneNode(true);
    this.parts = {};
    for (const element of this.root.querySelectorAll("[data-part]")) this.parts[element.dataset.part] = element;
    this.server = new Server(base, () => { this.parts.keyForm.hidden = false; });
    Object.assign(this, { onChoose, onRewrite, mode: "probability", modeWasChosen: false });
    Object.assign(this, { spans: [], at: null, facts: new Map(), promptEnd: 0, seen: null, turn: 0 });
    this.memory = new Memory(this.parts, this.server, {
      onHover: (row, column) => this.hover(row, column),
      onPick: (position) => this.choose(position),
      onHead: () => this.colour(),
    });
    this.listen();
    this.setMode("probability");
  }

  listen() {
    const { text, keyForm, key } = this.parts;
    key.addEventListener("change", () => { this.server.key = key.value; this.connect(); });
    keyForm.addEventListener("submit", (event) => event.preventDefault());
    for (const button of this.root.querySelectorAll(".mode")) {
      button.addEventListener("click", () => { this.modeWasChosen = true; this.setMode(button.dataset.mode); });
    }
    const spanOf = (event) => event.target.closest("span");
    text.addEventListener("click", (event) => { if (spanOf(event)) this.choose(this.spans.indexOf(spanOf(event))); });
    text.addEventListener("pointerover", (event) => {
      const position = this.spans.indexOf(spanOf(event));
      if (position >= 0) this.hoverToken(position);
    });
    text.addEventListener("pointerleave", () => this.hover(null, null));
    text.addEventListener("keydown", (event) => this.key(event));
    text.addEventListener("wheel", () => requestAnimationFrame(() => {
      this.isAtEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    }), { passive: true });
  }

  key(event) {
    const last = this.spans.length - 1;
    const at = this.at ?? -1;
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last }[event.key];
    if (next === undefined || last < 0) return;
    event.preventDefault();
    this.choose(Math.min(last, Math.max(0, next)));
  }

  /// Fetches the description of the model; returns the name of its tokenizer.
  async connect() {
    const { title, size, error } = this.parts;
    try {
      const model = (await this.server.ask("/v1/models")).data[0];
      const info = await this.server.ask("/tokenizer_info");
      title.textContent = model.id;
      size.textContent = `${model.layers} layers of ${model.heads} heads, up to ${model.max_model_len} tokens`;
      this.bos = info.bos_token_id;
      complain(error);
      return info.tokenizer_class;
    } catch (problem) {
      title.textContent = this.server.base || "not connected";
      complain(error, problem.message);
      return null;
    }
  }

  clear() {
    Object.assign(this, { spans: [], at: null, facts: new Map(), seen: null, isAtEnd: true, turn: this.turn + 1 });
    this.parts.text.replaceChildren();
    this.parts.token.replaceChildren();
    this.parts.readout.textContent = "";
    this.memory.clear();
    complain(this.parts.error);
  }

  /// Streams a continuation; `report(text)` gets the progress. Returns the answer.
  async write(request, promptText, signal, report) {
    this.clear();
    this.parts.text.setAttribute("aria-busy", "true");
    this.promptEnd = Array.from(promptText).length;
    if (!request.echo) this.append(promptText, { isPrompt: true });
    // The prompt is echoed in several chunks; the entry of its first token has no log-probability.
    let answer = "", count = 0, reason = null, echoed = request.echo ? 0 : this.promptEnd;
    // Many chunks may arrive in one read, so only the time since the request was sent is a true duration.
    const begun = performance.now();
    try {
      for await (const part of this.server.complete(request, signal)) {
        const isEcho = echoed < this.promptEnd || part.logprobs?.token_logprobs[0] === null;
        this.show(part, isEcho);
        if (isEcho) {
          echoed += Array.from(part.text).length;
        } else {
          answer += part.text;
          count += part.logprobs?.tokens.length ?? 0;
        }
        reason = part.finish_reason ?? reason;
        const seconds = (performance.now() - begun) / 1000;
        const speed = count && seconds > 0 ? `, ${(count / seconds).toFixed(1)} tokens/s with the prompt` : "";
        report(`${count} tokens${speed}${reason ? `, end: ${reason}` : ""}`);
      }
    } catch (problem) {
      if (problem.name === "AbortError") report(`${count} tokens, stopped`);
      else complain(this.parts.error, problem.message);
    }
    this.parts.text.setAttribute("aria-busy", "false");
    return answer;
  }

  append(words, { isPrompt = false, label = "" } = {}) {
    const span = make("span", words);
    if (isPrompt) span.className = "prompt";
    if (label) span.dataset.label = label;
    this.parts.text.append(span);
    this.spans.push(span);
    return span;
  }

  /// Appends a streamed chunk, a span per token.
  show(part, isPrompt) {
    const list = part.logprobs;
    if (!list) {
      if (part.text) this.append(part.text, { isPrompt });
    } else if (list.tokens.length) {
      // Offsets count characters, not UTF-16 code units.
      const characters = Array.from(part.text);
      const start = list.text_offset[0];
      list.tokens.forEach((_, i) => {
        const offset = list.text_offset[i];
        const end = list.text_offset[i + 1] ?? start + characters.length;
        const words = characters.slice(offset - start, end - start).join("");
        const facts = this.learn(list, i);
        if (words) this.tint(this.append(words, { isPrompt }), facts);
      });
    }
    this.followEnd();
  }

  /// Scrolls to the end of a growing text, once per frame, unless the user has scrolled away from it.
  followEnd() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      if (this.isAtEnd) this.parts.text.scrollTop = this.parts.text.scrollHeight;
    });
  }

  /// Fetches the log-probabilities of a text that was not generated here.
  async score(text) {
    const request = { prompt: text, max_tokens: 0, echo: true, logprobs: 5 };
    const list = (await this.server.ask("/v1/completions", request)).choices[0].logprobs;
    list.tokens.forEach((_, i) => this.learn(list, i));
  }

  /// Stores the log-probabilities of token `i`.
  learn(list, i) {
    const facts = { name: list.tokens[i], logprob: list.token_logprobs[i], top: list.top_logprobs[i] };
    this.facts.set(`${list.text_offset[i]}|${facts.name}`, facts);
    return facts;
  }

  tint(span, facts) {
    span.facts = facts;
    if (typeof facts?.logprob === "number") span.style.setProperty("--doubt", Math.min(1, -facts.logprob / 8));
  }

  /// Inspects the model on a text; the spans become its tokens, one per position.
  async look(text, { head = null, at = null } = {}) {
    const { error } = this.parts;
    const { turn } = this;
    let seen;
    try {
      seen = await this.server.ask("/inspect", { prompt: text });
      if (!this.facts.size) await this.score(text);
    } catch (problem) {
      if (this.turn !== turn) return;
      this.memory.clear();
      if (!this.spans.length) this.append(text, { isPrompt: true });
      return complain(error, problem.message);
    }
    if (this.turn !== turn) return; // superseded by another text
    complain(error);
    this.seen = seen;
    this.parts.text.replaceChildren();
    this.spans = [];
    const characters = Array.from(seen.text);
    seen.tokens.forEach((name, i) => {
      const offset = seen.text_offset[i];
      const words = characters.slice(offset, seen.text_offset[i + 1] ?? characters.length).join("");
      const span = this.append(words, { isPrompt: offset < this.promptEnd, label: this.labelOf(words, seen.ids[i]) });
      this.tint(span, this.facts.get(`${offset}|${name}`));
    });
    await this.memory.show(seen, text, head);
    const last = seen.tokens.length - 1;
    if (this.turn === turn) this.choose(Math.min(at ?? last, last), { quietly: true });
  }

  /// Label of an invisible token: a marker, an incomplete character, a line break.
  labelOf(words, id) {
    if (!words) return id === this.bos ? "start" : "·";
    return words.includes("\n") && !words.trim() ? "⏎" : "";
  }

  setMode(mode) {
    this.mode = mode in LEGENDS ? mode : "probability";
    for (const button of this.root.querySelectorAll(".mode")) {
      button.setAttribute("aria-pressed", String(button.dataset.mode === this.mode));
    }
    this.parts.text.dataset.mode = this.mode;
    [this.parts.legendLow.textContent, this.parts.legendHigh.textContent] = LEGENDS[this.mode];
    this.root.dataset.mode = this.mode;
    this.colour();
  }

  /// Chooses a token: explains it, and colours those before it.
  choose(position, { quietly = false } = {}) {
    const span = this.spans[position];
    if (!span) return;
    this.spans[this.at]?.classList.remove("chosen");
    this.at = position;
    span.classList.add("chosen");
    if (!quietly) {
      span.scrollIntoView({ block: "nearest" });
      if (this.mode === "probability" && this.memory.seen && !this.modeWasChosen) this.setMode("memory");
    }
    this.explain(span);
    this.memory.setPosition(position);
    if (this.memory.seen) this.parts.readout.textContent = this.memory.describe(position, position);
    this.colour();
    if (!quietly) this.onChoose(this);
  }

  /// Chooses the token at a character of the text, without calling listeners.
  chooseCharacter(character) {
    if (!this.memory.seen) return;
    const offsets = this.seen.text_offset;
    let position = offsets.findLastIndex((offset) => offset <= character);
    while (position > 0 && !this.spans[position]?.textContent) position--;
    this.choose(position, { quietly: true });
  }

  /// Colours every token by its decay in the chosen head at the chosen token, or by its attention.
  async colour() {
    const { mode, at } = this;
    const isInside = this.memory?.seen && at !== null && mode !== "probability";
    const row = isInside ? await this.memory.row(mode, at) : null;
    if (this.mode !== mode || this.at !== at) return;
    const most = mode === "attention" && row ? Math.max(1e-12, ...row) : 1;
    this.spans.forEach((span, j) => {
      const value = row?.[j];
      span.classList.toggle("later", Boolean(row) && j > at);
      if (value === undefined || !Number.isFinite(value)) span.style.removeProperty("--part");
      else span.style.setProperty("--part", value / most);
    });
    if (mode === "attention" && row) this.parts.legendHigh.textContent = `${short(most)}, the most`;
  }

  hoverToken(position) {
    if (!this.memory.seen) return;
    this.hover(null, position);
  }

  /// The pointer is at a row and a column of a picture, or at a token; nulls when it has left.
  async hover(row, column) {
    for (const span of this.parts.text.querySelectorAll(".hovered")) span.classList.remove("hovered");
    const at = row ?? this.at;
    this.memory.mark(row ?? this.at, column ?? this.at);
    if (column === null || at === null) {
      this.parts.readout.textContent = "";
      return;
    }
    this.spans[column]?.classList.add("hovered");
    if (row !== null) this.spans[row]?.classList.add("hovered");
    this.parts.readout.textContent = this.memory.describe(at, column);
  }

  /// Shows its probability, the likeliest alternatives, and the button to generate from there.
  explain(span) {
    const box = this.parts.token;
    const facts = span.facts;
    const again = make("button", "Generate from here", { type: "button" });
    again.addEventListener("click", () => this.rewrite(null));
    const row = make("div", "", { class: "row tight" });
    if (this.memory.seen && this.at > 0) row.append(again);
    if (typeof facts?.logprob !== "number") {
      return box.replaceChildren(make("p", "No probability for this token.", { class: "hint" }), row);
    }
    const table = make("table", "", { "aria-label": "Likeliest tokens here" });
    for (const [name, logprob] of Object.entries(facts.top ?? {})) {
      const line = make("tr");
      const cell = make("td");
      const shown = name.trim() ? name : JSON.stringify(name);
      const take = make("button", shown, { type: "button", class: "take", title: "Continue with this token" });
      take.disabled = name.startsWith("token_id:") || !this.memory.seen;
      take.addEventListener("click", () => this.rewrite(name));
      cell.append(take);
      const share = make("td");
      const bar = make("i", "", { class: "bar" });
      bar.style.setProperty("--share", Math.exp(logprob));
      share.append(bar);
      line.append(cell, share, make("td", `${(100 * Math.exp(logprob)).toFixed(2)}%`), make("td", logprob.toFixed(3)),
        make("td", name === facts.name ? "chosen" : ""));
      table.append(line);
    }
    box.replaceChildren(table, row);
  }

  /// Generates from the text before the chosen token, followed by another token if one is given.
  async rewrite(name) {
    try {
      const ids = this.seen.ids.slice(this.seen.ids[0] === this.bos ? 1 : 0, this.at);
      if (name !== null) {
        ids.push(...(await this.server.ask("/tokenize", { prompt: name, add_special_tokens: false })).tokens);
      }
      const text = ids.length ? (await this.server.ask("/detokenize", { tokens: ids })).prompt : "";
      // A token may end inside a character.
      this.onRewrite(text.replace(/\ufffd+$/, ""));
    } catch (problem) {
      complain(this.parts.error, problem.message);
    }
  }
}
