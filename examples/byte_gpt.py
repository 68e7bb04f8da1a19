"""A byte-level GPT on the sources of Python's standard library: nothing to download, and small enough for one CPU core.

    python byte_gpt.py                                        # the first peer; it prints how others join
    INITIAL_PEERS=/ip4/192.0.2.7/tcp/... python byte_gpt.py   # every other peer, on any machine
    python byte_gpt.py --plain                                # the same training without a swarm

The swarm is one argument of the Trainer, ``strategy=HivemindStrategy(...)`` in :func:`train`; the model and the data
know nothing about it.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import sysconfig
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_hivemind import HivemindStrategy

BYTES = 256

# -- model ------------------------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """Turns queries and keys by angles that grow with their position, so that attention sees distances.

    Su et al. 2021, arXiv:2104.09864. With learned positions instead, this model needs twice as many steps to a
    held-out loss of 2.4.
    """

    def __init__(self, head_width: int, context: int) -> None:
        super().__init__()
        frequencies_F = 1000.0 ** -torch.linspace(0, 1, head_width // 2)  # wavelengths of 6 to 6000 bytes
        angles_TF = torch.arange(context)[:, None] * frequencies_F
        self.register_buffer("cos_TF", angles_TF.cos(), persistent=False)
        self.register_buffer("sin_TF", angles_TF.sin(), persistent=False)

    def forward(self, x_BHTD: Tensor) -> Tensor:
        cos_TF = self.get_buffer("cos_TF")[: x_BHTD.shape[2]]
        sin_TF = self.get_buffer("sin_TF")[: x_BHTD.shape[2]]
        a_BHTF, b_BHTF = x_BHTD.chunk(2, dim=-1)
        return torch.cat([a_BHTF * cos_TF - b_BHTF * sin_TF, a_BHTF * sin_TF + b_BHTF * cos_TF], dim=-1)


class Block(nn.Module):
    """One transformer layer: causal attention, then a two-layer perceptron, each added to its normalised input."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.rotary = Rotary(width // heads, context)
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        b, t, c = x_BTC.shape
        qkv_BT3HD = self.qkv(self.norm_attention(x_BTC)).view(b, t, 3, self.heads, c // self.heads)
        q_BHTD, k_BHTD, v_BHTD = qkv_BT3HD.transpose(1, 3).unbind(2)
        q_BHTD, k_BHTD = self.rotary(q_BHTD), self.rotary(k_BHTD)
        attended_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        x_BTC = x_BTC + self.attention_out(attended_BHTD.transpose(1, 2).reshape(b, t, c))
        out_BTC: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x_BTC)), approximate="tanh"))
        return x_BTC + out_BTC


