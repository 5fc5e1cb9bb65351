"""Processes of one c10d group, which run checks for a test: `Workers(2).run(check, argument)` on each of them.

They fork from a server that has imported torch and no device, which saves the seconds that importing torch takes.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 60  # seconds, of a collective

_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed.tensor", "torch.testing"])


def _work(rank: int, size: int, store: str, environment: dict[str, str], pipe: Connection) -> None:
    gc.freeze()  # what the server imported: a scan would copy its pages
    os.environ.clear()
    os.environ.update(environment)
    dist.set_debug_level_from_env()
    import openreg_ops  # noqa: F401 -- the device reads the environment

    torch.set_num_threads(1)
    torch.openreg.set_device(rank % torch.openreg.device_count())
    options = {"timeout": datetime.timedelta(seconds=TIMEOUT)} | pipe.recv()
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=size, **options)
    while (message := pipe.recv()) is not None:
        check, arguments = message
        try:
            torch.manual_seed(0)
            pipe.send((None, check(*arguments)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
    if dist.is_initialized():  # unless a check has ended it
        dist.destroy_process_group()


class Workers:
    """`size` processes with the default process group, made with `options`, in an added `environment`."""

    def __init__(self, size: int, environment: dict[str, str] | None = None, **options: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.processes, self.pipes = [], []
        for rank in range(size):
            ours, theirs = _CONTEXT.Pipe()
            env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **(environment or {})}
            arguments = (rank, size, f"{self._folder.name}/store", env, theirs)
            process = _CONTEXT.Process(target=_work, args=arguments, daemon=True)
            with mock.patch.dict(os.environ, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}):  # of the server
                process.start()
            theirs.close()
            ours.send(options)
            self.processes.append(process)
            self.pipes.append(ours)

    def start(self, check: Callable[..., Any], *arguments: Any) -> None:
        for pipe in self.pipes:
            pipe.send((check, arguments))

    def results(self, ranks: list[int] | None = None) -> list[Any]:
        """What the check returned on each process; raises what the first process to fail raised."""
        waiting = {self.pipes[rank]: rank for rank in (range(len(self.pipes)) if ranks is None else ranks)}
        results, errors = {}, []
        while waiting:
            for pipe in wait(list(waiting), timeout=2 * TIMEOUT) or [None]:
                assert pipe is not None, f"processes {list(waiting.values())} do not answer"
                rank = waiting.pop(pipe)
                error, results[rank] = pipe.recv()
                if error:
                    errors.append(f"process {rank}:\n{error}")
        assert not errors, "\n".join(errors)
        return [results[rank] for rank in sorted(results)]

    def run(self, check: Callable[..., Any], *arguments: Any) -> list[Any]:
        self.start(check, *arguments)
        return self.results()

    def close(self) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            if process.is_alive():
                with contextlib.suppress(BrokenPipeError):  # it has just ended
                    pipe.send(None)
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def in_mode(check: Callable[..., Any]) -> Callable[..., Any]:
    """`check` with a launch mode as its first argument."""

    @functools.wraps(check)
    def checked(mode: str, *arguments: Any) -> Any:
        torch.openreg.set_launch_mode(mode)
        try:
            return check(*arguments)
        finally:
            torch.openreg.synchronize()
            torch.openreg.set_launch_mode("inline")

    return checked
