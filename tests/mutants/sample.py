#!/usr/bin/env python3
"""A random sample of cargo-mutants' mutants, all planted at once and selected at run time.

    tests/mutants/sample.py                       plant, build, run, print the table
    tests/mutants/sample.py --per-crate 5         fewer mutants
    tests/mutants/sample.py --build               only plant and build
    tests/mutants/sample.py --report              only the table and the survivors of the last run

`cargo mutants` builds the workspace again for every mutant. Here the mutants of its list are compiled into one build,
each behind `fox_mutant(N)`, which compares N with the environment variable FOX_MUTANT. Every test is run once without a
mutant to record which mutants it reaches; then each mutant runs only the tests that reach it, shortest first, those of
its own crate before those of other crates, until one fails. A failure counts if the same test passes again without the
mutant. A test that takes ten times as long as without the mutant, plus 30 seconds, counts as a failure as well.

Works on a copy of the last commit in TARGET/mutants/sample; progress is kept there in state.json, and a second call
resumes. Needs cargo-mutants (`cargo install cargo-mutants --locked`), Python 3.11, and from PyPI tree-sitter and
tree-sitter-rust. The variable CARGO names another command that builds.
"""

import argparse
import concurrent.futures
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import planting

ROOT = Path(__file__).resolve().parent.parent.parent
WORK = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve() / "mutants" / "sample"
TREE, BUILD, STATE = WORK / "tree", WORK / "build", WORK / "state.json"
CARGO = os.environ.get("CARGO", "cargo")
CRATES = ["fox-cache", "fox-data", "fox-dist", "fox-eval", "fox-infer", "fox-model", "fox-serve", "fox-train"]
# Tests of this crate run the executable: for the mutants that the library tests do not catch.
DEPENDENT = "fox"


def cargo(*arguments, **options):
    environment = {**os.environ, "CARGO_TARGET_DIR": str(BUILD), "CARGO_INCREMENTAL": "1"}
    return subprocess.run([CARGO, *arguments], cwd=TREE, env=environment, text=True, **options)


def packages(crates):
    """Flags that select crates, with the features of the default build of the executable."""
    flags = [word for crate in crates for word in ("-p", crate)]
    return [*flags, "--features", "fox-data/hf-tokenizers"] if "fox-data" in crates else flags


def save(state):
    new = STATE.with_suffix(".new")
    new.write_text(json.dumps(state, indent=1))
    new.rename(STATE)


def draw(per_crate, seed):
    """Mutants of every crate in random order: those to plant first, then the reserve."""
    mutants = []
    for crate in CRATES:
        done = subprocess.run(["cargo", "mutants", "--list", "--json", "-p", crate], cwd=TREE, check=True, text=True,
                              stdout=subprocess.PIPE)
        listed = sorted(json.loads(done.stdout), key=lambda m: (m["file"], m["name"]))
        random.Random(f"{seed} {crate}").shuffle(listed)
        for rank, mutant in enumerate(listed):
            mutants.append({"crate": crate, "of": len(listed), "rank": rank, "file": mutant["file"],
                            "name": mutant["name"], "genre": mutant["genre"], "span": mutant["span"],
                            "replacement": mutant["replacement"]})
    # Three times the sample: a reserve for mutants that cannot be planted or do not compile.
    mutants = [m for m in mutants if m["rank"] < 3 * per_crate]
    for number, mutant in enumerate(mutants, 1):
        mutant["number"] = number
        mutant["status"] = "waiting"
    return mutants


def select(mutants, per_crate):
    """The mutants to plant: per crate the first in random order that were not dropped."""
    chosen = []
    for crate in CRATES:
        usable = [m for m in mutants if m["crate"] == crate and not m["status"].startswith("dropped")]
        chosen += sorted(usable, key=lambda m: m["rank"])[:per_crate]
    return chosen


def plant_all(state, per_crate):
    """Plants the sample; drops what cannot be planted or does not compile until the rest does."""
    mutants = state["mutants"]
    while True:
        save(state)
        chosen = select(mutants, per_crate)
        subprocess.run(["git", "checkout", "-q", "--", "crates"], cwd=TREE, check=True)
        if any([planting.plant(TREE, path, [m for m in chosen if m["file"] == path])
                for path in sorted({m["file"] for m in chosen})]):
            continue
        for crate in CRATES:
            planting.add_switch(TREE / "crates" / crate / "src" / "lib.rs")
        done = cargo("check", "--message-format=json", "--keep-going", *packages(CRATES), stdout=subprocess.PIPE)
        if done.returncode == 0:
            state["planted"] = True
            return save(state)
        messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        errors = [m["message"] for m in messages
                  if m["reason"] == "compiler-message" and m["message"]["level"] == "error"]
        culprits = {number for error in errors for number in planting.blame(TREE, error)}
        if not culprits:
            sys.exit("errors outside of the mutants:\n" + "\n".join(e["rendered"] or "" for e in errors))
        print(f"{len(culprits)} mutants do not compile", flush=True)
        for mutant in mutants:
            if mutant["number"] in culprits:
                mutant["status"] = "dropped: does not compile"


def build(crates):
    """Test executables of the crates, as `(crate, executable)`."""
    done = cargo("test", "--no-run", "--message-format=json", *packages(crates), check=True, stdout=subprocess.PIPE)
    found = []
    for line in done.stdout.splitlines():
        message = json.loads(line) if line.startswith("{") else {}
        if message.get("executable") and message["profile"]["test"]:
            manifest = Path(message["manifest_path"])
            found.append((manifest.parent.name, message["executable"]))
    return found


