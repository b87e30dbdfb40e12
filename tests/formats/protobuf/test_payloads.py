"""JSON as Protobuf and back: what is exact, what does not fit, and bytes of others."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.json_format import ParseDict
from google.protobuf.message_factory import GetMessageClass

from outbox_pipelines.core.misfits import MisfitError
from outbox_pipelines.formats.protobuf import decoding, descriptors, encoding
from tests.formats.protobuf.shop import MESSAGE, descriptor_set

FILE = descriptors.file_of(descriptor_set(), MESSAGE)
IMPORTS = descriptors.texts_of(FILE)
DESCRIPTOR = descriptors.message_of(FILE.text, IMPORTS, MESSAGE)
INDEX = encoding.index_of(DESCRIPTOR)
write = encoding.writer(DESCRIPTOR)
read = decoding.reader(FILE.text, IMPORTS)
ABSENT: dict[str, Any] = {
    **{"n": 0, "big": 0, "large": 0, "price": 0.0, "ratio": 0.0, "raw": "", "state": "NONE", "isPaid": False},
    **{"lines": [], "tags": [], "counts": {}, "order_id": ""},
}


def _back(payload: Any) -> Any:
    return read(INDEX + write(json.dumps(payload)))


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"n": -(2**31), "big": 2**63 - 1, "large": 2**64 - 1, "price": 0.1, "ratio": 0.1, "isPaid": True},
        {"price": 1e308, "ratio": 16777216, "raw": "AAH/", "state": "PAID", "tags": ["ö", ""]},
        {"at": "2026-11-27T09:30:00.250Z", "took": "1.500s", "wrapped": -(2**63), "note": ""},
        {"lines": [{"sku": "a"}, {"sku": "b", "n": 0}], "counts": {"-7": {"sku": "c"}}, "mail": ""},
        {"more": {"a": [1, None, {"b": True}], "c": "x"}, "any": [None, 0.5]},
        {"any": None, "price": "NaN"},
    ],
)
def test_what_fits_comes_back(payload: dict[str, Any]) -> None:
    """Guards against a value that is changed on the way, and a member that appears or vanishes."""
    assert _back(payload) == {**ABSENT, **payload}


@pytest.mark.parametrize(
    ("payload", "found"),
    [
        ({"at": "2026-11-27T10:30:00+01:00"}, {"at": "2026-11-27T09:30:00Z"}),
        ({"big": "9007199254740993"}, {"big": 9007199254740993}),
        ({"note": None, "lines": None, "of": None, "n": None}, {}),
        ({"of": {}}, {"of": ABSENT}),
        ({"n": 5.0}, {"n": 5}),
    ],
)
def test_what_comes_back_in_another_way(payload: dict[str, Any], found: dict[str, Any]) -> None:
    """Guards against exceptions to the rule that are not those of the documentation."""
    assert _back(payload) == {**ABSENT, **found}


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ({"n": 2**31}, ".n does not fit the 32 bits of an integer"),
        ({"large": -1}, ".large does not fit the 64 bits"),
        ({"n": "5"}, ".n is a string in place of an integer"),
        ({"n": True}, ".n is a boolean in place of an integer"),
        ({"n": 5.5}, ".n has decimals, and is an integer"),
        ({"big": "05"}, ".big is no integer"),
        ({"big": 10**40}, ".big does not fit the 64 bits"),
        ({"price": 10**40 + 1}, ".price has more digits than a double"),
        ({"price": "1.5"}, ".price is a string in place of a number"),
        ({"ratio": 16777217}, ".ratio has more digits than a float"),
        ({"more": {"a": [0, 2**53 + 1]}}, r".more.a[1] has more digits than a double"),
        ({"at": "2026-11-27"}, ".at is not a time with an offset"),
        ({"took": "a while"}, ".took is not a duration"),
        ({"raw": "secret!"}, ".raw is not base64"),
        ({"state": "SENT"}, ".state is no value of the enum shop.v1.State"),
        ({"state": 1}, ".state is a number in place of the name"),
        ({"isPaid": 1}, ".isPaid is a number in place of a boolean"),
        (
            {"is_paid": True},
            '.is_paid is called isPaid in JSON: rename the member, or add [json_name = "is_paid"]',
        ),
        ({"secret": 1}, ".secret is no field of shop.v1.Placed"),
        ({"@type": "x"}, ".@type is no field"),
        ({"mail": "a", "phone": "b"}, ".phone is the second member of the oneof way"),
        ({"lines": [{"sku": "a"}, {"sku": 1}]}, ".lines[1].sku is a number in place of a string"),
        ({"lines": [None]}, ".lines[0] is null in place of an object"),
        ({"lines": {}}, ".lines is an object in place of an array"),
        ({"counts": {"x": {}}}, ".counts.x is no key of this map"),
        ({"counts": {"1": None}}, ".counts.1 is null in place of an object"),
        ({"of": {"of": {"n": "secret"}}}, ".of.of.n is a string"),
        ([], " is an array in place of an object"),
        (None, " is null in place of an object"),
    ],
)
def test_what_does_not_fit_is_named_by_its_place(payload: Any, why: str) -> None:
    """Guards against a rounded or dropped value, and content in a message."""
    with pytest.raises(MisfitError) as refused:
        write(json.dumps(payload))
    assert str(refused.value).startswith(f"payload{why}")
    assert "secret" not in str(refused.value).replace("payload.secret", "")


def test_what_is_too_deep_or_no_json_is_refused() -> None:
    """Guards against a value that no reader accepts, and a relay that ends at one."""
    for text in (
        '{"of":' * 120 + "{}" + "}" * 120,
        '{"any":' + "[" * 100_000,
        '{"any":' + "[" * 60 + "]" * 60 + "}",
    ):
        with pytest.raises(MisfitError, match=r"^payload(\.of|\.any)? is nested too deeply: readers .* 100 "):
            write(text)
    with pytest.raises(MisfitError, match=r"^payload\.\w+ (does not fit the|is no field)"):
        write('{"n": ' + "1" * 5000 + "}")
    for text in ("{", '{"price": NaN}'):
        with pytest.raises(MisfitError, match="cannot be written"):
            write(text)


def test_the_canonical_mapping_writes_the_same() -> None:
    """Guards against a conversion of our own that differs from Protobuf's."""
    payload = {
        "n": 1,
        "big": "2",
        "raw": "AAE=",
        "state": "PAID",
        "lines": [{"sku": "a"}],
        "at": "2026-01-01T00:00:00Z",
    }
    message = ParseDict(payload, GetMessageClass(DESCRIPTOR)())
    assert write(json.dumps(payload)) == message.SerializeToString(deterministic=True)


