"""One message when it begins, one when it is over; by mail and by webhook, to receivers that are real."""

from __future__ import annotations

import html

import pytest
from click.testing import CliRunner

from outbox_pipelines.cli import cli
from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality import alerts
from outbox_pipelines.quality.alerts import Known, Message, Problem
from outbox_pipelines.quality.rules import judge
from outbox_pipelines.settings import load_settings
from tests.quality.receivers import mail_box, webhook
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


def test_what_comes_and_goes_is_reported_once() -> None:
    """Guards against a pager that rings all night over a relay that comes and goes."""
    pager = Pager()
    told = [pager.tick(10.0 * tick, *([LAG] if tick % 3 else [])) for tick in range(1, 60)]
    assert [titles for titles in told if titles] == [["shop: lag"]] or not any(told)
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
    assert problem.text == "1 dead letters (1 × too large)"
    assert "`outbox dead-letters list`" in problem.help
    assert "docs/operating.md#dead_letters" in problem.help
    assert problem.help.endswith("; https://dagster.example.com/assets/outbox/health?view=checks")
    linked = load_settings(runbook_url="https://wiki.example.com/outbox")
    (problem,) = alerts.of_results(linked, judge(linked, WRONG["dead_letters"]))
    assert "(https://wiki.example.com/outbox#dead_letters)" in problem.help


def test_a_webhook_and_a_mail_box_get_it() -> None:
    begins = Message("shop: lag", "5 min\n→ `outbox status`", is_over=False)
    over = Message("shop: lag resolved", "it was", is_over=True)
    with webhook() as posted, mail_box() as mailed:
        settings = load_settings(alerts=f"{posted.address}  {mailed.address}")
        assert alerts.send(settings, [begins, over]) == []
    assert [(body["title"], body["type"]) for body in posted.bodies] == [
        ("shop: lag", "failure"),
        ("shop: lag resolved", "success"),
    ]
    assert "→ `outbox status`" in posted.bodies[0]["message"]
    assert [mail["subject"] for mail in mailed.mails] == ["shop: lag", "shop: lag resolved"]
    assert "operator@example.com" in mailed.mails[0]["to"]
    body = mailed.mails[0].get_body(("plain", "html"))
    assert body is not None
    assert "outbox status" in body.get_content()


def test_markup_in_a_mail_is_text() -> None:
    """Guards against an error with a link or an image, which the mail of an operator would show as ours."""
    error = '<img src="http://evil.example/x.png"><a href="http://evil.example/">log in</a> &amp; <b>'
    with mail_box() as mailed:
        settings = load_settings(alerts=mailed.address)
        assert alerts.send(settings, [Message(f"shop: {error}", f"1 × {error}", is_over=False)]) == []
    (mail,) = mailed.mails
    parts = {part.get_content_type(): part.get_content() for part in mail.walk() if not part.is_multipart()}
    assert parts
    for kind, text in parts.items():
        shown = html.unescape(text) if kind == "text/html" else text
        assert error in shown or html.escape(error) in text, kind
        if kind == "text/html":
            assert "<img" not in text
            assert "<a " not in text


def test_an_address_that_fails_is_named_without_its_secret() -> None:
    message = Message("shop: lag", "5 min", is_over=False)
    with webhook() as good, webhook() as bad:
        bad.status = 500
        settings = load_settings(alerts=f"{bad.address} {good.address}")
        assert alerts.send(settings, [message]) == ["address 1 (json://…)"]
        assert len(good.bodies) == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "set OUTBOX_ALERTS"),
        ("smoke://signal/secret", "OUTBOX_ALERTS: address 1 of 1 is not an address that apprise understands"),
        ("operator@example.com", "OUTBOX_ALERTS: address 1"),
    ],
)
def test_what_is_no_address_is_refused(given: str, says: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SetupError) as refused:
        alerts.send(load_settings(alerts=given), [])
    assert says in str(refused.value)
    assert "secret" not in str(refused.value)
    assert "secret" not in caplog.text


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
        assert (code, "address 1 (json://…) did not accept the message" in output) == (1, True)
    assert run("")[0] == 2


def test_an_address_of_the_pages_is_checked() -> None:
    with pytest.raises(SetupError, match=r"OUTBOX_UI_URL.*write the address"):
        load_settings(ui_url="dagster.example.com")
    with pytest.raises(SetupError, match=r"OUTBOX_RUNBOOK_URL.*write the address"):
        load_settings(runbook_url="docs/operating.md")