class ByteGPT(pl.LightningModule):
    """A GPT whose tokens are the 256 byte values; 0.83 million parameters with the default sizes.

    Args:
        width: size of the residual stream, a multiple of ``heads``.
        context: longest sequence in bytes.
        lr: learning rate of AdamW, reached after ``warmup`` steps (of the swarm: a scheduler advances once for each).
    """

    def __init__(
        self,
        *,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        context: int = 128,
        lr: float = 4e-3,
        warmup: int = 30,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.context, self.lr, self.warmup = context, lr, warmup
        self.byte_embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.Sequential(*(Block(width, heads, context) for _ in range(layers)))
        self.norm_out = nn.LayerNorm(width)
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            if name.endswith(("attention_out.weight", "mlp_out.weight")):  # what is added to the residual stream
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    def forward(self, bytes_BT: Tensor) -> Tensor:
        """Logits of each next byte, float (B, T, 256), for integer bytes (B, T), T <= ``context``."""
        x_BTC = self.blocks(self.byte_embedding(bytes_BT.long()))
        return F.linear(self.norm_out(x_BTC), self.byte_embedding.weight)

    def loss(self, crops: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte over crops (B, T + 1): each byte is predicted from those before it."""
        return F.cross_entropy(self(crops[:, :-1]).flatten(0, 1), crops[:, 1:].long().flatten())

    def training_step(self, crops: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(crops)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, crops: Tensor, batch_idx: int) -> None:
        self.log("held_out_loss", self.loss(crops), prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.01)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: str, n: int, temperature: float = 0.8) -> str:
        """``prompt`` continued by ``n`` sampled bytes; bytes that are no UTF-8 come out as a replacement character.

        Args:
            prompt: at least one character.
            temperature: above 0; small values pick the likeliest bytes, 1 samples as the model predicts.
        """
        text = list(prompt.encode())
        if not text or temperature <= 0:
            raise ValueError(f"{prompt=} must not be empty and {temperature=} must be above 0")
        for _ in range(n):
            seen_1T = torch.tensor([text[-self.context :]], device=self.device)
            probabilities = F.softmax(self(seen_1T)[0, -1] / temperature, dim=-1)
            text.append(int(torch.multinomial(probabilities, 1)))
        return bytes(text).decode(errors="replace")


def _initialise(module: nn.Module) -> None:
    """GPT-2's: small normal weights, zero biases."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


# -- data -------------------------------------------------------------------------------------------------------------

#: Folders that not every installation has (tests), or that hold tables rather than text.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}
#: Larger files are generated or tables.
LARGEST_FILE_BYTES = 300_000


def source_files(folder: Path) -> list[Path]:
    """The ``.py`` files below ``folder`` that are worth reading, in an order that does not depend on the machine."""
    files = (
        path
        for path in folder.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts)
        and 0 < path.stat().st_size <= LARGEST_FILE_BYTES
    )
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def is_held_out(name: str) -> bool:
    """One file in ten, chosen by its name: the same on every machine, and when files come or go."""
    return hashlib.sha256(name.encode()).digest()[0] < 26


class RandomCrops(IterableDataset[Tensor]):
    """Endless crops (``length``,) at random places of a text. Peers with different seeds see different crops."""

    def __init__(self, text: Tensor, length: int, seed: int) -> None:
        self.text, self.length = text, length
        self.random = random.Random(seed)

    def __iter__(self) -> Iterator[Tensor]:
        last = len(self.text) - self.length
        while True:
            start = self.random.randint(0, last)
            yield self.text[start : start + self.length]


class StdlibText(pl.LightningDataModule):
    """The standard library's sources as bytes, split by file into a text to train on and a held-out one.

    Args:
        batch_size: crops in one batch.
        context: bytes that the model sees; a crop has one more, the last to be predicted.
        seed: where this peer crops its training text. Give every peer its own; ``None`` draws one.
        held_out_crops: fixed crops, spread evenly over the held-out text, that validation reads.
        folder: read instead of the standard library.
    """

    def __init__(
        self,
        *,
        batch_size: int = 16,
        context: int = 128,
        seed: int | None = None,
        held_out_crops: int = 128,
        folder: Path | None = None,
    ) -> None:
        super().__init__()
        self.batch_size, self.crop_bytes, self.held_out_crops = batch_size, context + 1, held_out_crops
        self.seed = random.SystemRandom().randrange(2**31) if seed is None else seed
        self.folder = folder or Path(sysconfig.get_path("stdlib"))
        self.train_text = self.held_out_text = torch.empty(0, dtype=torch.uint8)

    def setup(self, stage: str | None = None) -> None:
        """Read the files into two uint8 tensors, once."""
        if len(self.train_text):
            return
        train, held_out = bytearray(), bytearray()
        for path in source_files(self.folder):
            part = held_out if is_held_out(path.relative_to(self.folder).as_posix()) else train
            part += path.read_bytes()
        if min(len(train), len(held_out)) < self.crop_bytes:
            raise RuntimeError(
                f"{self.folder} has {len(train)} bytes of Python to train on and {len(held_out)} held out, "
                f"but one crop needs {self.crop_bytes}. Give StdlibText(folder=...) with Python sources."
            )
        self.train_text = torch.frombuffer(train, dtype=torch.uint8)
        self.held_out_text = torch.frombuffer(held_out, dtype=torch.uint8)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(RandomCrops(self.train_text, self.crop_bytes, self.seed), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Tensor]:
        starts = torch.linspace(0, len(self.held_out_text) - self.crop_bytes, self.held_out_crops).long()
        crops = [self.held_out_text[start : start + self.crop_bytes] for start in starts]
        return DataLoader(crops, batch_size=64)  # type: ignore[arg-type]  # a list is all that a DataLoader needs


# -- training ---------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line; the defaults suit a few peers on one machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="train alone, without a swarm")
    parser.add_argument("--engine", default="native", help="what averages: native or hivemind")
    parser.add_argument("--run-id", default="byte-gpt", help="peers with the same name train together")
    parser.add_argument("--target-batch-size", type=int, default=64, help="samples of the whole swarm per step")
    parser.add_argument("--batch-size", type=int, default=16, help="samples of this peer per batch")
    parser.add_argument("--listen", action="append", help="multiaddress to listen on; may be given more than once")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--max-steps", type=int, default=-1, help="stop after so many steps of the swarm")
    parser.add_argument("--validate-every", type=int, default=50, help="batches between two validations")
    parser.add_argument("--seed", type=int, help="of this peer's training crops (default: drawn)")
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    return parser.parse_args(argv)


def train(options: argparse.Namespace, callbacks: Sequence[pl.Callback] = ()) -> ByteGPT:
    """Train with the options of :func:`parse`; returns the trained model."""
    pl.seed_everything(0)  # the peers start from equal weights; their data differs by StdlibText(seed=...)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="auto"
        if options.plain
        else HivemindStrategy(
            target_batch_size=options.target_batch_size,
            engine=options.engine,
            run_id=options.run_id,
            host_maddrs=options.listen,
            matchmaking_time=1.0,  # the default of 5 s is for peers with the internet between them
        ),
        max_steps=options.max_steps,
        max_time=timedelta(minutes=options.minutes) if options.minutes else None,
        gradient_clip_val=1.0,
        val_check_interval=options.validate_every,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        enable_progress_bar=options.progress,
        enable_checkpointing=False,
        logger=False,
    )
    model = ByteGPT()
    trainer.fit(model, datamodule=StdlibText(batch_size=options.batch_size, seed=options.seed))
    return model


def main() -> None:
    model = train(parse())
    print(model.generate("def ", 400))


if __name__ == "__main__":
    main()
