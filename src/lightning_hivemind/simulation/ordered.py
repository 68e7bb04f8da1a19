"""One order of messages, whatever order a set has.

The protocol asks and accuses in the order of sets of names, which differs between processes. A real network does not
care; a run that is to repeat exactly does.
"""

from __future__ import annotations

from lightning_hivemind.engine.native.protocol.actions import Action, Send
from lightning_hivemind.engine.native.protocol.messages import Accuse, Ended, Missing


def in_fixed_order(actions: list[Action]) -> list[Action]:
    """``actions`` with neighbouring messages of one such kind sorted by receiver; the rest stays in its place."""
    ordered: list[Action] = []
    run: list[Send] = []
    for action in actions:
        loose = isinstance(action, Send) and isinstance(action.message, (Missing, Accuse, Ended))
        if run and (not loose or type(action.message) is not type(run[0].message)):  # type: ignore[union-attr]
            ordered += sorted(run, key=_name)
            run = []
        if loose:
            assert isinstance(action, Send)
            run.append(action)
        else:
            ordered.append(action)
    return ordered + sorted(run, key=_name)


def _name(action: Action) -> tuple[str, str, bool]:
    assert isinstance(action, Send)
    message = action.message
    accused = message.peer if isinstance(message, Accuse) else ""
    return action.to, accused, isinstance(message, Missing) and message.inputs
