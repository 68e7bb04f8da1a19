"""``local_strategy``: which of Lightning's strategies a peer is inside."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

from lightning_hivemind.argument_checks import closest
from lightning_hivemind.errors import ArgumentError, kind_of
from lightning_hivemind.lightning_twins import lightning_module, package_of
from lightning_hivemind.peer.fsdp import FullySharded
from lightning_hivemind.peer.in_parts import ModelParallel
from lightning_hivemind.peer.replicated import Replicated
from lightning_hivemind.peer.single import SingleProcess
from lightning_hivemind.peer.zero import ZeroRedundancy

AUTO = "auto"
#: for each strategy of Lightning's that a peer can be: what stands before it
_MIXINS: dict[str, type] = {
    "DeepSpeedStrategy": ZeroRedundancy,  # which Lightning derives from the next
    "DDPStrategy": Replicated,
    "ModelParallelStrategy": ModelParallel,
    "FSDPStrategy": FullySharded,
}


@dataclass(frozen=True, slots=True)
class Local:
    """What a peer is made of.

    Attributes:
        package: the Lightning package.
        bases: of its class, behind the strategy's own.
        settings: to construct the last of them with.
        made: what a strategy object of the user's own has already, in place of that.
    """

    package: str
    bases: tuple[type, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    made: dict[str, Any] | None = None


def single(package: str) -> Local:
    """One process on one device."""
    return Local(package, (SingleProcess, _class(package, "Strategy")))


def replicated(package: str, **settings: Any) -> Local:
    """DDP, with such settings."""
    return Local(package, (Replicated, _class(package, "DDPStrategy")), settings)


def chosen(local_strategy: Any, package: str, *, of_trainer: bool = False) -> Local:
    """What ``local_strategy`` says: a name that ``Trainer(strategy=...)`` takes, or a strategy object.

    ``of_trainer``: the Trainer's package, which must be an object's, too.

    Raises:
        ArgumentError: it is neither, or not one for peers of a swarm.
    """
    if local_strategy == AUTO:
        return single(package)
    if isinstance(local_strategy, str):
        registry = lightning_module(package, "strategies").StrategyRegistry
        if local_strategy not in registry:
            names = sorted(name for name in registry if _can_be(registry[name], package))
            raise ArgumentError(
                f"local_strategy={local_strategy!r}: there is no such strategy. {closest(local_strategy, names)}Give"
                f" one of {', '.join(names)}; or, for FSDP2 and tensor parallel, an object: ModelParallelStrategy(...)."
            )
        entry = registry[local_strategy]
        settings = dict(entry["init_params"])
        return Local(
            package, _bases(entry["strategy"], local_strategy, package, settings.get("start_method")), settings
        )
    its = package_of(local_strategy)
    if isinstance(local_strategy, type):
        name = local_strategy.__name__
        raise ArgumentError(f"local_strategy={name}: that is a class. Make an object of it: {name}().")
    if its is None:
        raise ArgumentError(
            f"local_strategy={local_strategy!r}: {kind_of(local_strategy)} is no strategy. Give what"
            ' Trainer(strategy=...) takes: a name ("ddp"), or a strategy object (DDPStrategy(static_graph=True)).'
        )
    if of_trainer and its != package:
        raise ArgumentError(
            f"local_strategy={local_strategy!r}: it is of {its}, the Trainer of {package}. Take both from one package."
        )
    made = dict(vars(local_strategy))
    return Local(its, _bases(type(local_strategy), local_strategy, its, made.get("_start_method")), made=made)


def _bases(strategy: Any, said: Any, package: str, start_method: Any) -> tuple[type, ...]:
    if start_method == "spawn":
        raise ArgumentError(
            f"local_strategy={said!r}: spawned ranks would get this strategy through pickle, which it does not bear."
            ' Use "ddp", which starts the script once for each rank.'
        )
    for name, mixin in _MIXINS.items():
        if isinstance(strategy, type) and issubclass(strategy, _class(package, name)):
            if issubclass(strategy, _class(package, "XLAStrategy")):  # derived from it
                break
            if mixin is ZeroRedundancy and importlib.util.find_spec("deepspeed") is None:
                raise ArgumentError(
                    f"local_strategy={said!r}: DeepSpeed is not installed. Install this package with its extra"
                    " deepspeed, which brings the release that it knows: pip install -e '.[deepspeed]' where it lies."
                )
            return (mixin, strategy)
    raise ArgumentError(
        f"local_strategy={said!r}: a peer of a swarm cannot be such a one. Use {', '.join(_MIXINS)}, or one of their"
        ' names; or leave it away: on one device, and on several with DDP, "auto" does.'
    )


def _can_be(entry: Any, package: str) -> bool:
    """Whether a peer can be this one of a registry."""
    try:
        return bool(_bases(entry["strategy"], "", package, entry["init_params"].get("start_method")))
    except ArgumentError:
        return False


def _class(package: str, name: str) -> type:
    found: type = getattr(lightning_module(package, "strategies"), name)
    return found
