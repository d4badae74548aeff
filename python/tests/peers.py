"""Runs the test suites of peers with the ops and models of foxlm in the place of theirs, and prints a table.

    python tests/peers.py --fla CHECKOUT --published CHECKOUT --transformers CHECKOUT [--cuda] [--only NAME] [--jobs N]

Checkouts are made by the caller; nothing is fetched. What foxlm leaves unwritten is NaN (PyTorch fills fresh memory in
its deterministic mode). On the CPU, where Triton kernels do not run, the references of flash-linear-attention are its
own naive recurrences; tests of kernels alone, of other ops, or of other devices are listed as not expressible.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint

import foxlm

SUITES = ("forgetting_attn", "attn", "attn_sink", "delta", "gdn", "gla", "simple_gla", "kda", "path_attn", "wall_attn")
# Other names under which FLA's tests import ops.
ALIASES = {"parallel_path_attention": "parallel_path_attn"}
# Tests of what foxlm does not have, by a part of their names.
INEXPRESSIBLE = {
    "flash_qla": "tests the choice of FLA's kernels",
    "blackwell_triton_guard": "tests the choice of FLA's kernels",
    "prepare_wy_repr": "tests an inner kernel of FLA",
    "test_gdn.py::test_gate[": "tests an inner kernel of FLA",
    "vllm_decode": "tests an inner kernel of FLA",
    "bwd_full_value_reduction": "tests an inner kernel of FLA",
    "fused_chunk": "no such op",
    "test_simple_gla.py::test_parallel": "no such op",
    "ref_matches_gpt_oss": "compares two references",
    "test_naive_chunk": "compares two references",
    "FoxLlamaTest::test_sdpa_can_dispatch_non_composite": "expects SDPA as the default; it is foxlm's own op",
    "FoxProTest::test_sdpa_can_dispatch_non_composite": "expects SDPA as the default; it is foxlm's own op",
}


def in_blocks(function, x, state):
    """A recurrence `function(x, state)`, whose tape would hold a state for each token, computed again by 64 tokens."""
    outputs = []
    for at in range(0, max(x[0].shape[1], 1), 64):
        block = [None if y is None else y[:, at : at + 64] for y in x]
        o, state = torch.utils.checkpoint.checkpoint(function, block, state, use_reentrant=False)
        outputs.append(o)
    return torch.cat(outputs, 1), state


def sequences(function, x, state, cu_seqlens):
    """A reference for packed sequences from one for a batch."""
    if cu_seqlens is None:
        return in_blocks(function, x, state)
    ends, parts = cu_seqlens.tolist(), []
    for n, (a, e) in enumerate(zip(ends, ends[1:])):
        cut = [None if y is None else y[:, a:e] for y in x]
        parts.append(in_blocks(function, cut, None if state is None else state[n : n + 1]))
    return torch.cat([o for o, _ in parts], 1), torch.cat([s for _, s in parts])


def naive_references():
    """FLA's naive recurrences with the signatures of its fused ones."""
    from fla.ops.gated_delta_rule.gate import naive_gdn_gate
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule as delta
    from fla.ops.gla.naive import naive_recurrent_gla as gla
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla as simple

    unit = lambda x: torch.nn.functional.normalize(x, p=2, dim=-1)

    def gated_delta_rule(q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
                         use_qk_l2norm_in_kernel=False, cu_seqlens=None, use_gate_in_kernel=False, A_log=None,
                         dt_bias=None, state_v_first=False, **_):  # fmt: skip
        group = v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(group, 2) for x in ((unit(q), unit(k)) if use_qk_l2norm_in_kernel else (q, k)))
        g = v.new_zeros(v.shape[:3]) if g is None else naive_gdn_gate(g, A_log, dt_bias) if use_gate_in_kernel else g
        turn = (lambda x: x.transpose(-1, -2)) if state_v_first else lambda x: x
        state = None if initial_state is None else turn(initial_state)
        run = lambda x, s: delta(*x, scale=scale, initial_state=s, output_final_state=True)
        o, last = sequences(run, (q, k, v, beta, g), state, cu_seqlens)
        return o.to(v.dtype), turn(last)

    def delta_rule(q, k, v, beta, **options):
        return gated_delta_rule(q, k, v, None, beta, **options)

    def fused_gla(q, k, v, gk=None, initial_state=None, cu_seqlens=None, scale=None, **_):
        factor = 1.0 if scale is None else scale * q.shape[-1] ** 0.5
        run = lambda x, s: gla(*x, initial_state=s, output_final_state=True)
        return sequences(run, (q * factor, k, v, gk), initial_state, cu_seqlens)

    def fused_simple_gla(q, k, v, g=None, g_gamma=None, initial_state=None, cu_seqlens=None, scale=None, **_):
        zero = v.new_zeros(v.shape[:3], dtype=torch.float32) if g is None else g
        g = zero if g_gamma is None else zero + g_gamma
        run = lambda x, s: simple(*x, scale=scale, initial_state=s, output_final_state=True)
        return sequences(run, (q, k, v, g), initial_state, cu_seqlens)

    return {
        "fused_recurrent_delta_rule": delta_rule,
        "fused_recurrent_gated_delta_rule": gated_delta_rule,
        "fused_recurrent_gla": fused_gla,
        "fused_recurrent_simple_gla": fused_simple_gla,
    }


