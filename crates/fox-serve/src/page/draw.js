// Pictures: one pixel per number, scaled by the style sheet.

/// The colour called `name` in the style sheet, as [red, green, blue].
function ink(name) {
  const context = document.createElement("canvas").getContext("2d");
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  context.fillRect(0, 0, 1, 1);
  return context.getImageData(0, 0, 1, 1).data;
}

/// Paints `rows` of numbers from 0 (nothing) to 1 (full colour); shorter rows end early.
export function paint(canvas, rows, color, strength = (x) => x) {
  const width = Math.max(1, ...rows.map((row) => row.length));
  canvas.width = width;
  canvas.height = Math.max(1, rows.length);
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const [red, green, blue] = ink(color);
  rows.forEach((row, y) => row.forEach((value, x) => {
    const alpha = Math.round(255 * Math.min(1, Math.max(0, strength(value ?? 0))));
    image.data.set([red, green, blue, alpha], 4 * (y * width + x));
  }));
  context.putImageData(image, 0, 0);
}

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
