#!/usr/bin/env python3
"""Draws docs/pictures/ahead.svg from bench/results/gate-init.jsonl: loss of FoX less that of the Transformer of the same
seed, by position. Usage: docs/pictures/ahead.py"""
import json
import math
import pathlib
import re

root = pathlib.Path(__file__).resolve().parent.parent.parent
BINS = ["64..127", "128..255", "256..511", "512..1023", "1024..2047", "2048..4095", "4096..8191", "8192..16383"]
T_975 = {2: 12.706, 3: 4.303}  # Student's t for 95% intervals over this many seeds

losses = {}
for line in (root / "bench/results/gate-init.jsonl").read_text().splitlines():
    record = json.loads(line)
    found = re.fullmatch(r"(.*), books, (\d+)M, batch 8, seed (\d), loss at (.*)", record["metric"])
    if found:
        losses[found[1], int(found[2]), int(found[3]), found[4]] = record["value"]


def differences(model, tokens):
    """Mean and half of the 95% interval (None: one seed) of loss(model) - loss(Transformer), for every bin."""
    rows = []
    for span in BINS:
        values = [losses[model, tokens, seed, span] - losses["Transformer (Pro), RoPE 500,000", tokens, seed, span]
                  for seed in range(3) if (model, tokens, seed, span) in losses]
        mean = sum(values) / len(values)
        half = None
        if len(values) > 1:
            variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
            half = T_975[len(values)] * math.sqrt(variance / len(values))
        rows.append((mean, half))
    return rows


SERIES = [
    ("FoX, published start, 60M bytes", differences("FoX (Pro), published start", 60), "s1", "5 4"),
    ("FoX, spread start, 60M bytes", differences("FoX (Pro), spread start", 60), "s0", "5 4"),
    ("FoX, spread start, 150M bytes", differences("FoX (Pro), spread start", 150), "s0", ""),
]
LEFT, RIGHT, TOP, BOTTOM, WIDTH, HEIGHT = 76, 16, 84, 52, 640, 380
LOW, HIGH = -0.08, 0.08
x = lambda i: LEFT + (WIDTH - LEFT - RIGHT) * (i + 0.5) / len(BINS)
y = lambda v: TOP + (HEIGHT - TOP - BOTTOM) * (HIGH - v) / (HIGH - LOW)
light = "--ink:#1d2329;--dim:#66707a;--grid:#e3e7eb;--paper:#ffffff;--s0:#d9480f;--s1:#1c6fd1"
dark = "--ink:#e8eaed;--dim:#9aa4ae;--grid:#2d343b;--paper:#12161a;--s0:#ff8a4c;--s1:#6cb2ff"
out = [
    f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
    'aria-label="Loss of FoX less that of the Transformer, by position">',
    f"<style>:root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:var(--ink)}.dim{fill:var(--dim)}"
    ".title{font-weight:600;font-size:15px}.grid{stroke:var(--grid)}.zero{stroke:var(--ink);stroke-width:1.5}"
    ".mark{stroke:var(--dim);stroke-dasharray:4 3}.line{fill:none;stroke-width:2.2}</style>",
    '<rect width="100%" height="100%" style="fill:var(--paper)"/>',
    f'<text class="title" x="{LEFT}" y="20">Loss of FoX less that of the Transformer; below 0, FoX is better</text>',
]
for n, (name, _, color, dashes) in enumerate(SERIES):
    left, top = LEFT + (n % 2) * 280, 40 + (n // 2) * 20
    out.append(f'<line x1="{left}" x2="{left + 26}" y1="{top}" y2="{top}" class="line" style="stroke:var(--{color})" '
               f'stroke-dasharray="{dashes}"/><text x="{left + 32}" y="{top + 4}">{name}</text>')
for step in range(-8, 9, 2):
    value = step / 100
    kind = "zero" if step == 0 else "grid"
    out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" class="{kind}"/>')
    out.append(f'<text class="dim" x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:+.2f}</text>'.replace("+0.00", "0"))
for i, span in enumerate(BINS):
    first, last = span.split("..")
    label = f"{first}..{last}" if int(last) < 1024 else f"{int(first) // 1024}k..{(int(last) + 1) // 1024}k"
    out.append(f'<text class="dim" x="{x(i):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{label}</text>')
out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">position in the sequence (bytes)</text>')
end = (x(5) + x(6)) / 2
out.append(f'<line x1="{end}" x2="{end}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="mark"/>'
           f'<text class="dim" x="{end - 6}" y="{HEIGHT - BOTTOM - 8}" text-anchor="end">training length</text>')
out.append(f'<text class="dim" x="{WIDTH - RIGHT - 4}" y="{y(0) - 6:.1f}" text-anchor="end">Transformer (Pro), RoPE</text>')
middle = (TOP + HEIGHT - BOTTOM) / 2
out.append(f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">nats per byte</text>')
for n, (_, rows, color, dashes) in enumerate(SERIES):
    shift = (n - 1) * 5
    points = " ".join(f"{x(i) + shift:.1f},{y(mean):.1f}" for i, (mean, _) in enumerate(rows))
    out.append(f'<polyline points="{points}" class="line" style="stroke:var(--{color})" stroke-dasharray="{dashes}"/>')
    for i, (mean, half) in enumerate(rows):
        center = x(i) + shift
        if half is not None:
            out.append(f'<line x1="{center:.1f}" x2="{center:.1f}" y1="{y(min(mean + half, HIGH)):.1f}" '
                       f'y2="{y(max(mean - half, LOW)):.1f}" style="stroke:var(--{color});stroke-width:1.4"/>')
        out.append(f'<circle cx="{center:.1f}" cy="{y(mean):.1f}" r="3.2" style="fill:var(--{color})"/>')
out.append("</svg>")
(root / "docs/pictures/ahead.svg").write_text("\n".join(out) + "\n")
for name, rows, _, _ in SERIES:
    print(f"{name:34}", "  ".join(f"{m:+.3f}" + (f" ± {h:.3f}" if h is not None else "") for m, h in rows))
