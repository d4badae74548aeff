// Pictures: numbers as colours on a canvas, with axes, a scale, a cross-hair, and values under the pointer.

/// An element with text and attributes.
export function make(tag, text = "", attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/// Shows a sentence in an alert, or hides the alert.
export function complain(element, words) {
  element.textContent = words ?? "";
  element.hidden = !words;
}

/// A number in few characters.
export function short(value) {
  if (!Number.isFinite(value)) return "not a number";
  if (value < 1e-9) return "0";
  if (value >= 0.001) return value.toFixed(3).replace(/0+$/, "").replace(/\.$/, "");
  return value.toExponential(1);
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/// A colour of the style sheet as [red, green, blue].
function ink(name) {
  const context = document.createElement("canvas").getContext("2d");
  context.fillStyle = style(name);
  context.fillRect(0, 0, 1, 1);
  return context.getImageData(0, 0, 1, 1).data;
}

const FONT = 11;
const MARGIN = { left: 34, top: 6, bottom: 20, right: 54 };

/// A table of numbers on a canvas.
export class Picture {
  /// `onHover(row, column)` gets the cell under the pointer, or nulls; `onPick` the one that was clicked.
  constructor(canvas, { onHover, onPick }) {
    Object.assign(this, { canvas, onHover, onPick, data: null, cross: null });
    const cell = (event) => {
      const area = canvas.getBoundingClientRect();
      return this.cellAt(event.clientX - area.left, event.clientY - area.top);
    };
    canvas.addEventListener("pointermove", (event) => this.onHover(...(cell(event) ?? [null, null])));
    canvas.addEventListener("pointerleave", () => this.onHover(null, null));
    canvas.addEventListener("click", (event) => {
      const at = cell(event);
      if (at) this.onPick(...at);
    });
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  /// Shows `rows` of numbers (shorter rows end early, `null` is not drawn). `strength` maps a number to 0..1 of `color`;
  /// `scale` has the labels of no colour, half of it and all of it. `unit` is the number of tokens per cell, along both
  /// axes of a square picture; `names` has the labels of rows other than positions.
  show({ rows, columns, color, strength = (x) => x, scale = ["0", "0.5", "1"], unit = 1, names = null, tokens }) {
    this.data = { rows, columns, color, strength, scale, unit, names, tokens };
    const image = new ImageData(Math.max(1, columns), Math.max(1, rows.length));
    const [red, green, blue] = ink(color);
    rows.forEach((row, y) => row.forEach((value, x) => {
      if (value === null || !Number.isFinite(value)) return;
      const alpha = Math.round(255 * Math.min(1, Math.max(0, strength(value))));
      image.data.set([red, green, blue, alpha], 4 * (y * columns + x));
    }));
    this.cells = document.createElement("canvas");
    this.cells.width = image.width;
    this.cells.height = image.height;
    this.cells.getContext("2d").putImageData(image, 0, 0);
    this.draw();
  }

  /// Marks a row and a column of cells.
  mark(row, column) {
    this.cross = [row, column];
    this.draw();
  }

  area() {
    const left = this.data.names ? 54 : MARGIN.left;
    return [left, MARGIN.top, Math.max(1, this.canvas.clientWidth - left - MARGIN.right),
      Math.max(1, this.canvas.clientHeight - MARGIN.top - MARGIN.bottom)];
  }

  cellAt(x, y) {
    if (!this.data) return null;
    const [left, top, width, height] = this.area();
    const column = Math.floor(((x - left) / width) * this.data.columns);
    const row = Math.floor(((y - top) / height) * this.data.rows.length);
    const inside = row >= 0 && row < this.data.rows.length && column >= 0 && column < this.data.columns;
    return inside ? [row, column] : null;
  }

  draw() {
    const { canvas, data } = this;
    if (!data || canvas.clientWidth === 0) return;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(canvas.clientHeight * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const [left, top, width, height] = this.area();
    context.imageSmoothingEnabled = false;
    context.drawImage(this.cells, left, top, width, height);
    context.strokeStyle = style("--line");
    context.strokeRect(left - 0.5, top - 0.5, width + 1, height + 1);
    this.drawAxes(context, [left, top, width, height]);
    this.drawScale(context, left + width + 8, top, height);
    if (this.cross) this.drawCross(context, [left, top, width, height]);
  }

  drawAxes(context, [left, top, width, height]) {
    const { rows, columns, names, tokens, unit } = this.data;
    context.fillStyle = style("--quiet");
    context.font = `${FONT}px system-ui, sans-serif`;
    context.textBaseline = "top";
    context.textAlign = "center";
    const ticks = [...new Set([0, Math.floor((tokens - 1) / 2), tokens - 1])];
    for (const at of ticks) {
      const half = context.measureText(at).width / 2;
      const x = left + ((at + 0.5) / (unit * columns)) * width;
      context.fillText(at, Math.min(left + width - half, Math.max(left + half, x)), top + height + 5);
    }
    context.textAlign = "right";
    context.textBaseline = "middle";
    const step = names ? Math.ceil(rows.length / Math.max(1, Math.floor(height / (FONT + 2)))) : 1;
    const labels = names
      ? names.map((name, row) => [name, row + 0.5]).filter((_, row) => row % step === 0)
      : ticks.map((at) => [at, (at + 0.5) / unit]);
    for (const [name, row] of labels) {
      const y = top + (row / rows.length) * height;
      context.fillText(name, left - 5, Math.min(top + height - FONT / 2, Math.max(top + FONT / 2, y)));
    }
  }

  drawScale(context, left, top, height) {
    const { color, scale } = this.data;
    const ramp = context.createLinearGradient(0, top + height, 0, top);
    const [red, green, blue] = ink(color);
    ramp.addColorStop(0, `rgba(${red}, ${green}, ${blue}, 0)`);
    ramp.addColorStop(1, `rgb(${red}, ${green}, ${blue})`);
    context.fillStyle = ramp;
    context.fillRect(left, top, 8, height);
    context.strokeRect(left - 0.5, top - 0.5, 9, height + 1);
    context.fillStyle = style("--quiet");
    context.textAlign = "left";
    context.textBaseline = "bottom";
    context.fillText(scale[0], left + 11, top + height);
    context.textBaseline = "middle";
    if (height > 4 * FONT) context.fillText(scale[1], left + 11, top + height / 2);
    context.textBaseline = "top";
    context.fillText(scale[2], left + 11, top);
  }

  drawCross(context, [left, top, width, height]) {
    const [row, column] = this.cross;
    const { rows, columns } = this.data;
    context.strokeStyle = style("--mark");
    // The outline of the cells, or a line where they are too small for one.
    const band = (x, y, wide, high) => {
      if (Math.min(wide, high) >= 4) return context.strokeRect(x, y, wide, high);
      context.beginPath();
      context.moveTo(...(wide < high ? [x + wide / 2, y] : [x, y + high / 2]));
      context.lineTo(...(wide < high ? [x + wide / 2, y + high] : [x + wide, y + high / 2]));
      context.stroke();
    };
    if (row !== null) band(left, top + (row / rows.length) * height, width, height / rows.length);
    if (column !== null) band(left + (column / columns) * width, top, width / columns, height);
  }
}
