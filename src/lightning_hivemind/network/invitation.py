"""The message that tells others how to join: one line that can be copied into a shell and works as printed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence

from lightning_hivemind.network.addresses import choose_shareable

VARIABLE = "INITIAL_PEERS"
#: Programs that run code of the user which cannot be repeated from the command line.
_INTERACTIVE = re.compile(r"ipykernel_launcher|colab_kernel_launcher|ipython3?$|jupyter")


def invitation(addresses: Sequence[str], *, argv: Sequence[str], executable: str, environ: Mapping[str, str]) -> str:
    """How to join through ``addresses``: exactly one line starting with ``INITIAL_PEERS=``, and what to know about it.

    Args:
        addresses: this peer's visible addresses; public ones are chosen where there are any.
        argv: ``sys.orig_argv``: the command as it was typed, with the interpreter. ``sys.argv`` will do for scripts.
        executable: ``sys.executable``.
        environ: ``os.environ``; its PATH decides how the interpreter must be named.
    Raises:
        AddressError: there are no addresses.
    """
    shared = choose_shareable(addresses)
    peers = f"{VARIABLE}={shlex.quote(','.join(shared.addresses))}"
    command = join_command(argv, executable, environ)
    if command is None:
        text = f"Others can join this run: set this variable, then run the same code:\n\n{peers}\n"
    else:
        text = f"Others can join this run with:\n\n{peers} {command}\n"
    return f"{text}\n{shared.advice}\n" if shared.advice else text


def join_command(argv: Sequence[str], executable: str, environ: Mapping[str, str]) -> str | None:
    """The command that started this process, quoted for a shell, on one line; None if it was interactive."""
    words = list(argv)
    if not words or (not words[0] and len(words) == 1):
        return None
    if _is_interpreter(words[0], executable):
        script, options = _script_index(words), words[1:]
        if script is None or _INTERACTIVE.search(words[script]):
            return None
        name = _console_script(words[script], environ) if script == 1 else None
        if name is not None:
            return _quoted([name, *words[2:]])
        return _quoted([_interpreter(words[0], executable, environ), *options])
    if words[0] in ("", "-c", "-m") or _INTERACTIVE.search(words[0]):
        return None
    name = _console_script(words[0], environ)
    if name is not None:
        return _quoted([name, *words[1:]])
    return _quoted([_interpreter(os.path.basename(executable), executable, environ), *words])


def _is_interpreter(word: str, executable: str) -> bool:
    return os.path.basename(word) == os.path.basename(executable) or bool(
        re.fullmatch(r"python[0-9.]*t?(\.exe)?|pypy[0-9.]*", os.path.basename(word))
    )


def _script_index(words: Sequence[str]) -> int | None:
    """Where, after the interpreter's own options, the script or module or code stands; None if there is none."""
    position = 1
    while position < len(words):
        word = words[position]
        if word in ("-m", "-c"):
            return position + 1 if position + 1 < len(words) else None
        if word == "-" or not word.startswith("-"):
            return position if word != "-" else None
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            position += 1
        position += 1
    return None


def _console_script(path: str, environ: Mapping[str, str]) -> str | None:
    """The bare name of an installed command that PATH finds at this very path."""
    name = os.path.basename(path)
    if name == path or name.endswith(".py"):
        return None
    found = shutil.which(name, path=environ.get("PATH", ""))
    return name if found is not None and os.path.exists(path) and os.path.samefile(found, path) else None


def _interpreter(typed: str, executable: str, environ: Mapping[str, str]) -> str:
    """The interpreter's basename if PATH finds this interpreter under it, else its full path.

    Compared by directory, not by where links lead: the ``python`` of each virtual environment links to the same file.
    """
    name = os.path.basename(typed)
    found = shutil.which(name, path=environ.get("PATH", ""))
    if found is not None and os.path.dirname(os.path.abspath(found)) == os.path.dirname(os.path.abspath(executable)):
        return name
    return executable


def _quoted(words: Sequence[str]) -> str:
    return " ".join(_quote(word) for word in words)


def _quote(word: str) -> str:
    """Like shlex.quote, but without line breaks in the result (bash, zsh and ksh read the ``$'...'`` form)."""
    if not re.search(r"[\n\r]", word):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
    return f"$'{escaped}'"
