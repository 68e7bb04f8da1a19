"""What differs between systems: whether hivemind can run here, where files lie, what the kernel is told of memory."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from typing import Any

from lightning_hivemind.errors import PlatformError


def require_hivemind() -> None:
    """Import hivemind, or say why it cannot be.

    Raises:
        PlatformError: it is not installed, has no build for this system, or does not import.
    """
    where = f"{platform.system()} {platform.machine()}, Python {sys.version_info.major}.{sys.version_info.minor}"
    if sys.platform == "win32":
        raise PlatformError(
            f"hivemind has no build for {where}; it runs on Linux (x86_64, aarch64) and macOS (arm64). Use WSL 2."
        )
    try:
        import hivemind  # noqa: F401
    except Exception as error:  # its import runs native code of several packages
        fix = " Install it with: pip install 'hivemind>=1.1.12,<1.2' (Linux x86_64 and aarch64, macOS arm64)."
        if isinstance(error, OSError):  # it makes shared memory and files
            fix = " Is /dev/shm or the temporary directory full? Free or enlarge it (docker run --shm-size=1g)."
        raise PlatformError(
            f"hivemind cannot be imported here ({where}): {type(error).__name__}: {error}.{fix}"
        ) from error


def takes_memory(folder: str) -> bool:
    """Whether files there are in memory (tmpfs). What the system does not tell (not Linux) is taken for a disk."""
    device = os.stat(folder).st_dev
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            # "25 30 0:23 / /dev/shm rw - tmpfs tmpfs rw": the third field is the device, behind the dash comes the kind
            for mount, _, kind in (line.partition(" - ") for line in mounts):
                if mount.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                    return kind.split()[0] in ("tmpfs", "ramfs")
    except FileNotFoundError:
        pass
    return False


def advise_memory(address: int, length: int, advice: int) -> None:
    """``madvise`` (Linux; elsewhere nothing) of whole pages. What the kernel does not know or take is as it was."""
    if (madvise := _madvise()) is not None:
        madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice)


@functools.cache
def _madvise() -> Any:
    return ctypes.CDLL(None, use_errno=True).madvise if sys.platform.startswith("linux") else None
