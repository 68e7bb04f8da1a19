"""``lightning-hivemind collate``: one file of float32 weights out of what ranks have written each for itself."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from lightning_hivemind.errors import ArgumentError
from lightning_hivemind.lightning_twins import chosen_package, lightning_module
from lightning_hivemind.peer.portable import FSDP, writer_of
from lightning_hivemind.peer.shards import plain_name

#: what Lightning's FSDP2 and FSDP call the weights there
_WEIGHTS = ("state_dict", "model")


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "collate",
        help="make one file of a checkpoint's directory",
        description=(
            "Writes the weights of a directory that FSDP2, FSDP (sharded) or DeepSpeed have saved as one file, in"
            " float32, with what else Lightning keeps but the optimizer's state. It needs no GPU, and host memory for"
            " all of it. (Checkpoints with portable_checkpoints=True are such files already.)"
        ),
    )
    parser.add_argument("directory", type=Path, help="the checkpoint")
    parser.add_argument("file", type=Path, help="where to write; must not exist")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Write the file, and say how many values it has."""
    directory, file = given.directory, given.file
    if file.exists():
        raise ArgumentError(f"{file} exists. Name another file; nothing was written.")
    writer = writer_of(directory)
    if writer is None:
        raise ArgumentError(
            f"{directory} is no directory that FSDP2, FSDP or DeepSpeed have saved. Nothing was written."
        )
    checkpoint = _torchs(directory) if writer == FSDP else _deepspeeds(directory)
    checkpoint["state_dict"] = {plain_name(name): _whole(one) for name, one in checkpoint["state_dict"].items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(checkpoint, file)
    values = sum(one.numel() for one in checkpoint["state_dict"].values() if isinstance(one, torch.Tensor))
    sys.stdout.write(f"{file}: {len(checkpoint['state_dict'])} tensors, {values:,} values\n")
    return 0


def _torchs(directory: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        dcp_to_torch_save(directory, Path(folder) / "all.pt")
        found = _read(Path(folder) / "all.pt")
    weights = next((found[name] for name in _WEIGHTS if name in found), None)
    if weights is None:
        raise ArgumentError(f"{directory} has no weights, only {', '.join(found)}. Nothing was written.")
    return {**_read(directory / "meta.pt"), "state_dict": weights}


def _deepspeeds(directory: Path) -> dict[str, Any]:
    convert = lightning_module(chosen_package(), "utilities.deepspeed").convert_zero_checkpoint_to_fp32_state_dict
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        convert(directory, Path(folder) / "all.pt")
        return _read(Path(folder) / "all.pt")


def _read(file: Path) -> dict[str, Any]:
    """As Lightning reads a checkpoint that it resumes."""
    found: dict[str, Any] = lightning_module(chosen_package(), "plugins.io").TorchCheckpointIO().load_checkpoint(file)
    return found


def _whole(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return value.float() if value.is_floating_point() else value
