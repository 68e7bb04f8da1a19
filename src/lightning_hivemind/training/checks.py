"""What a Trainer may not ask of a swarm; said before anything is started."""

from __future__ import annotations

from typing import Any

import torch

from lightning_hivemind.arguments import Arguments
from lightning_hivemind.engine.groups import parameters_of
from lightning_hivemind.engine.native.statistics import has_mean
from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.training.schedulers import refuse_plateau


def check_trainer(arguments: Arguments, strategy: Any, trainer: Any) -> None:
    """Raises ArgumentError, with the fix, for settings of the Trainer or module that cannot work in a swarm."""
    _check_accumulation(trainer)
    _check_ranks(arguments, strategy)
    _check_callbacks(trainer)
    _check_optimizers(arguments, strategy, trainer)
    _check_extra_tensors(arguments, strategy)
    _check_dtypes(arguments, trainer.lightning_module, strategy.optimizers[0])


def _check_accumulation(trainer: Any) -> None:
    scheduler = "GradientAccumulationScheduler"  # Lightning adds one for accumulate_grad_batches, too
    scheduled = any(type(cb).__name__ == scheduler and _schedules(cb) for cb in trainer.callbacks)
    if trainer.accumulate_grad_batches != 1 or scheduled:
        said = f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})"
        raise ArgumentError(
            f"{scheduler if trainer.accumulate_grad_batches == 1 else said}: the swarm accumulates already, until"
            " it has target_batch_size samples. Remove it, and raise target_batch_size for larger batches."
        )


def _schedules(callback: Any) -> bool:
    scheduling = getattr(callback, "scheduling", {})
    return any(value != 1 for value in scheduling.values())


def _check_callbacks(trainer: Any) -> None:
    names = {base.__name__ for callback in trainer.callbacks for base in type(callback).__mro__}
    for name in names & {"LearningRateFinder", "BatchSizeFinder"}:
        raise ArgumentError(
            f"{name} trains for a while before the fit, which would be in the run of all peers. Look for the value on"
            " one machine, with a Trainer without this strategy, and give all peers what was found."
        )
    if "StochasticWeightAveraging" in names:
        raise ArgumentError(
            "StochasticWeightAveraging changes the learning rate by each peer's own passes, so peers would end with"
            " unlike parameters. Use EMAWeightAveraging, which averages what the swarm has, or a scheduler."
        )
    if "ModelPruning" in names:
        raise ArgumentError(
            "ModelPruning prunes after each peer's own passes, so peers would end with unlike masks. Prune the model"
            " that the swarm has trained, without this strategy."
        )


def _check_ranks(arguments: Arguments, strategy: Any) -> None:
    if strategy.num_nodes > 1 and arguments.local_strategy == "auto":
        raise ArgumentError(
            f"Trainer(num_nodes={strategy.num_nodes}): peers find one another by initial_peers. Leave num_nodes away,"
            " and start the script on each machine. (If several machines are to be one peer, say how it trains:"
            ' local_strategy="ddp".)'
        )
    if strategy.in_parts:
        _check_parts(arguments, strategy)
    elif strategy.world_size == 1:
        return
    ranks = f"this peer has {strategy.world_size} ranks"
    if arguments.auxiliary:
        raise ArgumentError(f"auxiliary=True: a peer that only helps needs one process, {ranks}. Give it devices=1.")
    if arguments.engine != "native":
        raise ArgumentError(
            f'engine={arguments.engine!r}: {ranks}, which only engine="native" can bring together. Start one peer per'
            " device (devices=1, or devices=[i] to choose it), each with INITIAL_PEERS of the first."
        )
    if arguments.reuse_grad_buffers:
        raise ArgumentError(f"reuse_grad_buffers=True: {ranks}, whose gradients are averaged first. Leave it away.")


def _check_parts(arguments: Arguments, strategy: Any) -> None:
    """Of ranks that have the model in parts."""
    parts = f"the ranks of this peer have the model in parts (local_strategy={arguments.local_strategy!r})"
    if arguments.average_opt_statistics:
        raise ArgumentError(f"average_opt_statistics: {parts}, and only rank 0 could average them. Leave it away.")
    if not arguments.portable_checkpoints and getattr(strategy, "_state_dict_type", "") == "full":
        raise ArgumentError(
            "portable_checkpoints=False with FSDP: what it writes of an optimizer as one file is wrong, and cannot be"
            ' resumed. Leave it away, or give FSDPStrategy(state_dict_type="sharded").'
        )
    if not arguments.portable_checkpoints and arguments.recreates_optimizer:
        raise ArgumentError(
            "portable_checkpoints=False with offload_optimizer (or a delay, which offloads): in the ranks' own format"
            " each has its part of the optimizer's state, and then rank 0 has it whole. Leave one of them away."
        )
    if strategy.offloads_itself and arguments.recreates_optimizer:
        raise ArgumentError(
            "offload_optimizer (or a delay, which offloads): DeepSpeed steps by its own optimizer. Leave them away, and"
            " use DeepSpeedStrategy(offload_optimizer=True) for host memory, with DeepSpeedCPUAdam (of"
            " deepspeed.ops.adam) in configure_optimizers."
        )
    if "16-mixed" in str(getattr(strategy.precision_plugin, "precision", "")).replace("bf16", ""):
        raise ArgumentError(
            f'Trainer(precision="16-mixed"): {parts}, each of which would have a loss scale of its own. Use'
            ' "bf16-mixed".'
        )