def run_test(test, mutant=0, timeout=600.0, trace=None):
    """Seconds that a test took if it passed, else None."""
    folder = TREE / "crates" / test["crate"]
    environment = {**os.environ, "FOX_MUTANT": str(mutant), "CARGO_MANIFEST_DIR": str(folder)}
    if trace:
        environment["FOX_MUTANT_TRACE"] = trace
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        environment["TMPDIR"] = scratch
        process = subprocess.Popen([test["executable"], "--exact", test["name"]], cwd=folder, env=environment,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   start_new_session=True)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = 1
        # Also what the test started: a server, other ranks.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    return time.monotonic() - start if code == 0 else None


def baseline(executables, pool):
    """Every test once without a mutant: its time and the mutants that it reaches."""
    tests = []
    for crate, executable in executables:
        folder = TREE / "crates" / crate
        done = subprocess.run([executable, "--list", "--format", "terse"], cwd=folder, text=True, check=True,
                              stdout=subprocess.PIPE)
        names = [line.removesuffix(": test") for line in done.stdout.splitlines() if line.endswith(": test")]
        tests += [{"crate": crate, "executable": executable, "name": name} for name in names]

    def measure(test):
        with tempfile.NamedTemporaryFile("r") as trace:
            test["seconds"] = run_test(test, trace=trace.name)
            test["reaches"] = sorted({int(line) for line in trace.read().split()})

    list(pool.map(measure, tests))
    for test in tests:
        if test["seconds"] is None:
            print(f"left out, fails without a mutant: {test['crate']} {test['name']}", flush=True)
    return [test for test in tests if test["seconds"] is not None]


def try_mutant(mutant, tests):
    """Runs the tests that reach a mutant until one fails."""
    reaching = sorted((t for t in tests if mutant["number"] in t["reaches"]), key=lambda t: t["seconds"])
    for test in reaching:
        if run_test(test, mutant["number"], 10 * test["seconds"] + 30) is None:
            if run_test(test) is not None:
                return mutant.update(status="caught", by=f"{test['crate']} {test['name']}")
            print(f"unsteady, fails without a mutant: {test['crate']} {test['name']}", flush=True)
    if reaching or mutant["status"] == "waiting":
        mutant["status"] = "survived" if reaching else "unreached"


def run_mutants(state, stage, mutants, pool):
    """Runs each mutant that is not caught yet with the tests of a stage: those of the same crate, those of the other
    libraries, those of the executable."""
    lock = threading.Lock()
    crates = {"own": lambda mutant, test: test["crate"] == mutant["crate"],
              "libraries": lambda mutant, test: test["crate"] not in (mutant["crate"], DEPENDENT),
              "executable": lambda mutant, test: test["crate"] == DEPENDENT}

    def one(mutant):
        begin = time.monotonic()
        try_mutant(mutant, [test for test in state["tests"] if crates[stage](mutant, test)])
        with lock:
            mutant.setdefault("stages", []).append(stage)
            save(state)
            print(f"{mutant['status']:<9} {time.monotonic() - begin:6.1f} s  {mutant['name']}  {mutant.get('by', '')}",
                  flush=True)

    list(pool.map(one, [m for m in mutants if m["status"] != "caught" and stage not in m.get("stages", [])]))


def report(mutants):
    print("| crate | mutants listed | planted | caught | survived | dropped |\n|---|---|---|---|---|---|")
    rows = []
    for crate in CRATES:
        own = [m for m in mutants if m["crate"] == crate]
        count = lambda *names: sum(m["status"].startswith(names) for m in own)
        caught, survived = count("caught"), count("survived", "unreached")
        rows.append((own[0]["of"], caught + survived, caught, survived, count("dropped")))
        print(f"| {crate} | " + " | ".join(map(str, rows[-1])) + " |")
    total = [sum(column) for column in zip(*rows)]
    print("| all | " + " | ".join(map(str, total)) + " |")
    print(f"caught: {100 * total[2] / max(1, total[1]):.1f}%")
    for mutant in mutants:
        if mutant["status"] in ("survived", "unreached"):
            print(f"{mutant['status']}: {mutant['number']} {mutant['name']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-crate", type=int, default=45, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="another sample")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="concurrent tests")
    parser.add_argument("--build", action="store_true", help="only plant and build")
    parser.add_argument("--report", action="store_true", help="only print the last result")
    args = parser.parse_args()
    state = json.loads(STATE.read_text()) if STATE.exists() else {}
    if args.report:
        return report(state["mutants"])
    if not state:
        shutil.rmtree(TREE, ignore_errors=True)
        WORK.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(TREE)], check=True)
        state["mutants"] = draw(args.per_crate, args.seed)
    if "planted" not in state:
        plant_all(state, args.per_crate)
    if "executables" not in state:
        state["executables"] = build(CRATES)
        save(state)
    if args.build:
        return None
    mutants = select(state["mutants"], args.per_crate)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        if "tests" not in state:
            state["tests"] = baseline(state["executables"], pool)
            print(f"{len(state['tests'])} tests of libraries", flush=True)
            save(state)
        run_mutants(state, "own", mutants, pool)
        run_mutants(state, "libraries", mutants, pool)
        # The executable's tests take the longest: only for mutants that no library test catches.
        if all(test["crate"] != DEPENDENT for test in state["tests"]):
            state["tests"] += baseline(build([DEPENDENT]), pool)
            save(state)
        run_mutants(state, "executable", mutants, pool)
    report(state["mutants"])


if __name__ == "__main__":
    main()
