"""Work that keeps a stream busy until a test lets it end, so that what waits for a slow kernel is seen to wait."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import openreg_ops

LONGEST = 20.0  # seconds, so that a test that waits for the wrong stream fails
SOON = 0.03  # seconds after which held work ends, in a test of what waits for it


class _Stream(ctypes.Structure):
    _fields_ = [("device", ctypes.c_int32), ("id", ctypes.c_int64)]


_Run = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class _Work(ctypes.Structure):
    _fields_ = [("run", _Run), ("keep", ctypes.c_void_p), ("drop", ctypes.c_void_p)]


class _Site(ctypes.Structure):
    _fields_ = [(name, ctypes.c_char_p) for name in ("name", "function", "file")] + [
        ("line", ctypes.c_uint32),
        ("kind", ctypes.c_int32),
        ("bytes", ctypes.c_size_t),
    ]


_FIELDS = """last_error throw_error device_count current_device set_device synchronize_device current_stream set_stream
new_stream query_stream synchronize_stream launch run enqueue""".split()


class _Interface(ctypes.Structure):
    """The beginning of the table in openreg/c_api.h."""

    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), *((name, ctypes.c_void_p) for name in _FIELDS)]


_library = ctypes.CDLL(str(Path(openreg_ops.library_paths()[0]) / "libopenreg_ops.so"))
_library.openreg_get_interface.restype = ctypes.POINTER(_Interface)
_table = _library.openreg_get_interface(1, 0, ctypes.byref(ctypes.c_char_p())).contents
_enqueue = ctypes.CFUNCTYPE(ctypes.c_int32, _Stream, ctypes.POINTER(_Site), ctypes.POINTER(_Work), ctypes.c_void_p)(
    _table.enqueue
)
_site = _Site(b"held", b"held", b"held.py", 0, 0, 0)  # whose strings live as long as the process


class held:  # noqa: N801 -- used as a function
    """``with held(stream) as work:`` keeps the stream busy until `work.release()`, at the latest until the end."""

    def __init__(self, stream: torch.Stream) -> None:
        self.stream, self.released, self.begun = stream, threading.Event(), threading.Event()
        self.timed_out = False
        self._run = _Run(self._wait)
        self._work = _Work(self._run, None, None)

    def _wait(self, _context: Any) -> None:
        self.begun.set()
        self.timed_out = not self.released.wait(LONGEST)

    def release(self) -> None:
        self.released.set()

    def __enter__(self) -> held:
        given = _Stream(self.stream.device_index, self.stream.stream_id)
        assert _enqueue(given, ctypes.byref(_site), ctypes.byref(self._work), None) == 0
        assert self.begun.wait(LONGEST)
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()
        self.stream.synchronize()
        assert not self.timed_out, "something waits for the stream, and should not"


def waits(call: Callable[[], Any], stream: torch.Stream) -> bool:
    """Returns true if the call waits for the work of a stream: it returns after the work has been let go."""
    with held(stream) as work:
        later = threading.Timer(SOON, work.release)
        later.start()
        call()
        waited = work.released.is_set()
    later.join()
    return waited
