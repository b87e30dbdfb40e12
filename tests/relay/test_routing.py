"""Topic templates."""

import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.routing import IllegalTopicError, TopicTemplate
from outbox_pipelines.settings import load_settings


@pytest.mark.parametrize(
    ("template", "topic"),
    [
        ("{aggregate_type}-events", "order-events"),
        ("outbox.event.{aggregate_type}", "outbox.event.order"),
        ("{aggregate_type}.{event_type}", "order.order.placed"),
        ("everything", "everything"),
    ],
)
def test_a_template_names_the_topic(template: str, topic: str) -> None:
    """Guards against events in a topic that nobody reads."""
    assert TopicTemplate(template).topic("order", "order.placed") == topic


@pytest.mark.parametrize("template", ["{agregate_type}", "{", "{0}", "a b", "{aggregate_type}/x", ""])
def test_a_template_that_cannot_work_is_refused_where_it_enters(template: str) -> None:
    """Guards against a typing error that shows at the first event only."""
    with pytest.raises(ValueError, match=r".+"):
        TopicTemplate(template)


def test_the_setting_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a stack of pydantic's in an operator's face."""
    monkeypatch.setenv("OUTBOX_TOPIC", "{type}")
    with pytest.raises(SetupError, match=r"^OUTBOX_TOPIC=\{type\}: unknown field \{type\}: use .*$"):
        load_settings()


def test_a_type_that_makes_no_topic_name_is_refused() -> None:
    """Guards against librdkafka retrying for ever a name that cannot exist."""
    with pytest.raises(IllegalTopicError, match="order/eu-events"):
        TopicTemplate("{aggregate_type}-events").topic("order/eu", "x")
