"""What it costs to frame each value with the id of its schema, in Avro and Protobuf too."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from google.protobuf import descriptor_pb2

from benchmarks import programs
from benchmarks.quick import sized
from benchmarks.servers import fill, fresh_outbox, rewind
from benchmarks.table import Ratio, Row, paired, rate
from outbox_pipelines.settings import Settings

_EVENTS = sized(400_000, 40_000)
_ROUNDS = sized(5, 2)
_CATALOG = """
events:
  order.placed:
    {description: x, producer: x, owner: x, aggregate_type: order, schema: {
      required: [number, customer, state, note, total], properties: {
        number: {type: integer}, customer: {type: string}, state: {enum: [placed, paid]},
        note: {type: string}, total: {type: integer}}},
      protobuf: {file: order.binpb, message: Order}}
"""


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    with fresh_outbox(servers) as plain, _registry() as url, tempfile.TemporaryDirectory() as folder:
        catalog = Path(folder) / "catalog.yaml"
        catalog.write_text(_CATALOG)
        (Path(folder) / "order.binpb").write_bytes(_descriptors())
        given = {"format": "json_schema", "registry_url": url, "catalog_file": catalog}
        in_value = plain.model_copy(update=given)
        ways = {
            "plain": plain,
            "the id in the value": in_value,
            "the id in a header": in_value.model_copy(update={"registry_framing": "header"}),
            "Avro, the id in the value": in_value.model_copy(update={"format": "avro"}),
            "Protobuf, the id in the value": in_value.model_copy(update={"format": "protobuf"}),
        }
        fill(plain, _EVENTS)
        rates: dict[str, list[float]] = {name: [] for name in ways}
        # In turn, so that a drift of the machine falls on all alike.
        for _ in range(_ROUNDS):
            for name, settings in ways.items():
                rewind(plain)
                drain = programs.drain(settings)
                assert drain.events >= _EVENTS, drain
                rates[name].append(drain.rate)
    return [_row(name, rates) for name in ways]


def _row(name: str, rates: dict[str, list[float]]) -> Row:
    figures = (rate(rates[name]),)
    if name == "plain":
        return Row("plain values", figures)
    wanted = "≥ 0.40 ×" if name.startswith(("Avro", "Protobuf")) else "≥ 0.80 ×"
    return Row(f"framed: {name}", figures, (Ratio(paired(rates[name], rates["plain"]), "plain"),), wanted)


def _descriptors() -> bytes:
    """Return what a compiler writes of the message."""
    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="order.proto", syntax="proto3")
    message = file.message_type.add(name="Order")
    numbers = ("number", "total")
    for number, name in enumerate((*numbers, "customer", "state", "note"), 1):
        field = message.field.add(name=name, number=number, label=kind.LABEL_OPTIONAL)
        field.type = kind.TYPE_INT64 if name in numbers else kind.TYPE_STRING
    content: bytes = descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
    return content


@contextmanager
def _registry() -> Iterator[str]:
    """Serve what a relay asks a schema registry for: every schema is there, with the id 1."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps({"subject": "x", "version": 1, "id": 1, "schema": asked["schema"]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
