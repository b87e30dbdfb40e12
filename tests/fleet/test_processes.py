"""Processes of a fleet that are killed by a fault or by an event: the histories of three outboxes."""

from __future__ import annotations

import random
import signal
import sys
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from subprocess import Popen

from outbox_pipelines.quality import outbox_measurements
from tests.conftest import Outbox, command, wait_until
from tests.history import business
from tests.history.writers import Writers
from tests.relay import faults
from tests.relay.parked import numbers_by_key, parked_rows, write
from tests.relay.test_crashes import RELAY
from tests.relay.threads import owners

_LEASE = 2.0
# An event that kills the process, at the moment at which it is encoded.
_DEADLY = RELAY.replace('"relay", "--until-empty"', '"relay", "--all"')


def _environment(outboxes: list[Outbox], directory: Path) -> dict[str, str]:
    """The file of these outboxes, and the variables that hold their secrets."""
    file = directory / "outbox.toml"
    common = outboxes[0].settings
    lines = [
        "[outbox]",
        f'kafka = "{common.kafka}"',
        "[relay]",
        f"lease_seconds = {_LEASE}",
        "retry_seconds = 0.1",
    ]
    for outbox in outboxes:
        name = outbox.settings.name
        lines += [f"[outboxes.{name}]", f'dsn = {{ env = "{name.upper()}_DSN" }}']
        lines += [f'topics.topic = "{outbox.settings.topic}"']
        lines += [f'relay.delivery = "{outbox.settings.delivery}"']
    file.write_text("\n".join(lines))
    secrets = {f"{outbox.settings.name.upper()}_DSN": outbox.settings.dsn.reveal() for outbox in outboxes}
    return {"OUTBOX_CONFIG": str(file), **secrets}


def _numbers(outbox: Outbox) -> set[int]:
    return {n for found in numbers_by_key(outbox.messages()).values() for n in found}


def _pids(outboxes: list[Outbox]) -> list[int]:
    """The process that relays each; nothing for one that has none."""
    found = [outbox_measurements.read(outbox.settings).shards[0] for outbox in outboxes]
    return [int(shard.owner.split(":")[1]) for shard in found if shard.owner and not shard.unowned_seconds]


def test_kill_one_of_three(outboxes: list[Outbox], tmp_path: Path) -> None:
    """Guards G1 and G2: three processes divide three outboxes; two take over what a killed one relayed."""
    seed = faults.seed()
    chance = random.Random(seed)
    # One of them in transactions.
    outboxes[2] = Outbox(outboxes[2].settings.model_copy(update={"delivery": "exactly_once"}))
    for outbox in outboxes:
        with outbox.connect() as connection:
            business.prepare(connection)
    environment = _environment(outboxes, tmp_path)

    def process() -> AbstractContextManager[Popen[str]]:
        return faults.process(command("relay", "--all"), environment)

    with ExitStack() as processes:
        running = [processes.enter_context(process()) for _ in outboxes]
        wait_until(lambda: len(set(_pids(outboxes))) == 3, seconds=60, what="an outbox for each process")
        writers = [Writers(outbox.settings.dsn.reveal(), seed + n, 2) for n, outbox in enumerate(outboxes)]
        for _ in range(3):
            victim = chance.choice(running)
            victim.kill()
            killed_at = time.monotonic()
            wait_until(
                lambda victim=victim: len(found := _pids(outboxes)) == 3 and victim.pid not in found,  # type: ignore[misc]
                seconds=60,
                what="the others to take over",
            )
            print(f"taken over after {time.monotonic() - killed_at:.1f} s")
            for outbox in outboxes:
                faults.wait_for_more(faults.published(outbox), seconds=60)
            running.remove(victim)
            running.append(processes.enter_context(process()))
            wait_until(lambda: len(set(_pids(outboxes))) == 3, seconds=60, what="an outbox for each again")
        for writer in writers:
            writer.stop()
    verdicts = [faults.verify(outbox) for outbox in outboxes]
    assert verdicts[2].redelivered == 0


def test_an_event_that_kills_the_process_is_its_outbox_s_matter(
    outboxes: list[Outbox], tmp_path: Path
) -> None:
    """Guards G3 and G9: an event that kills the process, and events of other outboxes that are suspected."""
    guilty, *others = outboxes
    for outbox in others:
        write(outbox, *((f"a{n % 5}", {"n": n}) for n in range(400)))
    write(guilty, ("a", {"n": 1}), ("b", {"n": 2, "deadly": 1}), ("c", {"n": 3}))
    environment = _environment(outboxes, tmp_path)
    deaths = 0
    while deaths < 12:
        with faults.process([sys.executable, "-c", _DEADLY], environment) as relay:

            def is_over(relay: Popen[str] = relay) -> bool:
                dead = [row for row in parked_rows(guilty) if row[2] == "failed"]
                is_published = all(_numbers(outbox) == set(range(400)) for outbox in others)
                is_published = is_published and _numbers(guilty) == {1, 3}
                return relay.poll() is not None or (bool(dead) and is_published)

            wait_until(is_over, seconds=120, what="a dead letter, and all others in Kafka")
            if relay.poll() is None:
                break
            assert relay.returncode == -signal.SIGKILL, relay.communicate()
            deaths += 1
    assert 3 <= deaths <= 6
    assert _numbers(guilty) == {1, 3}
    for outbox in others:
        assert parked_rows(outbox) == []
    assert owners(guilty)
