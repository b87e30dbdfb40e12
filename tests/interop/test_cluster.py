"""Histories over a cluster of three real brokers: leaders and coordinators move, and replicas are behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.history import nemesis, verify
from tests.history.__main__ import report
from tests.history.load import GENTLE
from tests.history.relays import RELAYS
from tests.history.run import Run
from tests.history.servers import Servers, own_servers

_FAULTS = (
    "kill broker",
    "freeze broker",
    "kill broker at a request",
    "late requests",
    "two brokers away",
    "rolling restart",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with own_servers(tmp_path_factory.mktemp("cluster"), brokers=3) as servers:
        yield servers


# Each restart takes half a minute on a busy machine.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["at_least_once", "exactly_once"])
def test_brokers_come_and_go(cluster: Servers, tmp_path: Path, name: str) -> None:
    """Guards G1, G2 and G5 where a new leader or coordinator goes on with what the old one has replicated."""
    seed = verify.seed()
    chance = random.Random(seed)
    run = Run(cluster, name, RELAYS[name], seed, tmp_path, load=GENTLE, patience=120)
    try:
        run.start()
        for fault in chance.sample(_FAULTS, len(_FAULTS)):
            print(f"{run.arrived:8}  {fault}")
            run.disturb({fault: nemesis.ALL[fault]}, chance, chance.uniform(0.5, 5))
        verdict = report(run.finish())
    finally:
        run.close()
    assert verdict.wrong == []
    assert verdict.committed > 100
