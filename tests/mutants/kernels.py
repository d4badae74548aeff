"""Plants mutants of CUDA kernels in a copy of a fox executable and runs their self-tests. Needs no cargo.

Kernel sources are text in the executable and are compiled at run time, so a mutant is a change of bytes at equal
length: a longer replacement loses the blanks around its operators, a shorter one is padded with blanks.
"""

import concurrent.futures
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path


def fit(old, new):
    """`new` at the length of `old`; None if it cannot be made as short."""
    if len(new) > len(old):
        new = re.sub(rb"[ \t]*([=<>&|?:;,+*/(){}\[\]-]+)[ \t]*", rb"\1", new.strip())
    return None if len(new) > len(old) else new.ljust(len(old))


def planted(image, resolved):
    """`(executable with the mutant, None)`, or `(None, reason)`."""
    if isinstance(resolved, str):
        return None, resolved
    old = resolved[1].encode()
    new = fit(old, resolved[2].encode())
    if old not in image:
        return None, "its text is not in the executable, which was built from another commit"
    if new is None:
        return None, "the replacement is longer than the match"
    return image.replace(old, new), None


def selftest(fox, words, cache, timeout):
    """Exit code (None: it did not end) and output."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    try:
        done = subprocess.run(
            [str(fox), *shlex.split(words)], env=environment, text=True, errors="replace", timeout=timeout,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


def verdict(mutant, passes, result):
    """The result of a mutant and an explanation."""
    code, output = result
    if not passes:
        return "NO TEST", "its self-test fails without it"
    if "does not compile for sm_" in output:
        return "BROKEN", "its kernel does not compile"
    if code == 0:
        return ("explained", mutant["survives"]) if "survives" in mutant else ("SURVIVED", "no case failed")
    if code is None:
        return "caught", "its self-test does not end"
    failures = [line.strip() for line in output.splitlines() if "FAIL" in line]
    return "caught", f"{len(failures)} failures, e.g. {failures[0]}" if failures else f"exit code {code}"


def run_all(mutants, fox, jobs, extra, timeout):
    """Runs `(mutant, resolved match)` pairs; returns 1 unless each is caught or explained."""
    image, bad = fox.read_bytes(), 0
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        folder = Path(folder)
        command = lambda mutant: f"{mutant['test']} {extra}"

        def baseline(words):
            code, output = selftest(fox, words, folder / "cache", timeout)
            if code != 0:
                print(f"fails without a mutant: fox {words}\n    " + "\n    ".join(output.splitlines()[-12:]), flush=True)
            return code == 0

        commands = sorted({command(mutant) for mutant, _ in mutants})
        passes = dict(zip(commands, pool.map(baseline, commands)))

        def one(pair):
            mutant, resolved = pair
            begin = time.monotonic()
            changed, problem = planted(image, resolved)
            if problem:
                return mutant, 0.0, ("STALE", problem)
            copy = folder / mutant["name"]
            copy.write_bytes(changed)
            shutil.copymode(fox, copy)
            result = selftest(copy, command(mutant), folder / "cache", timeout)
            copy.unlink()
            return mutant, time.monotonic() - begin, verdict(mutant, passes[command(mutant)], result)

        for mutant, spent, (result, reason) in pool.map(one, mutants):
            bad += result not in ("caught", "explained")
            print(f"{result:<9} {spent:6.1f} s  {mutant['name']}: {reason}", flush=True)
    return 1 if bad else 0
