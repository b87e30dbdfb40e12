"""Messages to the addresses of OUTBOX_ALERTS, by mail and by webhook, to receivers that are real."""

from __future__ import annotations

import html
import socket
import threading
import time

import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality.alerts import Message, send
from outbox_pipelines.settings import load_settings
from tests.conftest import patience
from tests.quality.receivers import mail_box, webhook


def test_a_webhook_and_a_mail_box_get_it() -> None:
    begins = Message("shop: lag", "5 min\n→ `outbox status`", is_over=False)
    over = Message("shop: lag resolved", "it was", is_over=True)
    with webhook() as posted, mail_box() as mailed:
        settings = load_settings(alerts=f"{posted.address}  {mailed.address}")
        assert [each.unsent for each in send(settings, [begins, over])] == [(), ()]
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
        (outcome,) = send(settings, [Message(f"shop: {error}", f"1 × {error}", is_over=False)])
    assert outcome.unsent == ()
    (mail,) = mailed.mails
    parts = {part.get_content_type(): part.get_content() for part in mail.walk() if not part.is_multipart()}
    assert parts
    for kind, text in parts.items():
        shown = html.unescape(text) if kind == "text/html" else text
        assert error.replace("<", "‹") in shown.replace("&", "&amp;").replace("&amp;amp;", "&amp;"), kind
        if kind == "text/html":
            assert "<img" not in text
            assert "<a " not in text


def test_an_address_that_fails_is_named_without_its_secret() -> None:
    message = Message("shop: lag", "5 min", is_over=False)
    with webhook() as good, webhook() as bad:
        bad.status = 500
        settings = load_settings(alerts=f"{bad.address} {good.address}")
        first, second = send(settings, [message])
        assert (first.address, first.unsent, second.unsent) == ("address 1 (json://…)", (message,), ())
        assert "500" in first.why
        assert "secret" not in first.why
        assert len(good.bodies) == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "set OUTBOX_ALERTS"),
        ("smoke://signal/secret", "OUTBOX_ALERTS: apprise does not understand address 1 of 1"),
        ("operator@example.com json://host x", "not understand address 1, address 3 of 3"),
    ],
)
def test_what_is_no_address_is_refused(given: str, says: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SetupError) as refused:
        send(load_settings(alerts=given), [])
    assert says in str(refused.value)
    assert "secret" not in str(refused.value)
    assert "secret" not in caplog.text


def test_an_address_gets_later_what_it_has_not_accepted() -> None:
    """Guards against a receiver that never hears of a problem, because it was down for one moment of it."""
    one, other = (Message(f"shop: {name}", "5 min", is_over=False) for name in ("lag", "kafka"))
    with webhook() as good, webhook() as bad:
        bad.status = 500
        settings = load_settings(alerts=f"{good.address} {bad.address}")
        outcomes = send(settings, [one])
        kept = {each.address: each.unsent for each in outcomes if each.unsent}
        assert list(kept.values()) == [(one,)]
        bad.status, bad.bodies = 200, []
        assert [each.unsent for each in send(settings, [other], kept)] == [(), ()]
        assert [body["title"] for body in bad.bodies] == ["shop: lag", "shop: kafka"]
        assert [body["title"] for body in good.bodies] == ["shop: lag", "shop: kafka"]


def test_the_address_of_a_receiver_that_is_down_is_not_shown() -> None:
    """Guards against a token in the error of a connection, which contains the address."""
    settings = load_settings(alerts="json://127.0.0.1:1/Very-Secret-Token")
    (outcome,) = send(settings, [Message("shop: lag", "5 min", is_over=False)])
    assert "Connection refused" in outcome.why
    assert "Very" not in outcome.why


def test_an_address_that_does_not_answer_delays_no_other() -> None:
    """Guards against an alert that comes minutes late, because the mail server before it is silent."""
    message = Message("shop: lag", "5 min", is_over=False)
    with socket.create_server(("127.0.0.1", 0)) as silent, webhook() as good:
        mail = (
            f"mailto://127.0.0.1:{silent.getsockname()[1]}?from=a@example.com&to=b@example.com&mode=insecure"
        )
        settings = load_settings(alerts=f"{mail}&cto=600 {good.address}")
        waiting = threading.Thread(target=send, args=(settings, [message]), daemon=True)
        waiting.start()
        until = time.monotonic() + patience(30)
        while not good.bodies:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert waiting.is_alive()
        connection, _ = silent.accept()
        connection.close()
        waiting.join(600)


def test_the_answer_of_a_mail_server_is_shown() -> None:
    """Guards against an operator who cannot tell a wrong password from a server that is down."""
    with mail_box() as mailed:
        mailed.refuses = "550 5.1.1 no such user"
        (outcome,) = send(
            load_settings(alerts=mailed.address), [Message("shop: lag", "5 min", is_over=False)]
        )
    assert len(outcome.unsent) == 1
    assert "5.1.1 no such user" in outcome.why
