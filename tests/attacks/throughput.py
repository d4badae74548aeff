#!/usr/bin/env python3
"""Decode throughput of `fox generate` and `fox serve` with a large tokenizer against the byte tokenizer.

Both run the same checkpoint (see make_model.py), so the output projection costs the same. Runs alternate, and the best
of each is reported, together with the longest `/health` while requests with log-probabilities run. On a machine with
other work compare processor time per token, which the second table reports, rather than tokens per second.

Usage: throughput.py FOX [REPEATS]
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
TOKENIZERS = {"151,936 ids": [], "bytes": ["--tokenizer", "bytes"]}


def generate(fox, model, flags, repeats=3):
    """Tokens per second until the text is printed, as the command reports them, and processor seconds per token: the
    least of 900 tokens less the least of 100, so that loading and prefill do not count. One thread, because idle
    threads that wait for work would count as well."""
    used, rate = {900: [], 100: []}, 0.0
    for tokens in [900, 100] * repeats:
        command = [fox, "generate", model, "-p", "the fox", "-m", str(tokens), "-t", "0", "--ignore-end",
                   "--threads", "1", *flags]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run(command, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used[tokens].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        rate = max(rate, float(re.search(r"([\d.]+) tokens/s", result.stderr.decode()).group(1)))
    return rate, (min(used[900]) - min(used[100])) / 800


class Server:
    def __init__(self, fox, model, flags):
        command = [fox, "serve", model, "--port", "0", "--cache", "1", "--max-batch", "64", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url = re.search(r"http://[\d.:]+", self.process.stderr.readline()).group(0)

    def stop(self):
        self.process.terminate()
        self.process.wait(60)

    def processor_seconds(self):
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def complete(self, body):
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=600).read()

    def load(self, requests, tokens, **fields):
        """Tokens per second of concurrent requests, processor seconds per token, the longest `/health` meanwhile."""
        body = {"prompt": "the fox", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}
        threads = [threading.Thread(target=self.complete, args=(body,)) for _ in range(requests)]
        start, used = time.monotonic(), self.processor_seconds()
        for thread in threads:
            thread.start()
        worst = 0.0
        while any(thread.is_alive() for thread in threads):
            before = time.monotonic()
            urllib.request.urlopen(f"{self.url}/health", timeout=600).read()
            worst = max(worst, time.monotonic() - before)
            time.sleep(0.02)
        count = requests * tokens
        return count / (time.monotonic() - start), (self.processor_seconds() - used) / count, worst


def table(title, values):
    print(f"{title:34}" + "".join(f"{name:>14}" for name in TOKENIZERS) + "   ratio")
    for what in dict.fromkeys(what for what, _ in values):
        row = [values[what, name] for name in TOKENIZERS]
        print(f"{what:34}" + "".join(f"{value:14.3f}" for value in row) + f"{row[0] / row[1]:8.3f}")


def main():
    fox, repeats = sys.argv[1], int((sys.argv[2:] or ["3"])[0])
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        subprocess.run([sys.executable, HERE / "make_model.py", model], check=True)
        best, least, slowest = {}, {}, {}
        for _ in range(repeats):
            for name, flags in TOKENIZERS.items():
                results = {"generate": generate(fox, model, flags)}
                server = Server(fox, model, flags)
                for requests in [8, 64]:
                    results[f"serve, {requests} requests"] = server.load(requests, 40, stream=True)
                results["serve, 64 requests, logprobs 20"] = server.load(64, 20, logprobs=20)
                slowest[name] = max(slowest.get(name, 0.0), results["serve, 64 requests, logprobs 20"][2])
                server.stop()
                for what, (rate, seconds, *_) in results.items():
                    best[what, name] = max(best.get((what, name), 0.0), rate)
                    least[what, name] = min(least.get((what, name), 1e9), seconds)
    table(f"tokens/s, best of {repeats}", best)
    table(f"processor ms/token, least of {repeats}", {key: 1000 * seconds for key, seconds in least.items()})
    for name, seconds in slowest.items():
        print(f"/health with {name}, 64 requests with log-probabilities: at most {1000 * seconds:.0f} ms")


main()
