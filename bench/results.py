#!/usr/bin/env python3
"""Prints recorded measurements: bench/results/*.jsonl, one JSON object per figure.

    bench/results.py                  all of them, by file
    bench/results.py decode 'tokens/s'    those that contain every word
    bench/results.py --check          every line has date, machine, command, metric, value and unit

A new figure is a new line with the date, the machine, the exact command, what was measured, the number and its unit
(`1` where it has none); an old line is never edited. Needs Python 3.8 and nothing else.
"""

import json
import pathlib
import re
import signal
import sys

FIELDS = {"date": str, "machine": str, "command": str, "metric": str, "value": (int, float), "unit": str}


def read():
    for path in sorted((pathlib.Path(__file__).parent / "results").glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield path, number, json.loads(line)


def check():
    count = 0
    for path, number, figure in read():
        where = f"{path.name}:{number}"
        for field, kind in FIELDS.items():
            if not isinstance(figure.get(field), kind) or figure[field] == "":
                sys.exit(f"{where}: {field} is missing or has the wrong type")
        if unknown := figure.keys() - FIELDS.keys() - {"note"}:
            sys.exit(f"{where}: unknown fields {', '.join(sorted(unknown))}")
        if not re.fullmatch(r"20\d\d-\d\d-\d\d", figure["date"]):
            sys.exit(f"{where}: {figure['date']} is not a date like 2026-11-18")
        count += 1
    print(f"{count} figures")


def show(words):
    last = None
    for path, _, figure in read():
        if all(word.lower() in (path.stem + json.dumps(figure, ensure_ascii=False)).lower() for word in words):
            heading = (path.stem, figure["date"], figure["machine"], figure["command"])
            if heading != last:
                print(f"\n{figure['date']}  {figure['machine']}  [{path.stem}]\n  {figure['command']}")
                last = heading
            note = f"  ({figure['note']})" if "note" in figure else ""
            print(f"{figure['value']:>14,} {figure['unit']:<10} {figure['metric']}{note}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if sys.argv[1:] == ["--check"]:
        check()
    elif sys.argv[1:2] and sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    else:
        show(sys.argv[1:])
