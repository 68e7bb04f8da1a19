"""The protocol's limits in time, all in seconds. Equal at all peers, or nearly so."""

from __future__ import annotations

from dataclasses import dataclass

#: silence that is taken for death
DETECT_S = 2.0
#: a peer's record is published again so long after the last time: if it has changed; if not, as it lives
PUBLISH_S, AGAIN_S = 2.0, 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Timeouts and sizes of a run.

    Attributes:
        run: the run's id.
        target_samples: that the swarm gathers before a round begins.
        chunks: into which the flat vector is cut.
        min_group_size: a round needs so many peers that contribute or are called, this one included.
        matchmaking_s: how long a coordinator waits for peers that were called.
        stall_s: how long a peer may deliver nothing that is owed before it is accused.
        detect_s: after how long without a sign of life others take a peer for dead.
        round_s: how long a round may take altogether.
        late_s: who needs so much longer than half of a round for its results, and longer than twice their time, has a
            slow line: see :meth:`.coordinator.Coordinator.done`.
        patience_s: so long at least it is waited for, unless that is known before: what is lost is asked for again.
        resend_s: after so long without an answer a message is repeated.
        probe_s: how often to try a peer to which there is no connection, though it lives.
        lives_s: for how long a record shows that a peer lives.
        backoff_s: pause after a failed round; doubled with each, up to ``max_backoff_s``.
    """

    run: str
    target_samples: int
    chunks: int
    min_group_size: int = 1
    matchmaking_s: float = 5.0
    stall_s: float = 5.0
    detect_s: float = DETECT_S
    round_s: float = 30.0
    late_s: float = 0.25
    patience_s: float = 2.5
    resend_s: float = 0.5
    probe_s: float = 15.0
    lives_s: float = 3 * AGAIN_S
    backoff_s: float = 0.05
    max_backoff_s: float = 2.0