def _check_optimizers(arguments: Arguments, strategy: Any, trainer: Any) -> None:
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise ArgumentError(
            "automatic_optimization=False: the swarm decides when the optimizer steps. Use automatic optimization"
            " (return the loss from training_step)."
        )
    # (without what Lightning puts there for None)
    made = [one for one in strategy.optimizers if one.param_groups]
    if len(strategy.optimizers) != 1 or not made:
        raise ArgumentError(
            f"configure_optimizers returned {len(made)} optimizers: a swarm trains with exactly one."
            " Put all parameters into one optimizer, with param groups for unlike settings."
        )
    if isinstance(strategy.optimizers[0], torch.optim.SparseAdam):
        raise ArgumentError("SparseAdam takes sparse gradients only, and averages are dense. Use Adam.")
    if isinstance(strategy.optimizers[0], torch.optim.LBFGS):
        raise ArgumentError(
            "LBFGS evaluates the loss several times in one step, which a swarm cannot: its gradient comes from all"
            " peers. Use another optimizer."
        )
    for config in strategy.lr_scheduler_configs:
        refuse_plateau(config)
    if strategy.lr_scheduler_configs and arguments.recreates_optimizer:
        raise ArgumentError(
            "configure_optimizers returned a scheduler, but with offload_optimizer or delay_* the optimizer is created"
            " anew. Pass HivemindStrategy(scheduler_fn=...) instead, for example"
            " scheduler_fn=functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.999)."
        )
    if strategy.lr_scheduler_configs and arguments.scheduler_fn is not None:
        raise ArgumentError("configure_optimizers returned a scheduler, and scheduler_fn is given, too. Keep one.")


def _check_extra_tensors(arguments: Arguments, strategy: Any) -> None:
    for one in strategy.extra_tensors:
        if not (has_mean(one) if arguments.engine == "native" else one.is_floating_point()):
            raise ArgumentError(
                f"extra_tensors: one of {one.dtype}, with shape {tuple(one.shape)}, has no average. Give tensors of"
                ' floating-point numbers (or, with engine="native", single counters of torch.int16, int32 or int64).'
            )
    trained = {id(p) for p in parameters_of(strategy.optimizers[0])}
    if any(id(one) in trained for one in strategy.extra_tensors):
        raise ArgumentError("extra_tensors: one of them is a parameter of the optimizer, which is averaged anyway.")
    elsewhere = [one.device for one in strategy.extra_tensors if one.device.type != "cpu"]
    if elsewhere and arguments.offload_optimizer:
        raise ArgumentError(
            f"extra_tensors on {elsewhere[0]} with offload_optimizer (or a delay, which offloads): everything that is"
            " averaged then lies in host memory. Leave offload_optimizer and the delays away, or extra_tensors."
        )


def _check_dtypes(arguments: Arguments, module: Any, optimizer: torch.optim.Optimizer) -> None:
    """Whatever made the parameters so: ``Trainer(precision=...)``, or the module itself."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for parameter in parameters_of(optimizer):
        if torch.nn.parameter.is_lazy(parameter):
            raise ArgumentError(
                f"parameter {names.get(id(parameter), '?')} has no shape yet (a Lazy module): what peers average must"
                " be known before the first batch. Run one batch through the module in configure_model or __init__."
            )
        said = f"parameter {names.get(id(parameter), '?')} has dtype {parameter.dtype}"
        if not parameter.is_floating_point():  # hivemind's rounds over complex numbers never end
            raise ArgumentError(
                f"{said}: only floating-point numbers can be averaged. Keep a complex one as a real tensor"
                " (torch.view_as_complex where it is used), and a frozen one of whole numbers out of the optimizer."
            )
        if parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ArgumentError(
                f"{said}: averaging would round it to float32. Use"
                ' Trainer(precision="32-true"), and convert inside of training_step what needs more.'
            )
        if parameter.dtype != torch.float32 and arguments.offload_optimizer:
            raise ArgumentError(
                f"{said}, with offload_optimizer (or a delay, which offloads): the optimizer in"
                ' host memory steps in float32. Use Trainer(precision="bf16-mixed") or "16-mixed", or leave'
                " offload_optimizer and the delays away."
            )
