# SPDX-License-Identifier: Apache-2.0
"""Calls to the system that never wait. They take microseconds, and no other thread of this process runs meanwhile.

Those of `os` let other threads run. While another thread of a busy engine decodes prompts, the scheduler's thread then
goes on 5 to 20 ms later.
"""

from __future__ import annotations

import ctypes
import os

_C = ctypes.PyDLL(None, use_errno=True)
_C.read.argtypes = _C.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
_C.read.restype = _C.write.restype = ctypes.c_ssize_t
_C.waitid.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int]

Buffer = ctypes.Array[ctypes.c_char]


def read(fd: int, buffer: Buffer) -> bytes:
    """Read what a non-blocking pipe has, at most the length of the buffer; raise OSError as `os.read` does."""
    return ctypes.string_at(buffer, _checked(_C.read(fd, buffer, len(buffer))))


def write(fd: int, data: bytes) -> int:
    """Write to a non-blocking pipe, and return how many bytes; raise OSError as `os.write` does."""
    return _checked(_C.write(fd, data, len(data)))


def has_ended_child() -> bool:
    """Say whether a child of this process may have ended that was not waited for."""
    info = (ctypes.c_int * 32)()
    result = _C.waitid(os.P_ALL, 0, info, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    # The first number of the information is that of a signal, or 0 if no child has ended.
    return bool(result or info[0])


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
