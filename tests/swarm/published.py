"""The published code blocks, word for word but for what today's Lightning asks for, and a script that runs them.

Edited are: ``CollaborativeStrategy`` comes from ``lightning_hivemind.strategy``, codecs from ``hivemind.compression``;
``gamma=...`` is a number; ``gpus=1`` and ``accelerator="gpu"`` are this machine's. Each runs with both engines.
"""

from __future__ import annotations

import math
import os
from typing import Any

from swarm.peer_main import Recorder
from swarm.spec import PeerSpec

DELAYS = """
            delay_state_averaging=True,
            delay_grad_averaging=True,
            delay_optimizer_step=True,
            offload_optimizer=True,  # required to delay averaging
            scheduler_fn=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9),"""

OLDER = """
    import torch
    from functools import partial
    import pytorch_lightning as pl
    from lightning_hivemind.strategy import CollaborativeStrategy

    trainer = pl.Trainer(
        strategy=CollaborativeStrategy(
            target_batch_size=8192,{}
        ),
        accelerator="cpu",
        devices=1,
    )
"""

NEWER = """
    from pytorch_lightning import Trainer
    from lightning_hivemind.strategy import HivemindStrategy
    {}
    trainer = Trainer(
        strategy=HivemindStrategy(
            target_batch_size=target_batch_size,{}
        ),
        accelerator="cpu",
        devices=1,
    )
"""

BLOCKS = {
    "overlap": OLDER.format(DELAYS),
    "offload": OLDER.format("""
            offload_optimizer=True,
            scheduler_fn=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9),"""),
    "buffers": OLDER.format(" reuse_grad_buffers=True"),
    "float16": NEWER.format(
        "from hivemind.compression import Float16Compression\n",
        """
            grad_compression=Float16Compression(),
            state_averaging_compression=Float16Compression(),""",
    ),
    "size-adaptive": NEWER.format(
        """from hivemind.compression import Float16Compression, Uniform8BitQuantization
    from hivemind.compression import SizeAdaptiveCompression

    compression = SizeAdaptiveCompression(
        threshold=2 ** 16 + 1, less=Float16Compression(), greater_equal=Uniform8BitQuantization()
    )
""",
        """
            grad_compression=compression,
            state_averaging_compression=compression,""",
    ),
    "PowerSGD": NEWER.format(
        """from functools import partial
    from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
""",
        """
            grad_averager_factory=partial(PowerSGDGradientAverager, averager_rank=32, min_compression_ratio=0.5),""",
    ),
    "overlap, from lightning": OLDER.format(DELAYS)
    .replace("import pytorch_lightning as pl", "from lightning import Trainer")
    .replace("CollaborativeStrategy", "HivemindStrategy")
    .replace("pl.Trainer", "Trainer"),
}


def run_block(spec: PeerSpec) -> None:
    """Run the block that ``spec.env`` names, let its trainer train, and record how it went."""
    import lightning.pytorch
    import pytorch_lightning
    import torch

    from swarm.models import make_loader, make_model

    text = BLOCKS[os.environ["BLOCK"]]
    names: dict[str, Any] = {"target_batch_size": 8192}
    exec("if True:" + text.replace("target_batch_size=", f"engine={spec.engine!r}, target_batch_size="), names)
    trainer = names["trainer"]
    package = pytorch_lightning if isinstance(trainer, pytorch_lightning.Trainer) else lightning.pytorch
    model = make_model(package, width=264, lr=0.02)  # its middle layer is above the published threshold
    before = [one.detach().clone() for one in model.parameters()]
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(model, make_loader(16384, 4096, 0))
    after = list(model.parameters())
    moved = sum(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    finite = all(math.isfinite(float(one.detach().sum())) for one in after)
    Recorder(spec).write("ran", global_step=trainer.global_step, moved=moved, of=len(after), finite=finite,
                         engine=trainer.strategy.arguments.engine)  # fmt: skip
