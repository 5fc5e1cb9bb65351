"""Shared by the tests of several folders: captures, and threads."""

import threading
from collections.abc import Callable
from typing import Any

import torch


def captured(f: Callable[[], Any], **options: Any) -> tuple[torch.openreg.Graph, Any]:
    """Capture f(); returns the graph and f's result."""
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph, **options):
        out = f()
    return graph, out


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Run each function on a thread of its own, at the same time. Returns their results, or raises the first error."""
    results, errors = [None] * len(functions), []

    def run(i: int) -> None:
        try:
            results[i] = functions[i]()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
