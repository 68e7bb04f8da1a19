"""Every exception that this package raises on purpose.

    LightningHivemindError
    ├── ArgumentError (ValueError)         a wrong argument, or two that exclude one another
    ├── PlatformError (RuntimeError)       hivemind cannot run on this machine
    ├── NetworkError (RuntimeError)
    │   ├── AddressError (ValueError)      an address that is no multiaddress, or that cannot work
    │   ├── DaemonError                    the libp2p daemon did not start, or died
    │   ├── JoinError                      none of ``initial_peers`` answered
    │   └── WireError                      another peer sent what cannot be understood, or is not who it should be
    └── SwarmError (RuntimeError)
        ├── SchemaMismatchError            another peer of this run has another model or engine
        ├── StateError                     no peer's state could be downloaded or used
        ├── RanksError                     a rank of this peer has ended, or is not where the others are
        ├── NonFiniteGradientsError        many batches in a row gave gradients that are not finite
        └── EngineStuckError               the engine did not come back within its deadline

Messages say what happened with field=value, what state is left, and the fix.
"""

from __future__ import annotations


class LightningHivemindError(Exception):
    """Base of all errors of this package."""


class ArgumentError(LightningHivemindError, ValueError):
    """An argument has an impossible value, or excludes another one. Nothing was started."""


class PlatformError(LightningHivemindError, RuntimeError):
    """hivemind cannot be imported or run here. Nothing was started."""


class NetworkError(LightningHivemindError, RuntimeError):
    """The libp2p daemon or the DHT could not do what was asked. Nothing is left running."""


class AddressError(NetworkError, ValueError):
    """A text that is not a multiaddress, or an address that cannot be used that way."""


class DaemonError(NetworkError):
    """The libp2p daemon did not start; or it, the DHT process or (``engine="hivemind"``) an averager is gone."""

    @classmethod
    def gone(cls, part: str) -> DaemonError:
        """``part`` of a peer has ended while it trained."""
        return cls(
            f"This peer's {part} is gone (was it killed, or out of memory?). Parameters are those of the last"
            " global step. Restart this peer: it will take the swarm's state."
        )


class JoinError(NetworkError):
    """None of ``initial_peers`` could be reached."""


class WireError(NetworkError):
    """What came from another peer cannot be understood, or it is not the peer that it should be. It is not used."""


class SwarmError(LightningHivemindError, RuntimeError):
    """The run as a whole cannot go on as configured."""


class SchemaMismatchError(SwarmError):
    """A live peer with the same ``run_id`` has another model, target, engine or codec.

    Of the model are compared: names, shapes and dtypes of its parameters, which are frozen, how many values its buffers
    and ``extra_tensors`` have, and the class of its optimizer.
    """


class RanksError(SwarmError):
    """A process of this peer has ended, or does something else than the others. The peer ends; the swarm goes on."""


class StateError(SwarmError):
    """The swarm's state could not be downloaded, or does not fit this model. The local model is unchanged."""


class NonFiniteGradientsError(SwarmError):
    """Many batches in a row gave gradients that are not finite. Parameters are those of the last global step."""


class EngineStuckError(SwarmError):
    """A call into the engine did not return within its deadline, and cancelling it did not help."""


def kind_of(value: object) -> str:
    """For a message: "a str", "an int"."""
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"
