"""What all tests share: one thread per process, the swarm harness, and every peer's output under a failed test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# How long an example takes says nothing on a busy machine; and every run has the same examples, so that a rare one that
# fails is found by who looks for it (SEEDS=..., see ``make hostile``), not by whoever lands something else.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize="SEEDS" not in os.environ)
hypothesis.settings.load_profile("repeatable")

# Before torch is imported anywhere: several peers share this machine's cores.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
# The harness is imported as ``swarm.harness``, by the tests and by the peers that it starts.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from swarm.harness import Swarm, Zygotes  # noqa: E402 - needs the path above

#: ENGINES=native,hivemind in the environment: all on both, also what is marked ``above_engines`` or ``thorough``
ENGINES = os.environ.get("ENGINES", "native,hivemind").split(",")
_SWARM = pytest.StashKey[Swarm]()


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Every swarm test runs once per engine."""
    return str(request.param)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def is_wanted(item: pytest.Item) -> bool:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        marked = "above_engines" if parameters.get("engine") == "hivemind" else "thorough"
        marks = {mark.name for mark in item.iter_markers()}
        if "each_engine" in marks:
            marks.discard("above_engines")
        return not {marked, "thorough"} & marks

    if "ENGINES" not in os.environ:
        config.hook.pytest_deselected(items=[item for item in items if not is_wanted(item)])
        items[:] = [item for item in items if is_wanted(item)]


@pytest.fixture(scope="session")
def zygotes() -> Iterator[Zygotes]:
    """Processes that have torch and Lightning imported already, and fork the peers."""
    pool = Zygotes()
    yield pool
    pool.close()


@pytest.fixture
def swarm(
    request: pytest.FixtureRequest, zygotes: Zygotes, engine: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Swarm]:
    """A fresh swarm; afterwards every process is gone, and a peer that ended by itself has left nothing behind."""
    one = Swarm(zygotes, engine=engine, folder=tmp_path_factory.mktemp("swarm"))
    request.node.stash[_SWARM] = one
    yield one
    one.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    one = item.stash.get(_SWARM, None)
    if report.failed and one is not None:
        report.sections.extend(one.report())
    return report
