"""Compares `fox eval tasks` with lm-evaluation-harness, item by item.

    python -m venv /tmp/lm-eval && /tmp/lm-eval/bin/pip install 'lm-eval[api]'
    cargo build --release -p fox
    /tmp/lm-eval/bin/python bench/lm_eval_agreement.py MODEL

from the root of the repository. The harness runs its own definitions of the tasks (prompts, cleaning, metrics)
against `fox serve`; `fox eval tasks` runs its task files without a server. Both read the items of
bench/agreement. Every log-likelihood and every figure must agree to 1e-6 (relatively where they are above 1),
and every greedy flag exactly. The items are asked twice: as they are, and cut to few tokens, so that truncation and
rolling windows are compared too.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import urllib.request

TASKS = {
    "wikitext": "wikitext/wikitext.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml",
    "piqa": "piqa/piqa.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "winogrande": "winogrande/default.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "copa": "super_glue/copa/default.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "sciq": "sciq/sciq.yaml",
    "boolq": "super_glue/boolq/default.yaml",
}
TOLERANCE = 1e-6


def start_server(fox, model):
    """A server on a free port; the process and its address."""
    process = subprocess.Popen([fox, "serve", model, "--port", "0"], stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if " at http://" in line:
            return process, line.split(" at ")[1].split(" ")[0]
    sys.exit(f"{fox} serve {model} did not start")


def write_tasks(folder, items):
    """The harness's own tasks on our items."""
    package = pathlib.Path(importlib.util.find_spec("lm_eval").origin).parent / "tasks"
    for name, path in TASKS.items():
        task = {
            "include": str(package / path),
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": str(items / f"{name}.jsonl")}},
            "training_split": None,
            "validation_split": None,
            "test_split": "test",
        }
        (folder / f"local_{name}.yaml").write_text(json.dumps(task))


def harness(url, folder, length):
    """Results and samples of the harness, by task."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    def ask(path):
        with urllib.request.urlopen(f"{url}/{path}") as reply:
            return json.load(reply)

    arguments = {
        "model": ask("v1/models")["data"][0]["id"],
        # Not every tokenizer has a text for its start marker, by which the client would look for it.
        "custom_prefix_token_id": ask("tokenizer_info")["bos_token_id"],
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "remote",
        # The client keeps one token for the answer, and one more for rolling windows.
        "max_length": length + 2,
        "num_concurrent": 1,
    }
    answer = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=[f"local_{name}" for name in TASKS],
        batch_size=8,
        task_manager=TaskManager(include_path=str(folder)),
        log_samples=True,
        bootstrap_iters=0,
    )
    return answer["results"], answer["samples"]


def ours(fox, model, items, out, length):
    """Results and samples of fox, by task."""
    command = [fox, "eval", "tasks", f"m={model}", "--task-data", str(items), "--out", str(out)]
    command += ["--max-length", str(length), "--tasks", ",".join(TASKS), "--json"]
    results = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    figures = {r["task"]: {f["metric"]: f["value"] for f in r["figures"]} for r in results["results"]}
    lines = lambda name: (out / f"m.{name}.samples.jsonl").read_text().splitlines()
    return figures, {name: [json.loads(line) for line in lines(name)] for name in TASKS}


def likelihoods(sample):
    """Log-likelihoods and greedy flags of a sample of fox; a whole text has no flag in the harness."""
    if "log_probs" in sample:
        return list(zip(sample["log_probs"], sample["greedy"]))
    return [(sample["log_prob"], sample["greedy"])]


def theirs(sample):
    """The same of a sample of the harness."""
    return [r if isinstance(r, (tuple, list)) else (r, None) for r in (resp[0] for resp in sample["resps"])]


def difference(value, expected):
    """Relative above 1: a log-likelihood is a sum of f32 logits, whose last bits depend on the batch."""
    return abs(value - expected) / max(1.0, abs(expected))


def compare(length, results, samples, figures, found):
    """Prints the largest differences; whether all are small."""
    good = True
    for name in TASKS:
        task = f"local_{name}"
        worst, flags, count = 0.0, 0, 0
        ordered = sorted(samples[task], key=lambda s: s["doc_id"])
        for sample, mine in zip(ordered, found[name], strict=True):
            for (theirs_ll, theirs_flag), (ll, flag) in zip(theirs(sample), likelihoods(mine), strict=True):
                worst = max(worst, difference(ll, float(theirs_ll)))
                flags += theirs_flag is not None and (str(theirs_flag) == "True") != flag
                count += 1
        metrics = 0.0
        for metric, value in figures[name].items():
            metrics = max(metrics, difference(value, results[task][f"{metric},none"]))
        fine = worst <= TOLERANCE and flags == 0 and metrics <= TOLERANCE
        good &= fine
        verdict = "ok" if fine else "DIFFERS"
        print(f"length {length:4} {name:16}{count:4} likelihoods {worst:.1e}  metrics {metrics:.1e}  {verdict}")
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint or run folder")
    parser.add_argument("--fox", default="target/release/fox", help="the binary")
    parser.add_argument("--serve", help="another binary for the server")
    parser.add_argument("--lengths", default="256,24")
    args = parser.parse_args()
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    items = pathlib.Path(__file__).resolve().parent / "agreement"
    good = True
    for length in map(int, args.lengths.split(",")):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            write_tasks(folder, items)
            process, url = start_server(args.serve or args.fox, args.model)
            try:
                results, samples = harness(url, folder, length)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait()
            figures, found = ours(args.fox, args.model, items, folder / "out", length)
            good &= compare(length, results, samples, figures, found)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
