"""One message when it begins, one when it is over; by mail and by webhook, to receivers that are real."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from outbox_pipelines.cli.main import cli
from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality import alerts
from outbox_pipelines.quality.alerts import Known, Problem
from outbox_pipelines.quality.rules import judge
from outbox_pipelines.settings import load_settings
from tests.quality.receivers import webhook
from tests.quality.test_rules import WELL, WRONG

LAG = Problem("lag", "the oldest event is 5 min old", "`outbox status`")


class Pager:
    """The recipient's view: what was reported, tick by tick."""

    def __init__(self) -> None:
        self.known: dict[str, Known] = {}

    def tick(self, now: float, *problems: Problem) -> list[str]:
        # As over a restart: only what is JSON is kept.
        kept = alerts.from_json(alerts.to_json(self.known))
        messages, self.known = alerts.news(kept, problems, now=now, after=30.0, where="shop")
        return [message.title for message in messages]


def test_one_message_when_it_begins_and_one_when_it_is_over() -> None:
    pager = Pager()
    assert pager.tick(0, LAG) == []
    assert pager.tick(30, LAG) == ["shop: lag"]
    assert pager.tick(60, LAG) == []
    assert pager.tick(90) == []
    assert pager.tick(120) == ["shop: lag resolved"]
    assert pager.tick(150) == []
    assert pager.known == {}


def test_what_lasts_for_a_moment_is_not_reported() -> None:
    pager = Pager()
    assert [pager.tick(0, LAG), pager.tick(20), pager.tick(40, LAG), pager.tick(60)] == [[], [], [], []]


@pytest.mark.parametrize("every", [2, 3, 8])
def test_what_comes_and_goes_is_reported_once(every: int) -> None:
    """Guards against silence about a relay that comes and goes, and a pager that rings all night over it."""
    pager = Pager()
    # A tick is 30 s: two hours.
    shown = [pager.tick(30.0 * tick, *([] if tick % every else [LAG])) for tick in range(240)]
    assert [titles for titles in shown if titles] == [["shop: lag"]]
    assert shown.index(["shop: lag"]) == 2 * every
    # It is over when it has been absent for long.
    calm = [pager.tick(7_200.0 + 30 * tick) for tick in range(30)]
    assert [titles for titles in calm if titles] == [["shop: lag resolved"]]
    assert pager.known == {}


def test_what_is_rare_is_not_reported() -> None:
    pager = Pager()
    shown = [pager.tick(30.0 * tick, *([] if tick % 20 else [LAG])) for tick in range(240)]
    assert not any(shown)


def test_a_gap_between_ticks_ends_nothing() -> None:
    """Guards against a message at each restart of the daemon."""
    pager = Pager()
    assert [pager.tick(0, LAG), pager.tick(30, LAG), pager.tick(3_600, LAG)] == [[], ["shop: lag"], []]
    pager = Pager()
    assert [pager.tick(0, LAG), pager.tick(3_600, LAG)] == [[], ["shop: lag"]]


def test_what_grows_slowly_is_reported_once() -> None:
    pager = Pager()
    texts = [Problem("lag", f"the oldest event is {60 + tick} s old", "status") for tick in range(100)]
    shown = [pager.tick(30.0 * tick, text) for tick, text in enumerate(texts)]
    assert [titles for titles in shown if titles] == [["shop: lag"]]


def test_a_restart_of_a_relay_is_reported_once() -> None:
    pager = Pager()
    assert [pager.tick(0, LAG), pager.tick(30, LAG)] == [[], ["shop: lag"]]
    assert not any(pager.tick(40.0 + 20 * tick, *([LAG] if tick % 2 else [])) for tick in range(20))


def test_problems_are_distinguished() -> None:
    pager = Pager()
    keys = Problem("keys", "many", "fewer")
    pager.tick(0, LAG)
    assert pager.tick(30, LAG, keys) == ["shop: lag"]
    assert pager.tick(60, LAG, keys) == ["shop: keys"]
    pager.tick(70, keys)
    assert pager.tick(100, keys) == ["shop: lag resolved"]


def test_errors_are_problems_and_warnings_are_not() -> None:
    settings = load_settings(ui_url="https://dagster.example.com/")
    assert alerts.of_results(settings, judge(settings, WELL)) == []
    assert alerts.of_results(settings, judge(settings, WRONG["backlog"])) == []
    (problem,) = alerts.of_results(settings, judge(settings, WRONG["dead_letters"]))
    assert problem.key == "dead_letters"
    assert problem.text == "1 dead letter (1 × too large)"
    assert "`outbox dead-letters list`" in problem.help
    assert "docs/operating.md#dead_letters" in problem.help
    assert problem.help.endswith("; https://dagster.example.com/assets/outbox/health?view=checks")
    linked = load_settings(runbook_url="https://wiki.example.com/outbox")
    (problem,) = alerts.of_results(linked, judge(linked, WRONG["dead_letters"]))
    assert "(https://wiki.example.com/outbox#dead_letters)" in problem.help


def test_the_command_sends_a_test() -> None:
    def run(alerts: str) -> tuple[int, str]:
        environment = {"OUTBOX_DSN": "postgresql://me:secret@db.example/shop", "OUTBOX_ALERTS": alerts}
        done = CliRunner().invoke(cli, ["alerts", "test"], env=environment)
        return done.exit_code, done.output

    with webhook() as posted:
        assert run(posted.address) == (0, "sent to 1\n")
        assert posted.bodies[0]["title"] == "outbox in shop at db.example: a test"
        posted.status = 500
        code, output = run(posted.address)
        assert (code, "address 1 (json://…) did not accept the message: " in output) == (1, True)
        assert "error=500" in output
    assert run("")[0] == 2


def test_an_address_of_the_pages_is_checked() -> None:
    with pytest.raises(SetupError, match=r"OUTBOX_UI_URL.*write the address"):
        load_settings(ui_url="dagster.example.com")
    with pytest.raises(SetupError, match=r"OUTBOX_RUNBOOK_URL.*write the address"):
        load_settings(runbook_url="docs/operating.md")
