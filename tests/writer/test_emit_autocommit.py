"""A connection that would commit the event apart from the business rows is refused."""

from __future__ import annotations

import uuid

import pytest
import sqlalchemy
from sqlalchemy import orm

from outbox_pipelines.writer import AutocommitError, NewEvent, emit
from tests.schema.servers import Database
from tests.writer import targets
from tests.writer.targets import AUTOCOMMIT, Target

COUNT = "SELECT count(*) FROM outbox WHERE aggregate_id = %s"


@pytest.mark.parametrize("target", AUTOCOMMIT, ids=lambda target: target.__name__)
def test_it_is_refused(kept: Database, target: Target) -> None:
    """Guards against event and order in two transactions: a crash between them loses one."""
    order = uuid.uuid4().hex
    with target(kept) as through:
        with pytest.raises(AutocommitError, match=AUTOCOMMIT[target]):
            through.emit("order", order, "e", {})
        with pytest.raises(AutocommitError, match=AUTOCOMMIT[target]):
            through.emit_many([NewEvent("order", order, "e", {})])
    assert kept.value(COUNT, order) == 0


def test_a_session_flushes_nothing_before_it_is_refused(kept: Database) -> None:
    """Guards against business rows committed by the very call that refuses to commit."""
    order = uuid.uuid4().hex
    with targets.session_autocommit(kept) as through:
        flushed: list[object] = []
        sqlalchemy.event.listen(through.target, "before_flush", lambda *a: flushed.append(a))
        through.target.add(Thing())
        with pytest.raises(AutocommitError):
            through.emit("order", order, "e", {})
        through.target.expunge_all()
    assert flushed == []


def test_sqlalchemys_autobegin_is_no_autocommit(kept: Database) -> None:
    """Guards against a connection that commits later, taken for one that commits at once."""
    order = uuid.uuid4().hex
    with targets.engine(kept).connect() as connection:
        emit(connection, "order", order, "e", {})
        assert kept.value(COUNT, order) == 0
        connection.commit()
    assert kept.value(COUNT, order) == 1


class Base(orm.DeclarativeBase):
    pass


class Thing(Base):
    __tablename__ = "things"

    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
