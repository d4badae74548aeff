"""Tuning of Triton kernels in less time: the same configurations, compiled on all cores and timed for a shorter while

Triton compiles the configurations of a kernel one after the other, several seconds each, and times each for an eighth
of a second. `install()` compiles all of a kernel in parallel before the first is timed, and times each for some
milliseconds. Which configurations are tried does not change, unless `most` is given: then only the first ones of the
library's list, with which its kernels may be slower than they could be.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor

WARM_UP_MS, TIMED_MS = 1, 5


def install(most=None, threads=os.cpu_count()):
    """Replaces the tuner of this process. `most`: configurations of a kernel that are tried, all by default; `threads`:
    those that compile."""
    import triton
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    bench, prune, do_bench = Autotuner._bench, Autotuner.prune_configs, triton.testing.do_bench

    def prune_configs(self, kwargs):
        configs = prune(self, kwargs)
        self.to_compile = configs = configs[:most] if most else configs
        return configs

    def bench_compiled(self, *args, config, **meta):
        configs, self.to_compile = getattr(self, "to_compile", None), None
        if configs:
            start = time.time()
            compile_all(triton, self.fn, args, meta, configs, threads)
            name = getattr(getattr(self, "base_fn", None), "__name__", "kernel")
            print(f"     {name}: {len(configs)} configurations in {time.time() - start:.0f} s", flush=True)
        return bench(self, *args, config=config, **meta)

    def do_bench_briefly(fn, warmup=None, rep=None, **options):
        return do_bench(fn, warmup=WARM_UP_MS, rep=TIMED_MS, **options)

    Autotuner.prune_configs, Autotuner._bench = prune_configs, bench_compiled
    # The driver imports it by name for every kernel that it times.
    triton.testing.do_bench = do_bench_briefly


def compile_all(triton, kernel, args, meta, configs, threads):
    """Compiles all configurations. Errors come again when the configuration is timed, where Triton handles them."""
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:  # before Triton 3.5
        return
    try:
        with ThreadPoolExecutor(threads) as executor, mode(executor, ignore_errors=True):
            for config in configs:
                try:
                    kernel.run(*args, **{**meta, **config.all_kwargs(), "warmup": True})
                except Exception:
                    pass
    except Exception as error:
        print(f"     configurations are compiled one by one: {type(error).__name__}: {str(error)[:200]}", flush=True)
