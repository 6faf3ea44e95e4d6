"""CUDA's handles by which one process maps the GPU memory of another, through the driver's own library.

Belongs here: the driver's calls. Does not belong here: who maps what of whom (peer_memory.py). torch shares tensors by
the same handles, but keeps a file for each in /dev/shm, which stays there where a process is ended.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

_LIBRARY = "libcuda.so.1"
_NUM_HANDLE_BYTES = 64
#: CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: memory of another GPU may be reached from the current one.
_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * _NUM_HANDLE_BYTES),)


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """Memory of this process as another one finds it."""

    #: Of the allocation that holds it, in hexadecimal.
    allocation: str
    #: Bytes from the allocation's start.
    offset: int


class Mapping:
    """Memory of another process, mapped for the current device as long as this lives."""

    def __init__(self, handle: MemoryHandle) -> None:
        """Raises RuntimeError where the driver refuses."""
        driver, base = _driver(), ctypes.c_uint64()
        opened = _Handle.from_buffer_copy(bytes.fromhex(handle.allocation))
        _check(driver, driver.cuIpcOpenMemHandle_v2(ctypes.byref(base), opened, ctypes.c_uint(_ENABLE_PEER_ACCESS)))
        self._driver, self._base = driver, base
        self.address = base.value + handle.offset

    def __del__(self) -> None:
        if hasattr(self, "_base"):  # else there is nothing to close
            self._driver.cuIpcCloseMemHandle(self._base)


def memory_handle(address: int) -> MemoryHandle:
    """How another process maps this process's memory. Raises RuntimeError where it cannot."""
    driver, base, size, handle = _driver(), ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    wanted = ctypes.c_uint64(address)
    _check(driver, driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), wanted))
    _check(driver, driver.cuIpcGetMemHandle(ctypes.byref(handle), base))
    return MemoryHandle(bytes(handle).hex(), address - base.value)


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise RuntimeError(str(error)) from error


def _check(driver: Any, result: int) -> None:
    if result:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(ctypes.c_int(result), ctypes.byref(name))
        raise RuntimeError((name.value or f"CUDA error {result}".encode()).decode())
