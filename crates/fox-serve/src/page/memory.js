// What the model remembers of a text: half-lives, gates, decay, attention, cache pages.

import { complain, make, paint } from "./draw.js";

const $ = (id) => document.getElementById(id);
let seen = null; // what /inspect said last
let chosen = null; // [layer, head]
let pictures = new Map(); // by "layer,head"
let text = ""; // what was looked at

/// Looks at `prompt`; `ask` sends JSON and gives JSON.
export async function look(ask, prompt) {
  text = prompt;
  pictures = new Map();
  complain($("memory-error"));
  try {
    seen = await ask("/inspect", { prompt });
  } catch (error) {
    $("memory").hidden = true;
    $("cache").textContent = "";
    return complain($("memory-error"), error.message);
  }
  keepPictures(seen);
  $("memory").hidden = false;
  $("position").max = seen.tokens.length - 1;
  $("position").value = seen.tokens.length - 1;
  $("cache").textContent = `cache ${size(seen.cache.bytes)}; ${size(seen.cache.full_bytes)} if nothing were forgotten`;
  const known = chosen && seen.heads.some((h) => h.layer === chosen[0] && h.head === chosen[1]);
  if (!known) {
    // The one with the longest memory.
    const first = seen.pictures[seen.pictures.length - 1];
    chosen = [first.layer, first.head];
  }
  drawHeads(ask);
  await choose(ask, chosen);
}

function keepPictures(answer) {
  for (const p of answer.pictures) pictures.set(`${p.layer},${p.head}`, p);
}

function size(bytes) {
  return bytes < 1 << 20 ? `${(bytes / 1024).toFixed(1)} KiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
}

/// A number of tokens in few characters; JSON has no infinity, so that is null.
function tokens(count) {
  if (count === null || count === undefined || count >= 1e6) return "∞";
  if (count >= 1000) return `${(count / 1000).toFixed(1)}k`;
  return count >= 10 ? count.toFixed(0) : count.toFixed(1);
}

function drawHeads(ask) {
  const grid = $("heads");
  const widest = Math.max(...seen.heads.map((h) => h.head)) + 1;
  grid.style.gridTemplateColumns = `max-content repeat(${widest}, minmax(3rem, 1fr))`;
  grid.replaceChildren();
  for (const h of seen.heads) {
    if (h.head === 0) {
      const label = make("span", `layer ${h.layer}`, { class: "layer" });
      label.style.gridColumn = 1;
      grid.append(label);
    }
    const life = h.half_life ? h.half_life.median : null;
    const name = h.half_life ? `half-life ${tokens(life)} tokens` : "does not forget";
    const button = make("button", tokens(life), {
      type: "button", "aria-pressed": "false", "data-place": `${h.layer},${h.head}`,
      "aria-label": `Layer ${h.layer}, head ${h.head}: ${name}`,
    });
    // One token is nothing, 4096 is everything.
    const reach = life === null ? 1 : Math.min(1, Math.log2(Math.max(1, life)) / 12);
    button.style.setProperty("--reach", reach);
    button.addEventListener("click", () => choose(ask, [h.layer, h.head]));
    grid.append(button);
  }
}

async function choose(ask, place) {
  chosen = place;
  const name = place.join(",");
  for (const button of $("heads").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(button.dataset.place === name));
  }
  const h = seen.heads.find((h) => `${h.layer},${h.head}` === name);
  const life = h.half_life;
  $("head-title").textContent = `Layer ${h.layer}, head ${h.head}` + (life
    ? `: half-life ${tokens(life.low)} to ${tokens(life.high)} tokens, ${life.reach}` : "");
  drawStrips();
  drawPages();
  if (!pictures.has(name)) {
    try {
      keepPictures(await ask("/inspect", { prompt: text, head: place }));
    } catch (error) {
      return complain($("memory-error"), error.message);
    }
  }
  // Somebody may have chosen another one meanwhile.
  if (chosen.join(",") === name) drawPictures(pictures.get(name));
}

function drawPictures(picture) {
  $("forget").parentElement.hidden = !picture.forget;
  if (picture.forget) paint($("forget"), picture.forget, "--fox");
  paint($("attention"), picture.attention, "--look", Math.sqrt);
  read();
}

function drawStrips() {
  const box = $("strips");
  box.replaceChildren();
  const rows = seen.gates[chosen[0]] ?? [];
  rows.forEach((gates, head) => {
    const strip = make("div", "", { class: "strip" });
    const canvas = make("canvas", "", { role: "img", "aria-label": `Gates of head ${head}` });
    paint(canvas, [gates], "--fox", (gate) => Math.sqrt(1 - gate));
    strip.append(canvas, make("i"));
    const move = (event) => {
      if (event.type === "pointermove" && event.buttons === 0 && event.pointerType !== "mouse") return;
      const area = strip.getBoundingClientRect();
      const share = (event.clientX - area.left) / area.width;
      const at = Math.floor(share * seen.tokens.length);
      $("position").value = Math.min(seen.tokens.length - 1, Math.max(0, at));
      read();
    };
    strip.addEventListener("pointerdown", move);
    strip.addEventListener("pointermove", move);
    box.append(make("span", `head ${head}`), strip);
  });
}

function drawPages() {
  const { evicted_pages, pages, page_tokens, tokens: count } = seen.cache;
  const rows = evicted_pages[chosen[0]] ?? [];
  $("pages-hint").textContent = rows.length
    ? `A box is ${page_tokens} tokens of keys and values; dashed ones were provably forgotten and dropped.`
    : `A state of constant size covers all ${count} tokens.`;
  $("pages").replaceChildren(...rows.flatMap((gone, head) => {
    const row = make("div", "", { class: "page-row", role: "img", "aria-label": `${gone} of ${pages} pages dropped` });
    for (let i = 0; i < pages; i++) row.append(make("i", "", i < gone ? { class: "gone" } : {}));
    return [make("span", `head ${head}`), row, make("span", `${gone} of ${pages} dropped`)];
  }));
}

/// Reads the gates at the chosen position.
function read() {
  const at = Number($("position").value);
  const rows = seen.gates[chosen[0]] ?? [];
  const column = Math.floor(at / seen.tokens_per_column);
  const values = rows.map((gates, head) => `head ${head}: ${(gates[column] ?? 0).toFixed(3)}`);
  $("reading").textContent = `${at}: “${seen.tokens[at]}”  ` + values.join("  ");
  const share = `${(100 * (at + 0.5)) / seen.tokens.length}%`;
  for (const line of document.querySelectorAll(".strip i")) line.style.left = share;
}

$("position").addEventListener("input", read);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  if (!seen || $("memory").hidden) return;
  drawStrips();
  const picture = pictures.get(chosen.join(","));
  if (picture) drawPictures(picture);
});
