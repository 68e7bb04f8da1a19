"""One small record per live peer in the DHT: what peers tell one another besides gradients.

A record is sealed with the id of its run: who does not know that can neither make one, nor make an old one last longer.
Whoever does can write any peer's. What comes in is bounded in size and number, and of plain types; what it says must be
checked by whoever uses it.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import hmac
import logging
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

import hivemind
import msgpack  # type: ignore[import-untyped]
from hivemind.utils import get_dht_time

from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.network.addresses import is_peer_id

log = logging.getLogger("lightning_hivemind")

#: Upper bound of one packed record. A request for the DHT process stays well below PIPE_BUF (4096) this way, so that
#: several threads and processes can write requests to the one pipe without tearing one another's.
MAX_RECORD_BYTES = 2048
#: Records of more peers than this are ignored.
MAX_PEERS = 4096
#: A record that claims to live longer than this is not one of ours.
_MAX_EXPIRATION_S = 3600.0
_MAX_ITEMS = 128
_MAX_DEPTH = 4
_POLL_S = 0.1
#: Overwrites a record until it expires: its peer has left.
_WITHDRAWN = b""
SEAL_BYTES = 16

Record = dict[str, Any]


class PeerRecords:
    """Publishes this peer's record and keeps the last known records of all peers, from one background thread.

    No method raises because of the network; trouble is logged once until it is over. Thread-safe.

    Args:
        dht: a running DHT.
        run_id: peers of the same run see one another.
        peer_id: this peer's id, the key of its record.
        refresh_s: s between two fetches, and between two stores of an unchanged record. Lower it to see changes of
            others sooner, at the price of traffic.
        expiration_s: s after which the record of a peer that was killed disappears; above ``2 * refresh_s``.
    Raises:
        ArgumentError: the two times do not fit.
    """

    def __init__(
        self, dht: hivemind.DHT, run_id: str, peer_id: str, refresh_s: float = 5.0, expiration_s: float = 30.0
    ) -> None:
        if not 0 < 2 * refresh_s <= expiration_s <= _MAX_EXPIRATION_S:
            raise ArgumentError(
                f"refresh_s={refresh_s:g}, expiration_s={expiration_s:g}: need 0 < 2 * refresh_s <= expiration_s <= "
                f"{_MAX_EXPIRATION_S:g}, or live peers disappear between two stores."
            )
        self.refresh_s = refresh_s
        self.expiration_s = expiration_s
        self._dht = dht
        self._key = f"{run_id}_lightning_peers"
        self._peer_id = peer_id
        self._changed = threading.Condition()
        self._own: Record = {}
        self._dirty = False
        self._known: dict[str, tuple[Record, float]] = {}
        self._fetches = 0
        self._wanted = 0
        self._closing = False
        self._closed_by = 0.0
        self._withdraws = False
        self._last_expiration = 0.0
        self._trouble = self._clock_told = False
        self._malformed: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="peer-records", daemon=True)
        self._thread.start()

    def publish(self, **fields: object) -> None:
        """Merge ``fields`` into this peer's record, and have it stored soon; a field of ``None`` is removed.

        Raises:
            ArgumentError: the record would be larger than :data:`MAX_RECORD_BYTES`, or holds something other than
                None, bool, int, float, str, bytes, and lists and string-keyed dicts of them. The record is unchanged.
        """
        with self._changed:
            if self._closing:
                return
            merged = {name: value for name, value in {**self._own, **fields}.items() if value is not None}
            pack_record(merged)
            self._own = merged
            self._dirty = True
            self._changed.notify_all()

    def read(self) -> dict[str, Record]:
        """Records of the peers that live, by peer id, as last fetched; this peer's own always as published."""
        now = get_dht_time()
        with self._changed:
            records = {peer: dict(record) for peer, (record, expires) in self._known.items() if expires > now}
            if self._own and not self._closing:
                records[self._peer_id] = dict(self._own)
            else:
                records.pop(self._peer_id, None)
        return records

    def refresh(self, timeout_s: float) -> bool:
        """Fetch (and store, if something is new) now. True once a fetch begun after this call has ended well."""
        with self._changed:
            wanted = self._wanted = max(self._wanted, self._fetches) + 1
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._fetches >= wanted or self._closing, timeout_s) and (
                self._fetches >= wanted
            )

    def close(self, timeout_s: float = 2.0) -> None:
        """Withdraw the record and stop, within ``timeout_s``. Safe to call twice; call it before the DHT is stopped."""
        with self._changed:
            self._closing = True
            self._closed_by = time.monotonic() + 0.8 * timeout_s
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        due = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or self._dirty or self._wanted > self._fetches,
                    timeout=max(0.0, due - time.monotonic()),
                )
                closing, own, begun_at = self._closing, dict(self._own), self._wanted
                store = bool(own) and (self._dirty or time.monotonic() >= due)
                self._dirty = False
            if closing:
                if own or self._last_expiration:
                    self._withdraws = True
                    self._store(_WITHDRAWN, timeout_s=self._closed_by - time.monotonic())
                return
            stored = not store or self._store(pack_record(own), timeout_s=self.expiration_s)
            if self._closing:
                continue
            fetched = self._fetch(timeout_s=self.expiration_s)
            with self._changed:
                if fetched:
                    self._fetches = max(self._fetches, begun_at)
                    self._changed.notify_all()
                elif self._wanted > self._fetches:  # do not spin on a network that is down
                    self._changed.wait_for(lambda: self._closing, timeout=min(1.0, self.refresh_s))
            self._tell_trouble(not (stored and fetched))
            due = time.monotonic() + self.refresh_s

    def _store(self, value: bytes, timeout_s: float) -> bool:
        # The DHT keeps of two values the one that expires later: each store must be later than the one before.
        now = get_dht_time()
        expires = max(now + self.expiration_s, self._last_expiration + 0.001)
        self._last_expiration = expires
        self._tell_clock(expires - now)
        sealed = seal(self._key, self._peer_id, value, expires) + value
        return bool(self._ask("store", timeout_s, self._key, sealed, expires, subkey=self._peer_id))

    def _fetch(self, timeout_s: float) -> bool:
        failed = object()
        found = self._ask("get", timeout_s, self._key, latest=True, otherwise=failed)
        if found is failed:
            return False
        entries = found.value if found is not None else {}
        if not isinstance(entries, Mapping):
            self._report_malformed("*", "the key holds one value instead of one per peer")
            entries = {}
        known: dict[str, tuple[Record, float]] = {}
        for peer, entry in entries.items():
            if len(known) >= MAX_PEERS:
                self._report_malformed("*", f"more than {MAX_PEERS} peers")
                break
            read = self._read_entry(peer, entry)
            if read is not None:
                known[peer] = read
        with self._changed:
            self._known = known
        return True

    def _read_entry(self, peer: object, entry: Any) -> tuple[Record, float] | None:
        """(record, expiration) of one entry; None for a peer that left, and for what is malformed."""
        if not isinstance(peer, str) or not is_peer_id(peer):
            self._report_malformed("?", "its key is not a peer id")
            return None
        expires = getattr(entry, "expiration_time", None)
        if not isinstance(expires, (int, float)) or expires > get_dht_time() + _MAX_EXPIRATION_S:
            self._report_malformed(peer, "impossible expiration")
            return None
        value = getattr(entry, "value", None)
        try:
            if not isinstance(value, bytes):
                raise ValueError(f"holds a {type(value).__name__}, not bytes")
            packed = value[SEAL_BYTES:]
            if not hmac.compare_digest(value[:SEAL_BYTES], seal(self._key, peer, packed, expires)):
                raise ValueError("was not sealed by a peer of this run, or not by this release")
            return None if packed == _WITHDRAWN else (unpack_record(packed), float(expires))
        except ValueError as error:
            self._report_malformed(peer, str(error))
            return None

    def _ask(self, method: str, timeout_s: float, *args: Any, otherwise: object = None, **options: Any) -> Any:
        """Call the DHT with a deadline; ``otherwise`` on any trouble, which ends here as the class promises."""
        try:
            if not self._dht.is_alive():  # what is sent to it would stay in the pipe, until that is full
                return otherwise
            future = getattr(self._dht, method)(*args, return_future=True, **options)
            return self._result(future, timeout_s)
        except Exception as error:  # pipes, futures, and whatever hivemind raised in its process
            log.debug("records: %s failed: %r", method, error)
            return otherwise

    def _result(self, future: Any, timeout_s: float) -> Any:
        """The future's result, given up when the deadline is over, the DHT process is gone, or :meth:`close` waits.

        After :meth:`close` no thread may be here any more: what hivemind keeps of a future is a tensor of torch, and a
        thread that looks at it when Python ends aborts the process.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return future.result(timeout=max(0.0, min(_POLL_S, deadline - time.monotonic())))
            except concurrent.futures.TimeoutError:
                if future.done():  # meanwhile, or that was the answer
                    return future.result()
                given_up = (self._closing and not self._withdraws) or not self._dht.is_alive()
                if given_up or time.monotonic() >= deadline:
                    raise

    def _tell_trouble(self, trouble: bool) -> None:
        if self._closing:  # it was given up for that
            return
        if trouble and not self._trouble:
            log.warning("the DHT does not take or give peer records; retrying every %.0f s", self.refresh_s)
        elif self._trouble and not trouble:
            log.info("the DHT takes and gives peer records again")
        self._trouble = trouble

    def _tell_clock(self, lives_s: float) -> None:
        """Of a record that others take for none of ours, once until it is over."""
        ahead = lives_s > _MAX_EXPIRATION_S
        if ahead and not self._clock_told:
            log.warning(
                "this machine's clock was set back by %.1f hours: for so long, peers that come do not find this one. "
                "Start it anew to be found at once (if it has an identity_path, with another one)",
                (lives_s - self.expiration_s) / 3600,
            )
        self._clock_told = ahead

    def _report_malformed(self, peer: str, reason: str) -> None:
        if peer not in self._malformed and len(self._malformed) < MAX_PEERS:
            self._malformed.add(peer)
            log.warning("ignoring the record of peer %s: %s", peer, reason)


def seal(key: str, peer: str, value: bytes, expires: float) -> bytes:
    """What shows that whoever made this entry knows ``key``, which the DHT itself knows by its hash only."""
    secret = hashlib.sha256(f"seal of {key}".encode()).digest()
    return hmac.digest(secret, peer.encode() + struct.pack(">d", expires) + value, "sha256")[:SEAL_BYTES]


def pack_record(record: Mapping[str, object]) -> bytes:
    """Pack a record for the DHT. Raises ArgumentError for wrong types, too deep nesting, or too many bytes."""
    problem = _problem_with(record, depth=0)
    if problem:
        raise ArgumentError(f"peer record: {problem}. The record is unchanged.")
    packed: bytes = msgpack.packb(record, use_bin_type=True)
    if len(packed) > MAX_RECORD_BYTES:
        sizes = {name: len(msgpack.packb(value, use_bin_type=True)) for name, value in record.items()}
        raise ArgumentError(
            f"peer record: {len(packed)} bytes, at most {MAX_RECORD_BYTES} fit (by field: {sizes}). The record is "
            "unchanged. Publish fewer or shorter fields."
        )
    return packed


def unpack_record(packed: bytes) -> Record:
    """Read a record that may come from anyone. Raises ValueError for all that :func:`pack_record` cannot have made."""
    if len(packed) > MAX_RECORD_BYTES:
        raise ValueError(f"has {len(packed)} bytes, at most {MAX_RECORD_BYTES} are read")
    try:
        record = msgpack.unpackb(
            packed, raw=False, strict_map_key=True, use_list=True, max_ext_len=0, max_map_len=_MAX_ITEMS
        )
    except Exception as error:  # msgpack has no common base for what it raises on hostile input
        raise ValueError(f"is not msgpack ({type(error).__name__})") from error
    if not isinstance(record, dict):
        raise ValueError(f"holds a {type(record).__name__}, not a dict")
    problem = _problem_with(record, depth=0)
    if problem:
        raise ValueError(problem)
    return record


def _problem_with(value: object, depth: int) -> str | None:
    if value is None or isinstance(value, (bool, float, str, bytes)):
        return None
    if isinstance(value, int):
        return None if -(2**63) <= value < 2**64 else f"the integer {value} has more than 64 bits"
    if depth >= _MAX_DEPTH:
        return f"nested deeper than {_MAX_DEPTH}"
    if isinstance(value, (list, tuple)):
        inner: list[object] = list(value)
    elif isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            return "a dict has keys that are not strings"
        inner = list(value.values())
    else:
        return f"a {type(value).__name__} cannot be published"
    if len(inner) > _MAX_ITEMS:
        return f"{len(inner)} items, at most {_MAX_ITEMS}"
    return next((problem for item in inner if (problem := _problem_with(item, depth + 1))), None)
