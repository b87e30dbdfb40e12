"""Topic templates, and topics of single event types."""

import pytest

from outbox_pipelines.config.rules import Router
from outbox_pipelines.config.topics import IllegalTopicError, TopicTemplate
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import load_settings


@pytest.mark.parametrize(
    ("template", "topic"),
    [
        ("{aggregate_type}-events", "Order-events"),
        ("outbox.event.{aggregate_type}", "outbox.event.Order"),
        ("{aggregate_type}.{event_type}", "Order.OrderPlaced"),
        ("domain-events.{aggregate_type:lower}", "domain-events.order"),
        ("{aggregate_type:lower}.{event_type:lower}.{event_type}", "order.orderplaced.OrderPlaced"),
        ("everything", "everything"),
    ],
)
def test_a_template_names_the_topic(template: str, topic: str) -> None:
    """Guards against events in a topic that has no readers."""
    assert TopicTemplate(template).topic("Order", "OrderPlaced") == topic


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{agregate_type}", r"unknown field \{agregate_type\}: use \{aggregate_type\} or"),
        ("{0}", r"unknown field \{0\}"),
        ("{}", r"unknown field \{\}"),
        ("{aggregate_type.upper}", r"unknown field \{aggregate_type.upper\}"),
        ("{aggregate_type:upper}", r"unknown format .*use \{aggregate_type\} or \{aggregate_type:lower\}"),
        ("{event_type:>10}", r"use \{event_type\} or \{event_type:lower\}"),
        ("{event_type:{aggregate_type}}", r"unknown format"),
        ("{aggregate_type!r}", r"unknown format"),
        ("{", r"not a topic template .*write \{\{ for a brace"),
        ("a b", r"1 to 249 of the characters"),
        ("{aggregate_type}/x", r"1 to 249 of the characters"),
        ("a" * 250, r"1 to 249 of the characters"),
        ("..", r"1 to 249 of the characters"),
        ("", r"1 to 249 of the characters"),
    ],
)
def test_a_template_that_cannot_work_is_refused_where_it_enters(template: str, says: str) -> None:
    """Guards against a typing error that shows at the first event only."""
    with pytest.raises(ValueError, match=says):
        TopicTemplate(template)


def test_the_setting_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a stack of pydantic's in an operator's face."""
    monkeypatch.setenv("OUTBOX_TOPIC", "{type}")
    with pytest.raises(SetupError, match=r"^OUTBOX_TOPIC=\{type\}: unknown field \{type\}: use .*$"):
        load_settings()


@pytest.mark.parametrize("aggregate_type", ["order/eu", "größe", "x" * 250, ".", ""])
def test_a_type_that_makes_no_topic_name_is_refused(aggregate_type: str) -> None:
    """Guards against librdkafka retrying without end a name that cannot exist."""
    with pytest.raises(IllegalTopicError, match=f"'{aggregate_type}' is not a topic name"):
        TopicTemplate("{aggregate_type}").topic(aggregate_type, "x")


def test_a_type_of_its_own_wins_over_the_template() -> None:
    """Guards against a mapped event type in the default topic, and an unmapped one in none."""
    topics = {"order.placed": "orders", "Card.paid": "pay.{aggregate_type:lower}", "a=b": "c"}
    router = Router(load_settings(topic="all.{aggregate_type}", event_types=topics))
    assert router.topic("Order", "order.placed") == "orders"
    assert router.topic("Card", "Card.paid") == "pay.card"
    assert router.topic("Order", "a=b") == "c"
    assert router.topic("Order", "order.placed.late") == "all.Order"
    with pytest.raises(IllegalTopicError, match=r"all\.or/der"):
        router.topic("or/der", "x")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("order.placed", "part 1 is not name=value"),
        ("x=y,x=z", "part 2 has a name that another has"),
        ('{"x": "y"', "is not JSON"),
        ("x={type}", r"\[x\] topic: unknown field \{type\}"),
        ("x=", r"\[x\] topic: a topic name consists of"),
    ],
)
def test_a_map_that_cannot_work_is_refused_where_it_enters(text: str, says: str) -> None:
    """Guards against a map whose mistake shows at the first event of that type."""
    with pytest.raises(SetupError, match=rf"^OUTBOX_EVENT_TYPES.* {says}"):
        load_settings(event_types=text)
