"""Runs lm-evaluation-harness against `fox serve`.

    python -m venv /tmp/lm-eval && /tmp/lm-eval/bin/pip install 'lm-eval[api]'
    cargo build --release -p fox
    /tmp/lm-eval/bin/python bench/lm_eval_local.py runs/tiny-fox-pro

from the root of the repository starts a server for the model, runs the small tasks of bench/tasks through the
harness's own `local-completions` client, prints its results and stops the server. The items are files in the
repository, so nothing is downloaded. The harness takes the tokenizer from the server.

The real tasks are run in the same way, with whatever they download:

    /tmp/lm-eval/bin/python bench/lm_eval_local.py MODEL --tasks lambada_openai,piqa --batch-size 64 --concurrent 8
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request


def start_server(fox, model):
    """A server on a free port; the process and its address."""
    command = [fox, "serve", model, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        sys.stderr.write(line)
        if " at http://" in line:
            return process, line.split(" at ")[1].split(" ")[0]
    sys.exit(f"{' '.join(command)} did not start")


def evaluate(url, tasks, batch_size, concurrent):
    """The harness's results, by task."""
    # Local files only, unless a real task is named.
    if all(task.startswith("fox_") for task in tasks):
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import lm_eval
    from lm_eval.tasks import TaskManager

    with urllib.request.urlopen(f"{url}/v1/models") as reply:
        card = json.load(reply)["data"][0]
    arguments = {
        "model": card["id"],
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "remote",
        "max_length": card["max_model_len"] - 1,
        "num_concurrent": concurrent,
    }
    answer = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=tasks,
        batch_size=batch_size,
        task_manager=TaskManager(include_path="bench/tasks"),
    )
    return answer["results"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint or run folder")
    parser.add_argument("--fox", default="target/release/fox", help="the binary")
    parser.add_argument("--tasks", default="fox_needles,fox_last_word,fox_texts")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--concurrent", type=int, default=1, help="requests at a time")
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()
    process, url = start_server(args.fox, args.model)
    try:
        start = time.time()
        results = evaluate(url, args.tasks.split(","), args.batch_size, args.concurrent)
        seconds = time.time() - start
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    for task, metrics in results.items():
        for name, value in metrics.items():
            if name.endswith(",none") and isinstance(value, float):
                print(f"{task:16} {name.removesuffix(',none'):24} {value:.6f}")
    print(f"{seconds:.1f} s; the server ended with {code}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1, default=str)


if __name__ == "__main__":
    main()