def test_the_index_names_the_message() -> None:
    """Guards against a nested or a later message that readers take for the first."""
    indexes = {"shop.v1.First": b"\0", MESSAGE: b"\2\2", f"{MESSAGE}.Inner": b"\4\2\2"}
    for name, index in indexes.items():
        assert encoding.index_of(descriptors.message_of(FILE.text, IMPORTS, name)) == index
    assert read(b"\4\2\2\x08\7") == {"n": 7}
    assert read(b"\2\0") == read(b"\0") == {}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no index of a message"),
        (b"\xff" * 20, "no index of a message"),
        (b"\1", "no index of a message"),
        (b"\x04\x02", "no index of a message"),
        (b"\x02\x20", "the schema has no message with the index 16"),
        (b"\2\1", "the schema has no message with the index -1"),
        (b"\2\2" + write('{"note": "abc"}')[:-1], "do not fit the schema"),
        (b"\2\2\x0a\xff\xff\xff\xff\x0f", "do not fit the schema"),
        (b"\2\2" + b"\x72\x80\x01" * 3, "do not fit the schema"),
        (b"\2\4", "has a field of google.protobuf.Any"),
    ],
)
def test_bytes_of_others_are_refused(content: bytes, why: str) -> None:
    """Guards against a consumer that ends at foreign bytes."""
    with pytest.raises(ValueError, match=why):
        read(content)


def test_foreign_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a short message of many empty ones, which takes all memory, and a deep one."""
    monkeypatch.setattr(decoding, "_MOST_MEMBERS", 1000)
    with pytest.raises(ValueError, match="do not fit"):
        read(b"\2\2" + b"\x7a\0" * 1000)
    deep = b""
    for _ in range(200):
        size = len(deep)
        deep = b"\x72" + (bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])) + deep
    with pytest.raises(ValueError, match="do not fit the schema: DecodeError"):
        read(b"\2\2" + deep)


def test_the_text_depends_on_what_is_described() -> None:
    """Guards against a new version of a schema for each comment."""
    assert descriptors.file_of(descriptor_set(comment="new"), MESSAGE) == FILE
    assert descriptors.file_of(descriptor_set(more="by"), MESSAGE) != FILE
    assert (FILE.path, [each.path for each in FILE.imports]) == ("shop/order.proto", ["shop/common.proto"])


def test_descriptors_of_others_are_data() -> None:
    """Guards against a schema in a registry that crashes the process: the library trusts its compiler."""
    file = descriptors.parsed(FILE.text)
    [entry] = [each for each in file.message_type[1].nested_type if each.name == "CountsEntry"]
    entry.field[0].number = 38
    read_others = decoding.reader(base64.b64encode(file.SerializeToString()).decode(), IMPORTS)
    with pytest.raises(ValueError, match="the schema has an entry of a map that is none: CountsEntry"):
        read_others(INDEX + write('{"counts": {"1": {}}}'))
    broken = base64.b64encode(base64.b64decode(FILE.text).replace(b"shop/common", b"shop\xffcommon")).decode()
    with pytest.raises(ValueError, match="the schema is no file that can be used"):
        decoding.reader(broken, IMPORTS)(INDEX)


def test_what_is_no_descriptor_set() -> None:
    """Guards against a schema that is refused only when events come."""
    alone = descriptor_pb2.FileDescriptorSet.FromString(descriptor_set())
    del alone.file[0]
    for content, message, why in (
        (b"syntax = 'proto3';", MESSAGE, "is no compiled descriptor set"),
        (b"", MESSAGE, "has no message shop.v1.Placed"),
        (descriptor_set(), "Placed", "has no message Placed: give its full name"),
        (
            alone.SerializeToString(),
            MESSAGE,
            "lacks the import shop/common.proto: compile it with --include_imports",
        ),
        (descriptor_set(), "shop.v1.Opaque", "has a field of google.protobuf.Any"),
    ):
        with pytest.raises(descriptors.NoMessageError, match=why):
            descriptors.file_of(content, message)
    for text in ("syntax = 'proto3';", "é", "AAAA"):
        with pytest.raises(ValueError, match="is not registered as base64"):
            decoding.reader(text, {})
