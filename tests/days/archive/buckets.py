"""A server of buckets on this machine, as S3 answers; and credentials for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "outbox-archive"
URL = f"s3://{BUCKET}/shop/days"


@contextmanager
def serving() -> Iterator[dict[str, str]]:
    """The environment that leads to an empty bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    # It tells each request, into whatever log a command has configured.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    try:
        url = "http://{}:{}".format(*server.get_host_and_port())
        environment = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
        client(environment).create_bucket(Bucket=BUCKET)
        yield environment
    finally:
        server.stop()


def client(environment: dict[str, str]):  # type: ignore[no-untyped-def]
    """Of another library than ours."""
    return boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_REGION"],
    )


def names(environment: dict[str, str]) -> list[str]:
    """Every key of the bucket."""
    found = client(environment).list_objects_v2(Bucket=BUCKET).get("Contents", [])
    return sorted(each["Key"] for each in found)


@contextmanager
def strict(environment: dict[str, str]) -> Iterator[None]:
    """The server asks callers for credentials, and accepts none."""
    _reset(environment, "0")
    try:
        yield
    finally:
        _reset(environment, "inf")


def _reset(environment: dict[str, str], unchecked_calls: str) -> None:
    url = f"{environment['AWS_ENDPOINT_URL']}/moto-api/reset-auth"
    plain = {"Content-Type": "text/plain"}
    with urlopen(Request(url, data=unchecked_calls.encode(), headers=plain, method="POST")):
        pass
