"""A script that uses hivemind alone, as its users write it: ``hivemind.Optimizer``, and nothing of this package.

It joins a run of ours, and trains until the file STOP is there: python stock_peer.py INITIAL_PEERS RUN_ID STOP. Says in
JSON lines what it did.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import hivemind
import torch

from swarm.models import Numbered, make_net


def main(initial_peers: list[str], run_id: str, stop: Path) -> None:
    torch.set_num_threads(1)
    net = make_net(seed=77)  # its own start: what it takes from the run must replace it
    data = Numbered(4096)
    dht = hivemind.DHT(initial_peers=initial_peers, start=True)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id=run_id,
        target_batch_size=32,
        batch_size_per_step=8,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05),
        matchmaking_time=10.0,
        averaging_timeout=30.0,
        averager_opts={"target_group_size": 2},
        delay_state_averaging=False,  # what it says of its parameters is then final
        verbose=True,
    )
    optimizer.load_state_from_peers()
    say("loaded", epoch=optimizer.local_epoch, digest=float(sum(p.double().sum() for p in net.parameters())))
    done, start = optimizer.local_epoch, 2000
    while not stop.exists():
        batch = data.rows(range(start, start + 8))
        start = (start + 8) % 4000
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(batch["x"]), batch["y"]).backward()
        time.sleep(0.25)
        optimizer.step()
        if optimizer.local_epoch != done:
            done = optimizer.local_epoch
            flat = torch.cat([p.detach().double().flatten() for p in net.parameters()])
            say("epoch", epoch=done, parameters=flat.tolist())
    say("done", epoch=optimizer.local_epoch, ours="lightning_hivemind" in sys.modules)
    optimizer.shutdown()
    dht.shutdown()


def say(event: str, **fields: object) -> None:
    print("SAID " + json.dumps({"event": event, **fields}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2], Path(sys.argv[3]))
