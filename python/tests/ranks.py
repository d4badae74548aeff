"""Processes that form a gloo group, started once for all tests: `Ranks().run(2, function, *arguments)`."""

import socket
import traceback

import torch.multiprocessing as multiprocessing

MOST = 4
# A rank that waits for another one this long has found a hang.
SECONDS = 300


def _serve(rank, port, commands, results):
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=SECONDS)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=MOST, timeout=limit)
    groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in (1, 2, 3, 4)}
    while (command := commands.get()) is not None:
        size, function, arguments = command
        try:
            results.put((rank, True, function(rank, groups[size], *arguments)))
        except Exception as error:
            results.put((rank, False, (type(error).__name__, str(error), traceback.format_exc())))


class Ranks:
    """Up to four ranks on this machine."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.results = context.Queue()
        self.commands = [context.Queue() for _ in range(MOST)]
        arguments = [(rank, port, commands, self.results) for rank, commands in enumerate(self.commands)]
        self.processes = [context.Process(target=_serve, args=x, daemon=True) for x in arguments]
        for process in self.processes:
            process.start()

    def outcomes(self, size, function, *arguments):
        """`(succeeded, result or (error type, message, traceback))` of each of the first `size` ranks."""
        for commands in self.commands[:size]:
            commands.put((size, function, arguments))
        found = sorted((self.results.get(timeout=2 * SECONDS) for _ in range(size)), key=lambda x: x[0])
        return [x[1:] for x in found]

    def run(self, size, function, *arguments):
        """The result of each rank; an error of any is one here."""
        outcomes = self.outcomes(size, function, *arguments)
        for rank, (succeeded, result) in enumerate(outcomes):
            assert succeeded, f"rank {rank}: {result[2]}"
        return [result for _, result in outcomes]

    def close(self):
        for commands in self.commands:
            commands.put(None)
        for process in self.processes:
            process.join(10)
            process.kill()
