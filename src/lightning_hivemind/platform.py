"""Says in one sentence when hivemind cannot run here."""

from __future__ import annotations

import platform
import sys

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
        raise PlatformError(
            f"hivemind cannot be imported here ({where}): {type(error).__name__}: {error}."
            " Install it with: pip install 'hivemind>=1.1.12,<1.2' (Linux x86_64 and aarch64, macOS arm64)."
        ) from error