def kda_in_blocks(recurrent):
    """FLA's naive recurrence of `chunk_kda`, in less memory."""

    def run(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
        return in_blocks(lambda x, s: recurrent(*x, scale, s, True), (q, k, v, g, beta), initial_state)

    return run


class Blocks:
    """A matrix `[B, H, T, T]` that FLA's naive PaTH writes block by block. As slices of one tensor, which autograd copies
    for each of them, 4,000 tokens take hours."""

    def __init__(self, *shape, device):
        self.size, self.blocks = shape[-1], {}

    def __setitem__(self, at, block):
        self.blocks[at[2].start, at[3].start] = block

    def masked_fill_(self, mask, value):
        block = self.blocks[0, 0]
        starts, zeros = range(0, self.size, block.shape[-1]), torch.zeros_like(block)
        rows = (torch.cat([self.blocks.get((i, j), zeros) for j in starts], -1) for i in starts)
        return torch.cat(list(rows), -2).masked_fill(mask, value)


class TorchWithBlocks:
    """PyTorch as that reference sees it."""

    zeros = Blocks

    def __getattr__(self, name):
        return getattr(torch, name)


def global_cumsum(x, reverse=False, scale=None, cu_seqlens=None, output_dtype=torch.float32, **_):
    """FLA's sums over time, whose kernel needs a GPU."""
    ends = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    sums = torch.cat([x[:, a:e].float().cumsum(1) for a, e in zip(ends, ends[1:])], 1)
    return (sums if scale is None else sums * scale).to(output_dtype)


def suite_of(nodeid):
    """The file of a test, or its class."""
    file, *names = nodeid.split("::")
    return names[0] if len(names) > 1 else Path(file).stem


class Plugin:
    """Puts foxlm's ops into a test module, and counts; with `shard` `(i, n)` runs the i-th of n parts of the cases. The
    counts are also in the file `counts`, if there is one, after every case."""

    def __init__(self, cuda, shard=None, counts=None):
        self.cuda, self.shard, self.counts = cuda, shard, counts
        self.references = {}
        self.results = collections.defaultdict(collections.Counter)
        self.reasons = collections.defaultdict(collections.Counter)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        kept = []
        if self.shard is not None:
            part, parts = self.shard
            items[:] = items[len(items) * part // parts : len(items) * (part + 1) // parts]
        for item in items:
            reason = next((why for part, why in INEXPRESSIBLE.items() if part in item.nodeid), None)
            if reason is None:
                kept.append(item)
            else:
                self.results[item.path.stem]["not expressible"] += 1
                self.reasons[item.path.stem][reason] += 1
            self.results[suite_of(item.nodeid)]["not run"] += reason is None
        items[:] = kept
        self.write()

    def write(self):
        if self.counts is not None:
            self.counts.write_text(json.dumps([self.results, self.reasons]))

    def pytest_runtest_logfinish(self, nodeid):
        self.results[suite_of(nodeid)]["not run"] -= 1
        self.write()

    def pytest_runtest_setup(self, item):
        torch.use_deterministic_algorithms(True, warn_only=True)
        module, recurrent = item.module, item.name.startswith("test_fused_recurrent")
        if not self.cuda and hasattr(module, "device"):
            module.device = "cpu"
        for name in foxlm.__all__:
            if not hasattr(module, name):
                continue
            ours = name.startswith("fused_recurrent") == recurrent or not name.startswith(("fused", "chunk"))
            if ours:
                setattr(module, name, getattr(foxlm, name))
            elif name in self.references:
                setattr(module, name, self.references[name])
            elif name.replace("chunk", "fused_recurrent", 1) in self.references:
                # The reference of a fused op is a chunked one, whose kernels need a GPU: the naive recurrence instead.
                setattr(module, name, self.references[name.replace("chunk", "fused_recurrent", 1)])
        for name, ours in ALIASES.items():
            if hasattr(module, name):
                setattr(module, name, getattr(foxlm, ours))
        if not self.cuda and hasattr(module, "naive_wall_attn"):
            for holder in (module, sys.modules[module.naive_wall_attn.__module__]):
                holder.chunk_global_cumsum = global_cumsum
        if not self.cuda and hasattr(module, "naive_path_attn"):
            module.naive_path_attn.__globals__["torch"] = TorchWithBlocks()
        if not self.cuda and hasattr(module, "naive_recurrent_kda") and not hasattr(module, "replaced"):
            module.naive_recurrent_kda, module.replaced = kda_in_blocks(module.naive_recurrent_kda), True

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        made = yield
        if item.name.startswith("test_op[") and call.when == "call" and call.excinfo is not None:
            from peers_published import judge

            frame = next(entry.frame for entry in call.excinfo.traceback if entry.name == "test_op")
            right, words = judge(frame.f_locals)
            if right:
                made.get_result().outcome = "reference wrong"
            self.reasons[suite_of(item.nodeid)][f"{item.name}: {words}"] += 1

    def pytest_runtest_logreport(self, report):
        suite, name = suite_of(report.nodeid), report.nodeid.split("::")[-1]
        # Reports on subtests are not cases.
        if hasattr(report, "context"):
            return
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self.results[suite][report.outcome] += 1
            if report.failed:
                self.reasons[suite][f"FAILED {name}: {str(report.longrepr).splitlines()[-1][-160:]}"] += 1
            if report.skipped:
                self.reasons[suite][str(report.longrepr[2] if isinstance(report.longrepr, tuple) else "")] += 1

    def table(self):
        kinds = ("passed", "failed", "reference wrong", "skipped", "not expressible", "not run")
        print(f"\n| suite | cases | {' | '.join(kinds)} |\n" + "|---" * (2 + len(kinds)) + "|")
        for suite, counts in sorted(self.results.items()):
            shown = [counts[kind] for kind in kinds]
            print(f"| {suite} | {sum(shown)} | " + " | ".join(map(str, shown)) + " |")
        for suite, reasons in sorted(self.reasons.items()):
            for reason, count in reasons.most_common(40):
                print(f"{suite}: {count} x {reason}")

    def merge(self, file):
        """Adds the counts that another process wrote."""
        for mine, theirs in zip((self.results, self.reasons), json.loads(file.read_text())):
            for suite, counts in theirs.items():
                mine[suite].update(counts)


class OnCpu(torch.overrides.TorchFunctionMode):
    """Makes on the CPU what a test asks for on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def fla(path, plugin, arguments):
    """The FLA suites of ops that foxlm has."""
    sys.path.insert(0, path)
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
    if not plugin.cuda:
        # Kernels are not called here, and their decorators depend on the version of Triton.
        import triton

        triton.autotune = triton.heuristics = lambda *_, **__: lambda kernel: kernel
        plugin.references = naive_references()
        # It synchronizes the GPU around each test.
        arguments = [*arguments, "--noconftest"]
    files = [f"{path}/tests/ops/test_{name}.py" for name in SUITES]
    return pytest.main([*files, "-p", "no:cacheprovider", "--rootdir", path, *arguments], plugins=[plugin])


def published(path, plugin, arguments):
    """The test of the published op, which is in its own file."""
    sys.path.insert(0, f"{path}/src")
    file = f"{path}/src/forgetting_transformer/ops/forgetting_attention.py"
    arguments = [file, "-p", "no:cacheprovider", "--rootdir", path, *arguments]
    if plugin.cuda:
        return pytest.main(arguments, plugins=[plugin])
    with OnCpu():
        return pytest.main(arguments, plugins=[plugin])


def transformers(path, plugin, arguments):
    """The common tests of causal language models, for FoX (LLaMA), FoX (Pro), and LlamaModelTest as the control."""
    sys.path.insert(0, path)
    file = str(Path(__file__).with_name("peers_hf.py"))
    llama = f"{path}/tests/models/llama/test_modeling_llama.py::LlamaModelTest"
    options = ["-p", "no:cacheprovider", "--disable-warnings", "-c", os.devnull, "--rootdir", path, *arguments]
    plugin.pytest_runtest_setup = lambda item: None
    return pytest.main([file, llama, *options], plugins=[plugin])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = types.SimpleNamespace(fla=fla, published=published, transformers=transformers)
    for name in vars(suites):
        parser.add_argument(f"--{name}", metavar="CHECKOUT", help=getattr(suites, name).__doc__)
    parser.add_argument("--cuda", action="store_true", help="tests run on a GPU, against the peers' own kernels")
    parser.add_argument("--only", default="", help="as pytest's -k")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run the cases side by side")
    parser.add_argument("--shard", type=int, nargs=2, metavar=("I", "N"), help="only part I of N, from 0")
    parser.add_argument("--counts", type=Path, help="also write the counts to this file, after every case")
    parser.add_argument("--seconds", type=float, help="with --jobs: further cases are not run after these")
    chosen = parser.parse_args()
    plugin, failed = Plugin(chosen.cuda, chosen.shard, chosen.counts), False
    if chosen.jobs > 1:
        failed = in_processes(plugin, chosen.jobs, chosen.seconds)
        plugin.table()
        sys.exit(failed)
    arguments = ["-q", "--tb=line", "--color=no", *(["-k", chosen.only] if chosen.only else [])]
    for name, run in vars(suites).items():
        if getattr(chosen, name) is not None:
            failed |= run(str(Path(getattr(chosen, name)).resolve()), plugin, arguments) != 0
    plugin.table()
    sys.exit(failed)


def in_processes(plugin, jobs, seconds):
    """This command in as many processes, each with a part of the cases; returns whether one failed."""
    end = None if seconds is None else time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{n}.json") for n in range(jobs)]
        command = [sys.executable, *sys.argv, "--jobs", "1"]
        # References call many small ops, which more threads than cores slow down.
        env = {"OMP_NUM_THREADS": "1"} | os.environ
        running = [
            subprocess.Popen(
                [*command, "--shard", str(n), str(jobs), "--counts", str(file)], stdout=subprocess.DEVNULL, env=env
            )
            for n, file in enumerate(files)
        ]
        failed = False
        for process, file in zip(running, files):
            try:
                failed |= process.wait(None if end is None else max(end - time.monotonic(), 0)) != 0
            except subprocess.TimeoutExpired:
                process.kill()
                failed = True
            if file.exists():
                plugin.merge(file)
        return failed


if __name__ == "__main__":
    main()
