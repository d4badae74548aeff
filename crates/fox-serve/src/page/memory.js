// The memory of a model over a text: heads, decay, attention, gates, pages of the KV cache.

import { Picture, complain, make, short } from "./draw.js";

const name = ([layer, head]) => `${layer},${head}`;

/// A number of tokens in few characters; JSON has no infinity, so that is null.
function tokens(count) {
  if (count === null || count === undefined || count >= 1e6) return "∞";
  if (count >= 1000) return `${(count / 1000).toFixed(1)}k`;
  return count >= 10 ? count.toFixed(0) : count.toFixed(1);
}

function size(bytes) {
  return bytes < 1 << 20 ? `${(bytes / 1024).toFixed(1)} KiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
}

export class Memory {
  /// `onHover(row, column)` gets positions under the pointer, `onPick(position)` the clicked one, `onHead()` is called
  /// when the pictures of another head have arrived.
  constructor(parts, server, { onHover, onPick, onHead }) {
    Object.assign(this, { parts, server, onHover, onPick, onHead, seen: null, chosen: null, position: 0 });
    const square = {
      onHover: (row, column) => this.hoverSquare(row, column),
      onPick: (row) => onPick(this.positionOf(row, this.unit)),
    };
    const wide = (unit) => ({
      onHover: (row, column) => onHover(null, column === null ? null : this.positionOf(column, unit())),
      onPick: (row, column) => onPick(this.positionOf(column, unit())),
    });
    this.forget = new Picture(parts.forget, square);
    this.attention = new Picture(parts.attention, square);
    this.gates = new Picture(parts.gates, wide(() => this.seen.tokens_per_column));
    this.pages = new Picture(parts.pages, wide(() => this.seen.cache.page_tokens));
    parts.position.addEventListener("input", () => onPick(Number(parts.position.value)));
    parts.shorter.addEventListener("click", () => this.step(-1));
    parts.longer.addEventListener("click", () => this.step(1));
    parts.heads.addEventListener("click", (event) => {
      const place = event.target.closest("button")?.dataset.place;
      if (place) this.choose(place.split(",").map(Number));
    });
    parts.heads.addEventListener("keydown", (event) => this.headKey(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (this.seen) this.draw(); });
  }

  clear() {
    this.seen = null;
    this.parts.memory.hidden = true;
  }

  /// Shows the inspection of a text, starting with `head`.
  async show(seen, text, head) {
    Object.assign(this, { seen, text, pictures: new Map(), rows: new Map() });
    this.keep(seen);
    const { parts } = this;
    parts.memory.hidden = false;
    complain(parts.memoryError);
    parts.position.max = seen.tokens.length - 1;
    const { cache } = seen;
    parts.cache.textContent = `KV cache of this text: ${size(cache.bytes)}; `
      + `${size(cache.full_bytes)} without eviction.`;
    const exists = (place) => place && seen.heads.some((h) => h.layer === place[0] && h.head === place[1]);
    this.drawHeads();
    await this.choose([head, this.chosen].find(exists) ?? this.telling());
  }

  /// The default: a head that forgets within the text, but not immediately.
  telling() {
    const aim = Math.log(Math.max(2, this.seen.tokens.length / 6));
    const distance = (h) => Math.abs(Math.log(Math.max(1e-3, h.half_life?.median ?? 1e9)) - aim);
    const best = this.seen.heads.reduce((a, b) => (distance(b) < distance(a) ? b : a));
    return [best.layer, best.head];
  }

  keep(answer) {
    for (const p of answer.pictures) this.pictures.set(name([p.layer, p.head]), p);
  }

  /// The heads by half-life, the shortest first; those that do not forget come last.
  sorted(layer = null) {
    const life = (h) => h.half_life?.median ?? Infinity;
    const heads = this.seen.heads.filter((h) => layer === null || h.layer === layer);
    return heads.sort((a, b) => (life(a) === life(b) ? a.layer - b.layer || a.head - b.head : life(a) - life(b)));
  }

  drawHeads() {
    const layers = [...new Set(this.seen.heads.map((h) => h.layer))];
    const rows = layers.map((layer) => this.sorted(layer));
    const widest = Math.max(...rows.map((row) => row.length));
    const grid = this.parts.heads;
    grid.classList.toggle("compact", widest > 8);
    grid.style.setProperty("--heads", widest);
    grid.replaceChildren(...rows.flatMap((row, at) => [
      make("span", widest > 8 ? layers[at] : `layer ${layers[at]}`, { class: "layer" }),
      ...row.map((h) => this.headButton(h)),
      ...Array.from({ length: widest - row.length }, () => make("span")),
    ]));
  }

  headButton(h) {
    const life = h.half_life ? h.half_life.median : null;
    const words = h.half_life ? `half-life ${tokens(life)} tokens` : "does not forget";
    const label = `Layer ${h.layer}, head ${h.head}: ${words}`;
    const button = make("button", tokens(life), {
      type: "button", tabindex: "-1", "aria-pressed": "false", "data-place": name([h.layer, h.head]),
      "aria-label": label, title: label,
    });
    // The scale runs from 1 to 4096 tokens.
    const reach = life === null ? 1 : Math.min(1, Math.log2(Math.max(1, life)) / 12);
    button.style.setProperty("--reach", reach);
    return button;
  }

  headKey(event) {
    const buttons = [...this.parts.heads.querySelectorAll("button")];
    const at = buttons.indexOf(document.activeElement);
    const across = Number(getComputedStyle(this.parts.heads).getPropertyValue("--heads"));
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across }[event.key];
    const next = buttons[at + step];
    if (at < 0 || !next) return;
    event.preventDefault();
    next.focus();
    this.choose(next.dataset.place.split(",").map(Number));
  }

  step(by) {
    const heads = this.sorted();
    const at = heads.findIndex((h) => name([h.layer, h.head]) === name(this.chosen));
    const next = heads[Math.min(heads.length - 1, Math.max(0, at + by))];
    this.choose([next.layer, next.head]);
  }

  async choose(place) {
    this.chosen = place;
    for (const button of this.parts.heads.querySelectorAll("button")) {
      const isChosen = button.dataset.place === name(place);
      button.setAttribute("aria-pressed", String(isChosen));
      button.tabIndex = isChosen ? 0 : -1;
    }
    const h = this.seen.heads.find((h) => name([h.layer, h.head]) === name(place));
    const life = h.half_life;
    this.parts.headTitle.textContent = `Layer ${h.layer}, head ${h.head}`;
    this.parts.headLife.textContent = life
      ? `Half-life ${tokens(life.median)} tokens here (${tokens(life.low)} to ${tokens(life.high)}): ${life.reach}.`
      : "Does not forget.";
    const { seen } = this;
    if (!this.pictures.has(name(place))) {
      try {
        this.keep(await this.server.ask("/inspect", { prompt: this.text, head: place }));
      } catch (error) {
        return complain(this.parts.memoryError, error.message);
      }
    }
    // Another head or text may have been chosen meanwhile.
    if (this.seen !== seen || name(this.chosen) !== name(place)) return;
    this.draw();
    this.onHead();
  }

  get picture() {
    return this.pictures.get(name(this.chosen));
  }

  /// Tokens per cell of the square pictures.
  get unit() {
    return Math.ceil(this.seen.tokens.length / this.picture.attention.length);
  }

  positionOf(cell, unit) {
    return Math.min(this.seen.tokens.length - 1, cell * unit + unit - 1);
  }

  draw() {
    const { seen, picture, parts, unit } = this;
    const count = seen.tokens.length;
    const side = picture.attention.length;
    parts.forgetFigure.hidden = !picture.forget;
    if (picture.forget) this.forget.show({ rows: picture.forget, columns: side, color: "--fox", unit, tokens: count });
    // The first tokens have few keys, so the largest weights are uninformative: the colour scale saturates below them.
    const weights = picture.attention.flat().filter((x) => x > 0).sort((a, b) => a - b);
    const most = weights[Math.floor(0.995 * weights.length)] ?? 1;
    this.attention.show({
      rows: picture.attention, columns: side, color: "--look", strength: (x) => Math.sqrt(x / most),
      scale: ["0", short(most / 4), `≥${short(most)}`], unit, tokens: count,
    });
    const gates = seen.gates[this.chosen[0]] ?? [];
    parts.gatesFigure.hidden = gates.length === 0;
    if (gates.length) {
      this.gates.show({
        rows: gates, columns: gates[0].length, color: "--fox", strength: (gate) => Math.sqrt(1 - gate),
        scale: ["1", "0.75", "0"], unit: seen.tokens_per_column, tokens: count,
        names: gates.map((_, head) => `head ${head}`),
      });
    }
    this.drawPages(count);
    parts.gates.style.setProperty("--rows", gates.length);
    this.mark(this.position, this.position);
  }

  drawPages(count) {
    const { evicted_pages, pages, page_tokens } = this.seen.cache;
    const rows = evicted_pages[this.chosen[0]] ?? [];
    this.parts.pages.hidden = rows.length === 0;
    this.parts.pagesHint.textContent = rows.length
      ? `KV cache of the layer in pages of ${page_tokens} tokens: empty ones are evicted`
      : `A state of constant size covers all ${count} tokens.`;
    this.parts.pages.style.setProperty("--rows", rows.length);
    if (!rows.length) return;
    this.pages.show({
      rows: rows.map((gone) => Array.from({ length: pages }, (_, page) => (page < gone ? 0 : 1))), columns: pages,
      color: "--look", strength: (kept) => 0.7 * kept, scale: ["gone", "", "kept"], unit: page_tokens,
      names: rows.map((_, head) => `head ${head}`), tokens: count,
    });
  }

  setPosition(position) {
    this.position = position;
    if (!this.seen) return;
    this.parts.position.value = position;
    this.parts.at.textContent = `${position} of ${this.seen.tokens.length - 1}: “${this.seen.tokens[position]}”`;
    this.mark(position, position);
  }

  /// Marks a row (a later token) and a column (an earlier one) on every picture.
  mark(row, column) {
    if (!this.seen || !this.picture || row === null || column === null) return;
    const { unit, seen } = this;
    this.forget.mark(Math.floor(row / unit), Math.floor(column / unit));
    this.attention.mark(Math.floor(row / unit), Math.floor(column / unit));
    this.gates.mark(null, Math.floor(column / seen.tokens_per_column));
    this.pages.mark(null, Math.floor(column / seen.cache.page_tokens));
  }

  hoverSquare(row, column) {
    // Above the diagonal is the future.
    if (row === null || column > row) return this.onHover(null, null);
    this.onHover(this.positionOf(row, this.unit), this.positionOf(column, this.unit));
  }

  /// Decay (`memory`) or attention of the chosen head for every token up to `at`.
  async row(mode, at) {
    if (!this.picture) return null;
    if (mode === "memory") return this.left(at);
    if (this.unit === 1) return this.picture.attention[at];
    const { rows } = this;
    const key = `${name(this.chosen)},${at}`;
    if (!rows.has(key)) {
      // Debounced: keys may be held down.
      await new Promise((resolve) => setTimeout(resolve, 150));
      if (this.position !== at || this.rows !== rows) return null;
      const request = { prompt: this.text, head: this.chosen, position: at };
      try {
        rows.set(key, (await this.server.ask("/inspect", request)).attention);
      } catch (error) {
        complain(this.parts.memoryError, error.message);
      }
    }
    return rows.get(key) ?? null;
  }

  /// exp(c_i - c_j) for all j up to i: the products of the gates after j; all 1 without gates.
  left(at) {
    const { gates } = this.picture;
    const row = new Array(at + 1).fill(1);
    for (let j = at - 1; j >= 0 && gates.length; j--) row[j] = row[j + 1] * gates[j + 1];
    return row;
  }

  /// The values at a pair of positions, in a line.
  describe(row, column) {
    const { seen, picture } = this;
    if (!picture) return "";
    const values = [`${column}: “${seen.tokens[column]}”`];
    const gate = picture.gates[column];
    if (gate !== undefined) values.push(`gate ${gate.toFixed(4)}`);
    if (column <= row) {
      const share = this.left(row)[column];
      values.push(`at ${row}: “${seen.tokens[row]}” decayed to ${short(100 * share)}%`);
      const weight = picture.attention[Math.floor(row / this.unit)]?.[Math.floor(column / this.unit)];
      const where = this.unit > 1 ? ` to its ${this.unit} tokens` : "";
      if (weight !== undefined) values.push(`attention ${short(weight)}${where}`);
    } else {
      values.push(`comes after ${row}`);
    }
    return values.join(" · ");
  }
}
