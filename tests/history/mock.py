"""librdkafka's mock cluster: brokers that lose acknowledgements, and hand partitions over, on demand.

It lives in the client's own library, and its controls are reached by ctypes. Unlike Kafka it stores again
what a client sends again, so it is a proof of nothing but what happens when an acknowledgement is lost.

Invariants:
- The cluster lives in this process, as long as the block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import confluent_kafka

_PRODUCER = 0
_PRODUCE_REQUEST = 0
OFFSET_COMMIT_REQUEST = 8
FIND_COORDINATOR_REQUEST = 10
_BROKER = 1


class Mock:
    """A running mock cluster."""

    def __init__(self, cluster: ctypes.c_void_p, brokers: int) -> None:
        self._cluster = cluster
        self.brokers = brokers

    @property
    def bootstrap(self) -> str:
        """The bootstrap servers, host:port."""
        address: bytes = _library().rd_kafka_mock_cluster_bootstraps(self._cluster)
        return address.decode()

    def create(self, topics: Mapping[str, str], partitions: int) -> None:
        """Makes the topics."""
        for topic in topics.values():
            create = _library().rd_kafka_mock_topic_create
            _check(create(self._cluster, topic.encode(), partitions, self.brokers))

    def lose_acknowledgements(self, count: int, seconds: float) -> None:
        """The next so many batches are stored and answered so late that the client has given them up."""
        late = (ctypes.c_int(0), ctypes.c_int(int(seconds * 1000)))
        push = _library().rd_kafka_mock_broker_push_request_error_rtts
        _check(push(self._cluster, _BROKER, _PRODUCE_REQUEST, count, *(late * count)))

    def answer(self, *codes: int, request: int = _PRODUCE_REQUEST) -> None:
        """The next requests of a kind, by default batches, are answered with these error codes, one each."""
        push = _library().rd_kafka_mock_push_request_errors_array
        push(self._cluster, request, len(codes), (ctypes.c_int * len(codes))(*codes))

    def count(self) -> None:
        """From now on requests are counted."""
        _library().rd_kafka_mock_start_request_tracking(self._cluster)

    def counted(self, request: int) -> int:
        """How many requests of a kind have come since."""
        size = ctypes.c_size_t()
        requests = _library().rd_kafka_mock_get_requests(self._cluster, ctypes.byref(size))
        kinds = [_library().rd_kafka_mock_request_api_key(requests[each]) for each in range(size.value)]
        _library().rd_kafka_mock_request_destroy_array(requests, size)
        return kinds.count(request)

    def lead(self, topic: str, partition: int, broker: int) -> None:
        """From now on this broker (from 1) leads the partition; all others refuse it."""
        _check(
            _library().rd_kafka_mock_partition_set_leader(self._cluster, topic.encode(), partition, broker)
        )

    def stop_broker(self, broker: int) -> None:
        """From now on this broker (from 1) takes no connection."""
        _check(_library().rd_kafka_mock_broker_set_down(self._cluster, broker))


@contextmanager
def running(brokers: int = 1) -> Iterator[Mock]:
    """A mock cluster for the length of the block."""
    library = _library()
    message = ctypes.create_string_buffer(512)
    client = library.rd_kafka_new(_PRODUCER, None, message, len(message))
    assert client, message.value.decode()
    cluster = library.rd_kafka_mock_cluster_new(client, brokers)
    assert cluster
    try:
        yield Mock(cluster, brokers)
    finally:
        library.rd_kafka_mock_cluster_destroy(cluster)
        library.rd_kafka_destroy(client)


def _check(code: int) -> None:
    assert code == 0, f"the mock cluster answers {code}"


@cache
def _library() -> ctypes.CDLL:
    # The wheel's own, by its path: another one on this machine would not know the client's structures.
    beside = Path(confluent_kafka.__file__).parent.with_name("confluent_kafka.libs")
    (path,) = beside.glob("librdkafka*")
    library = ctypes.CDLL(str(path))
    pointer, text, size, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int
    library.rd_kafka_new.argtypes = [number, pointer, text, size]
    library.rd_kafka_new.restype = pointer
    library.rd_kafka_destroy.argtypes = [pointer]
    library.rd_kafka_destroy.restype = None
    library.rd_kafka_mock_cluster_new.argtypes = [pointer, number]
    library.rd_kafka_mock_cluster_new.restype = pointer
    library.rd_kafka_mock_cluster_destroy.argtypes = [pointer]
    library.rd_kafka_mock_cluster_destroy.restype = None
    library.rd_kafka_mock_cluster_bootstraps.argtypes = [pointer]
    library.rd_kafka_mock_cluster_bootstraps.restype = text
    library.rd_kafka_mock_topic_create.argtypes = [pointer, text, number, number]
    library.rd_kafka_mock_topic_create.restype = number
    library.rd_kafka_mock_partition_set_leader.argtypes = [pointer, text, ctypes.c_int32, ctypes.c_int32]
    library.rd_kafka_mock_partition_set_leader.restype = number
    library.rd_kafka_mock_broker_set_down.argtypes = [pointer, ctypes.c_int32]
    library.rd_kafka_mock_broker_set_down.restype = number
    library.rd_kafka_mock_push_request_errors_array.argtypes = [
        pointer,
        ctypes.c_int16,
        size,
        ctypes.c_void_p,
    ]
    library.rd_kafka_mock_push_request_errors_array.restype = None
    library.rd_kafka_mock_start_request_tracking.argtypes = [pointer]
    library.rd_kafka_mock_start_request_tracking.restype = None
    library.rd_kafka_mock_get_requests.argtypes = [pointer, pointer]
    library.rd_kafka_mock_get_requests.restype = ctypes.POINTER(pointer)
    library.rd_kafka_mock_request_api_key.argtypes = [pointer]
    library.rd_kafka_mock_request_api_key.restype = ctypes.c_int16
    library.rd_kafka_mock_request_destroy_array.argtypes = [ctypes.POINTER(pointer), size]
    library.rd_kafka_mock_request_destroy_array.restype = None
    # Pairs of an error and a delay follow.
    library.rd_kafka_mock_broker_push_request_error_rtts.argtypes = [pointer, number, ctypes.c_int16, size]
    library.rd_kafka_mock_broker_push_request_error_rtts.restype = number
    return library
