"""hivemind's progress tracker, made exact about this peer and honest about the others."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from hivemind.optim.progress_tracker import LocalTrainingProgress, ProgressTracker
from hivemind.utils import ValueWithExpiration, get_dht_time
from hivemind.utils.asyncio import enter_asynchronously

from lightning_hivemind.engine.stock.rounds import answered

log = logging.getLogger("lightning_hivemind")

POLL_S = 0.01  # between two looks at whether the DHT has answered: milliseconds, as a rule


class ExactTracker(ProgressTracker):  # type: ignore[misc]  # hivemind has no types
    """Counts this peer's own samples from memory (its DHT record is always late), and steps on samples, not guesses.

    hivemind's tracker also lets an epoch end when it *estimates* that the swarm has enough samples. Here an epoch ends
    when the samples are there, or when another peer has ended it.
    """

    _others: dict[bytes, LocalTrainingProgress]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._others = {}
        self._looks = 0
        super().__init__(*args, **kwargs)

    @property
    def swarm_samples(self) -> int:
        """Samples for this peer's epoch: its own exactly, the others' as last reported."""
        epoch = self.local_progress.epoch
        others = sum(peer.samples_accumulated for peer in self._others.values() if peer.epoch == epoch)
        return int(self.local_progress.samples_accumulated + others)

    @property
    def ready_to_update_epoch(self) -> bool:
        return bool(self.global_epoch > self.local_progress.epoch or self.swarm_samples >= self.target_batch_size)

    def others_at(self, *epochs: int) -> set[bytes]:
        """Peer ids of the others whose last report was for one of ``epochs``."""
        return {peer.peer_id for peer in self._others.values() if peer.epoch in epochs}

    def others_heard_within(self, age_s: float) -> set[bytes]:
        """Peer ids of the others that reported within the last ``age_s`` seconds, for whatever epoch."""
        oldest = get_dht_time() - age_s
        return {peer.peer_id for peer in self._others.values() if peer.time >= oldest}

    def others_since(self, epoch: int) -> set[bytes]:
        """Peer ids of the others whose last report was for ``epoch`` or a later one."""
        return {peer.peer_id for peer in self._others.values() if peer.epoch >= epoch}

    def announce(self, timeout_s: float) -> None:
        """Report this peer's epoch now, though it has no samples yet, so that the others expect it in their round."""
        progress = self.local_progress
        stored = self.dht.store(
            key=self.training_progress_key,
            subkey=self._local_public_key,
            value=progress.dict(),
            expiration_time=get_dht_time() + self.metadata_expiration,
            return_future=True,
        )
        stored.result(timeout_s)

    def refresh(self, timeout_s: float, should_abort: Callable[[], bool]) -> None:
        """Read the others' reports now. Call it only inside ``pause_updates``.

        Raises:
            TimeoutError: the DHT did not answer. What was known stays known; also when this peer is to stop.
        """
        self._looks += 1
        future = self.dht.get(self.training_progress_key, latest=True, return_future=True)
        if answered(future, timeout_s, should_abort):
            found = future.result()
            self.global_progress = self._parse_swarm_progress_data(found.value if found is not None else None)

    def run(self) -> None:
        """The tracker's thread; unlike hivemind's, it leaves no task behind to complain at exit."""
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(asyncio.gather(self._progress_reporter(), self._progress_fetcher()))
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.shutdown_complete.set()

    async def _progress_fetcher(self) -> None:
        """Read the others' reports when they are due. hivemind's holds the lock meanwhile, without a limit."""
        loop = asyncio.get_running_loop()
        while not self.shutdown_triggered.is_set():
            due_s = max(0.0, self.global_progress.next_fetch_time - get_dht_time())
            if await loop.run_in_executor(None, self.global_state_updated.wait, due_s):
                self.global_state_updated.clear()
                continue
            looks = self._looks
            future = self.dht.get(self.training_progress_key, latest=True, return_future=True)
            asked = time.monotonic()
            while not future.done() and not self.shutdown_triggered.is_set():
                if time.monotonic() - asked > self.metadata_expiration:
                    break
                await asyncio.sleep(POLL_S)
            if not future.done():
                continue  # never answered: what was known stays known, until the next question
            async with enter_asynchronously(self.lock_global_progress):
                if looks != self._looks or self.shutdown_triggered.is_set():
                    continue  # a later look, of a round, was answered meanwhile
                found = future.result()
                self.global_progress = self._parse_swarm_progress_data(found.value if found is not None else None)
                self.fetched_global_progress_this_epoch.set()

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop, and take this peer's report back, so that the others stop counting on it at once."""
        self.shutdown_triggered.set()
        self.should_report_progress.set()
        self.global_state_updated.set()
        self.shutdown_complete.wait(timeout)
        if not self.shutdown_complete.is_set() and self.lock_global_progress.locked():
            # a round that never came back holds it, and a thread of hivemind's pool waits for it, which the interpreter
            # joins at exit: without this the process would print its error and never end
            self.lock_global_progress.release()
        # from a thread: the pipe to the DHT process may be full, and nobody may be reading it
        withdrawing = threading.Thread(target=self._withdraw, args=(timeout,), name="tracker-withdrawal", daemon=True)
        withdrawing.start()
        withdrawing.join(timeout)

    def _withdraw(self, timeout: float | None) -> None:
        withdrawn = self.dht.store(
            self.training_progress_key,
            subkey=self._local_public_key,
            value=None,
            expiration_time=get_dht_time() + self.metadata_expiration,
            return_future=True,
        )
        # the future is awaited for its own sake, too: the DHT process fails on one that was dropped
        try:
            withdrawn.result(timeout and 0.8 * timeout)  # not while Python ends, see PeerRecords
        except Exception as error:
            log.debug("the last report could not be withdrawn: %r", error)

    def _parse_swarm_progress_data(self, metadata: Any) -> Any:
        records = dict(metadata) if isinstance(metadata, dict) else {}
        mine = records.pop(self._local_public_key, None)
        self._others = {
            key: LocalTrainingProgress.parse_obj(record.value)
            for key, record in records.items()
            if record.value is not None
        }
        if mine is not None or self.local_progress.samples_accumulated > 0:
            expiration = mine.expiration_time if mine is not None else self.local_progress.time
            records[self._local_public_key] = ValueWithExpiration(self.local_progress.dict(), expiration)
        progress = super()._parse_swarm_progress_data(records)
        if self.client_mode and all(peer.client_mode for peer in self._others.values()):
            # hivemind counts no client's epoch, since no client can give its state; where all are clients, a late one
            # would average with peers of another epoch
            progress.epoch = max([progress.epoch, *(peer.epoch for peer in self._others.values())])
        return progress
