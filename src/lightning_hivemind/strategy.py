"""``HivemindStrategy``: what Lightning calls, in the order in which Lightning calls it.

The strategy translates between a Trainer and an engine. What words like *step* mean in a swarm is decided in
:mod:`lightning_hivemind.training`; who talks to the network is :mod:`lightning_hivemind.engine`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.events import BatchDropped, EventBus
from lightning_hivemind.lightning_twins import Twinned, accept_everywhere, package_of, twin_of
from lightning_hivemind.peer.local import Local, chosen, replicated, single
from lightning_hivemind.platform import require_hivemind
from lightning_hivemind.subscribers import JsonLinesSubscriber, LogSubscriber, make_log_visible
from lightning_hivemind.training.samples import count_samples
from lightning_hivemind.training.session import TrainingSession

if TYPE_CHECKING:
    import hivemind
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import Strategy as _Base

    from lightning_hivemind.network.daemon import PeerNetwork
else:
    _Base = object

log = logging.getLogger("lightning_hivemind")

#: with the default ``shutdown_timeout`` it fits into the ten seconds that leaving may take
NETWORK_STOP_S = 4.0
CHECKPOINT_KEY = "lightning_hivemind"


class HivemindStrategy(_Base, metaclass=Twinned):
    """Train one model together with other peers over the internet.

    Gradients are accumulated until the *whole swarm* has ``target_batch_size`` samples, then averaged among the peers,
    and every peer makes the same optimizer step. Start the same script elsewhere with the ``INITIAL_PEERS=...`` that
    this peer prints, and it joins.

    All arguments, their defaults and when to change them: :class:`lightning_hivemind.arguments.Arguments`.
    ``**optimizer_kwargs`` are those of its fields that are not named here.

    Raises:
        ArgumentError: an impossible value, or two arguments that exclude one another. Nothing was started.
        AddressError: an address that cannot be one. Nothing was started.
        PlatformError: hivemind cannot run on this machine. Nothing was started.
    """

    strategy_name = "hivemind"
    # set in the twins (see lightning_twins), or by their bases
    package: str
    mixin: type
    cluster_environment: Any
    global_rank: int
    finish_gradients: Callable[[], None]

    def __init__(
        self,
        target_batch_size: int,
        run_id: str = "lightning_run",
        batch_size: int | None = None,
        delay_state_averaging: bool = False,
        delay_optimizer_step: bool | None = None,
        delay_grad_averaging: bool = False,
        offload_optimizer: bool | None = None,
        reuse_grad_buffers: bool = False,
        scheduler_fn: Callable[..., Any] | None = None,
        matchmaking_time: float = 5.0,
        averaging_timeout: float = 30.0,
        verbose: bool = False,
        averager_opts: dict[str, Any] | None = None,
        host_maddrs: list[str] | None = None,
        initial_peers: str | list[str] | None = None,
        **optimizer_kwargs: Any,
    ) -> None:
        self.arguments = Arguments.create(
            target_batch_size,
            run_id=run_id,
            batch_size=batch_size,
            delay_state_averaging=delay_state_averaging,
            delay_optimizer_step=delay_optimizer_step,
            delay_grad_averaging=delay_grad_averaging,
            offload_optimizer=offload_optimizer,
            reuse_grad_buffers=reuse_grad_buffers,
            scheduler_fn=scheduler_fn,
            matchmaking_time=matchmaking_time,
            averaging_timeout=averaging_timeout,
            verbose=verbose,
            averager_opts=averager_opts,
            host_maddrs=host_maddrs,
            initial_peers=initial_peers,
            **optimizer_kwargs,
        )
        require_hivemind()
        self._become(chosen(self.arguments.local_strategy, self.package))
        self.events = EventBus()
        make_log_visible()
        self.events.subscribe(LogSubscriber(verbose=verbose))
        self._network: PeerNetwork | None = None
        self._session: TrainingSession | None = None
        self.extra_tensors = self.arguments.extra_tensors
        self._batch_samples = self._backwards = 0
        self._last_epoch, self._last_kept = 0, dict[str, Any]()
        self.peer_model: Any = None
        self._left = self._events_to_file = False

    # ------------------------------------------------------------------ Trainer(...)

    @property
    def accelerator(self) -> Any:
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        package = package_of(accelerator)
        if package is not None and package != self.package:
            # a Trainer of the other Lightning package takes us: become its twin before it goes on
            self._become(chosen(self.arguments.local_strategy, package, of_trainer=True))
        self._accelerator = accelerator

    def spread(self) -> None:
        """``local_strategy="auto"``, and the Trainer has several devices."""
        self._become(
            replicated(
                self.package,
                accelerator=self._accelerator,
                precision_plugin=self._precision_plugin,
                checkpoint_io=self._checkpoint_io,
                cluster_environment=self.cluster_environment,
            )
        )

    @property
    def handles_gradient_accumulation(self) -> bool:
        return True

    # ------------------------------------------------------------------ trainer.fit(...): set-up

    def setup(self, trainer: Trainer) -> None:
        """Move the model, make its optimizer, and (when fitting) become a peer of the swarm."""
        assert self.model is not None
        names = {id(buffer): name for name, buffer in self.model.named_buffers()}
        super().setup(trainer)
        # converting and moving a module replaces its buffers: the new ones are meant
        module: Any = self.lightning_module
        self.extra_tensors = tuple(
            module.get_buffer(names[id(one)]) if id(one) in names else one for one in self.extra_tensors
        )
        if self._session_wanted():
            self._start_swarm(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            raise ArgumentError(  # Lightning's own fix, manual optimization, is none in a swarm
                "configure_optimizers returned several optimizers: a swarm trains with exactly one. Put all parameters"
                " into one optimizer, with param groups for unlike settings."
            ) from None

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.resume(checkpoint, checkpoint["optimizer_states"][0])

    def resume(self, checkpoint: Mapping[str, Any], optimizer_state: Mapping[str, Any]) -> None:
        """As far as this strategy keeps count; ``optimizer_state``: what the optimizer has not loaded already."""
        if self._session is not None:
            ours = checkpoint.get(CHECKPOINT_KEY, {})
            epoch = ours.get("epoch", checkpoint["global_step"])
            self._session.restore(optimizer_state, int(epoch), ours.get("kept", {}))

    def on_train_start(self) -> None:
        """Before the first batch: take the swarm's state if it is ahead, or if this peer joins a run."""
        self._backwards = 0
        self._running().synchronise()

    # ------------------------------------------------------------------ trainer.fit(...): every batch

    def on_train_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Count the samples of the batch that comes now."""
        session = self._running()
        self._drop_left_out()
        samples = 0 if session.auxiliary else count_samples(batch, self.arguments.batch_size)
        self._batch_samples = session.begin_batch(samples)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # an auxiliary peer helps to average and trains nothing
        return None if self._running().auxiliary else super().training_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._backwards += 1
        weight = self._running().batch_weight(self._batch_samples)
        return super().backward(closure_loss if weight == 1.0 else closure_loss * weight, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """One micro-batch: forward, backward, accumulate; and the global step when the swarm has enough samples."""
        loss = closure()  # a module may have called its own before, then this one does nothing
        session = self._running()
        backwards, self._backwards = self._backwards, 0
        samples = self._batch_samples if backwards else 0
        self.finish_gradients()
        if samples and backwards > 1 and self.arguments.reuse_grad_buffers:  # nothing has cleared the first one's
            self._tell_dropped(session.drop_doubled(samples), "it has the sum of several backward passes")
            samples = 0
        if samples and not session.accept_gradients():
            self._tell_dropped(session.drop_batch(samples), session.drop_reason)
            samples = 0
        session.step(samples)
        return loss

    def on_train_end(self) -> None:
        """Nothing is left untold."""
        self._drop_left_out()

    def _drop_left_out(self) -> None:
        """A gradient that an optimizer_step() of the module's own computed, and went no further."""
        if self._backwards:
            self._tell_dropped(self._running().discard(self._batch_samples), "optimizer.step() was not called")
        self._backwards = 0

    def _tell_dropped(self, samples: int, reason: str) -> None:
        if self.is_global_zero:
            self.events.emit(BatchDropped(epoch=self.global_epoch, samples=samples, reason=reason))

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state, once everything that is delayed has arrived in it."""
        if self._session is not None:
            self._session.flush()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of the optimizer that really steps, as a plain Trainer would save it."""
        if self._session is None or self.peer_model is not None:
            state: dict[str, Any] = super().optimizer_state(optimizer)
            return state
        return self._session.optimizer_state()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        # the parameters' own count: saved in the middle of a step (on_exception), Lightning's global_step is one less
        checkpoint[CHECKPOINT_KEY] = {"epoch": self.global_epoch, "run_id": self.arguments.run_id}
        if "optimizer_states" in checkpoint:  # else only weights are wanted
            checkpoint[CHECKPOINT_KEY]["kept"] = self._session.kept() if self._session is not None else self._last_kept
        super().save_checkpoint(checkpoint, filepath, storage_options)

    # ------------------------------------------------------------------ the end

    def teardown(self) -> None:
        """Leave the swarm and stop every process that was started; safe to call twice.

        Takes ``shutdown_timeout`` for the engine and four seconds for the network, at most.
        """
        session, self._session = self._session, None
        network = None
        if session is not None or self._session_wanted():  # a DHT that was asked for outlives validate() before the fit
            network, self._network = self._network, None
        try:
            if session is not None:
                self._last_epoch, self._left = session.epoch, True
                self._last_kept = session.close(self.arguments.shutdown_timeout)
        finally:
            try:
                if network is not None:
                    network.shutdown(NETWORK_STOP_S)
            finally:
                super().teardown()

    # ------------------------------------------------------------------ what scripts may ask

    @property
    def dht(self) -> hivemind.DHT:
        """The running DHT, of rank 0 of this peer; started now if it was not yet.

        Raises:
            RuntimeError: the fit is over, and nothing would stop another one: the next fit starts it again. Or this is
                another rank.
        """
        if not self.is_global_zero:
            raise RuntimeError(
                f"rank {self.global_rank} of this peer has no DHT, rank 0 has: ask trainer.is_global_zero first"
            )
        if self._network is None and self._left:
            raise RuntimeError("the DHT was stopped with the end of the fit: read strategy.dht before or during it")
        return self._started_network().dht

    @property
    def num_peers(self) -> int:
        """Peers of this run that are known to be alive, this one included."""
        return self._session.engine.num_peers if self._session is not None else 1

    @property
    def global_epoch(self) -> int:
        """Committed global steps of the swarm; after the fit, as many as there were."""
        return self._session.epoch if self._session is not None else self._last_epoch

    def swarm_mean(self, name: str, value: float, samples: int) -> float:
        """The mean of a metric over all peers, weighted by samples; never waits for anybody.

        Publishes ``value`` (over ``samples`` samples) under ``name`` and returns the weighted mean of every live peer's
        latest. A peer that has published nothing yet is not in it. What a peer says before its first batch (Lightning's
        sanity check), or as a helper (``auxiliary``), is not of the swarm's model, and is not published.

        Raises:
            ArgumentError: more than 20 names, or one of more than 40 bytes. Those published before stay.
        """
        return self._running().swarm_mean(name, float(value), samples)

    def request_stop(self, reason: str = "requested") -> None:
        """Stop the whole run: every peer ends after the same global step. ``reason`` is logged here."""
        self._running().request_stop(reason)

    # ------------------------------------------------------------------ private

    @classmethod
    def first_bases(cls, package: str) -> tuple[type, ...]:
        """Of a strategy that is just being constructed."""
        return single(package).bases

    def _become(self, local: Local) -> None:
        """Be a strategy of such a peer."""
        self.__class__ = twin_of(self.mixin, local.package, local.bases)
        accept_everywhere(self.__class__)
        if local.made is None:
            super().__init__(**local.settings)
        else:
            self.__dict__.update(local.made)

    def _session_wanted(self) -> bool:
        if self.lightning_module is None:
            return True
        return str(getattr(self.lightning_module.trainer.state.fn, "value", "")) == "fit"

    def _start_swarm(self, trainer: Trainer) -> None:
        session = TrainingSession(self.arguments, self, trainer, self.events)
        session.check()
        self._session = session
        session.start(self._started_network)
        self.peer_model = session.model_in_parts
        if self._network is not None and not self.arguments.client_mode:
            self._announce(self._network)

    def _started_network(self) -> PeerNetwork:
        if self._network is None:
            from lightning_hivemind.network.daemon import PeerNetwork

            self._write_events()
            network = PeerNetwork(self.arguments.network_settings(), self.events)
            module = self.lightning_module
            network.start(without=[*module.parameters(), *module.buffers()] if module is not None else ())
            self._network = network
        return self._network

    def _write_events(self) -> None:
        path = self.arguments.events_path
        if path is not None and not self._events_to_file:
            self.events.subscribe(JsonLinesSubscriber(path))
            self._events_to_file = True

    def _announce(self, network: PeerNetwork) -> None:
        from lightning_hivemind.network.invitation import invitation

        text = invitation(
            network.visible_addresses(), argv=sys.orig_argv, executable=sys.executable, environ=os.environ
        )
        try:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        except (AttributeError, OSError, ValueError) as error:  # there is none, or it is full, or closed
            log.warning("the line with which others join could not be printed (%s): %s", error, text)

    def _running(self) -> TrainingSession:
        if self._session is None:
            raise RuntimeError("this needs a running fit: call it between the start and the end of trainer.fit()")
        return self._session


class CollaborativeStrategy(HivemindStrategy):
    """The older published name of :class:`HivemindStrategy`: same arguments, same behaviour."""

    strategy_name = "collaborative"


# LightningCLI asks whether a class path names a Strategy before it makes one
accept_everywhere(HivemindStrategy, CollaborativeStrategy)

__all__ = ["CollaborativeStrategy", "HivemindStrategy"]
