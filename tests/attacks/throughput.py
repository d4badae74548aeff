#!/usr/bin/env python3
"""Decode throughput of `fox generate` and `fox serve` with a large tokenizer against the byte tokenizer.

Both run the same checkpoint (see make_model.py), so the output projection costs the same. Runs alternate, and the best
of each is reported, together with the longest `/health` while requests with log-probabilities run.

Usage: throughput.py FOX [REPEATS]
"""

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
TOKENIZERS = {"151,936 ids": [], "bytes": ["--tokenizer", "bytes"]}


def generate(fox, model, flags):
    """Tokens per second until the text is printed, as the command reports them."""
    command = [fox, "generate", model, "-p", "the fox", "-m", "300", "-t", "0", "--ignore-end", *flags]
    result = subprocess.run(command, capture_output=True, check=True)
    return float(re.search(r"([\d.]+) tokens/s", result.stderr.decode()).group(1))


class Server:
    def __init__(self, fox, model, flags):
        command = [fox, "serve", model, "--port", "0", "--cache", "1", "--max-batch", "64", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url = re.search(r"http://[\d.:]+", self.process.stderr.readline()).group(0)

    def stop(self):
        self.process.terminate()
        self.process.wait(60)

    def complete(self, body):
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=600).read()

    def load(self, requests, tokens, **fields):
        """Tokens per second of concurrent requests, and the longest `/health` meanwhile."""
        body = {"prompt": "the fox", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}
        threads = [threading.Thread(target=self.complete, args=(body,)) for _ in range(requests)]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        worst = 0.0
        while any(thread.is_alive() for thread in threads):
            before = time.monotonic()
            urllib.request.urlopen(f"{self.url}/health", timeout=600).read()
            worst = max(worst, time.monotonic() - before)
            time.sleep(0.02)
        return requests * tokens / (time.monotonic() - start), worst


def main():
    fox, repeats = sys.argv[1], int((sys.argv[2:] or ["3"])[0])
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        subprocess.run([sys.executable, HERE / "make_model.py", model], check=True)
        best, slowest = {}, {}
        for _ in range(repeats):
            for name, flags in TOKENIZERS.items():
                rates = {"generate": generate(fox, model, flags)}
                server = Server(fox, model, flags)
                for requests in [8, 64]:
                    rates[f"serve, {requests} requests"], _ = server.load(requests, 40, stream=True)
                rate, health = server.load(64, 20, logprobs=20)
                rates["serve, 64 requests, logprobs 20"] = rate
                slowest[name] = max(slowest.get(name, 0.0), health)
                server.stop()
                for what, rate in rates.items():
                    best[what, name] = max(best.get((what, name), 0.0), rate)
    print(f"{'tokens/s, best of ' + str(repeats):34}" + "".join(f"{name:>14}" for name in TOKENIZERS) + "   ratio")
    for what in dict.fromkeys(what for what, _ in best):
        rates = [best[what, name] for name in TOKENIZERS]
        print(f"{what:34}" + "".join(f"{rate:14.1f}" for rate in rates) + f"{rates[0] / rates[1]:8.3f}")
    for name, seconds in slowest.items():
        print(f"/health with {name}, 64 requests with log-probabilities: at most {1000 * seconds:.0f} ms")


main()
