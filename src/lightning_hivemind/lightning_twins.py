"""One strategy, two Lightning packages.

``lightning.pytorch`` and ``pytorch_lightning`` hold unlike classes of the same names, and are often installed side by
side. A strategy with a base from both fails in one of them, and importing either for the user's sake may import the
wrong one. So the strategy is a mixin without a Lightning base; an instance gets the bases of the package that the
script uses when it is constructed (its *twin*), and changes over if a Trainer of the other package takes it. In the
same way it gets the bases of the strategy by which a peer trains on its own devices: Lightning asks a strategy's class
what it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from abc import ABCMeta
from functools import cache
from types import ModuleType
from typing import Any

from lightning_hivemind.errors import PlatformError

#: in the order of preference when the script has imported neither, or both
PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def loaded_packages() -> list[str]:
    """The Lightning packages that this process has imported so far."""
    return [name for name in PACKAGES if getattr(sys.modules.get(name), "Trainer", None) is not None]


def chosen_package() -> str:
    """The package to use for a strategy constructed now.

    Raises:
        PlatformError: neither is installed.
    """
    if loaded := loaded_packages():
        return loaded[0]
    for name in PACKAGES:
        if importlib.util.find_spec(name.split(".")[0]) is not None:
            return name
    raise PlatformError("no Lightning is installed. Install one: pip install 'lightning>=2.5,<2.7'")


def package_of(thing: object) -> str | None:
    """The Lightning package that defines an object's class (or one of its bases)."""
    for cls in type(thing).__mro__:
        for name in PACKAGES:
            if cls.__module__ == name or cls.__module__.startswith(name + "."):
                return name
    return None


def lightning_module(package: str, name: str = "") -> ModuleType:
    """``package`` or its submodule ``name``."""
    return importlib.import_module(f"{package}.{name}" if name else package)


class Twinned(ABCMeta):
    """Metaclass of the mixin: constructing it constructs its twin for the package that the script uses."""

    #: the Lightning package of a twin; empty for a mixin
    package: str = ""
    #: the mixin that a twin was made of
    mixin: type

    def first_bases(cls, package: str) -> tuple[type, ...]:
        """Of a twin that is just being constructed: Lightning's ``Strategy`` alone."""
        base: type = lightning_module(package, "strategies").Strategy
        return (base,)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not cls.package:
            package = chosen_package()
            return twin_of(cls, package, cls.first_bases(package))(*args, **kwargs)
        accept_everywhere(cls)
        return super().__call__(*args, **kwargs)


@cache
def twin_of(cls: type, package: str, bases: tuple[type, ...]) -> type:
    """``cls`` (the mixin, or a user's subclass of it) over ``bases``, of which the last is one of ``package``."""
    own = {"__module__": cls.__module__, "__doc__": cls.__doc__, "package": package, "mixin": cls}
    return type(cls.__name__, (cls, *bases), own)


def accept_everywhere(*classes: type) -> None:
    """Let every Lightning package that is loaded accept ``classes`` where it asks for a ``Strategy``."""
    for package in loaded_packages():
        strategy: Any = lightning_module(package, "strategies").Strategy
        for cls in classes:
            if not issubclass(cls, strategy):
                strategy.register(cls)
