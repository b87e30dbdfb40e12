-- Locks: none
-- The table that `outbox adopt` replaces by this outbox: at most one. Relays look here, so that the events of
-- an aggregate keep their order across the switch and back.
CREATE TABLE outbox_adopted (
    -- The table's oid, which it keeps when it is renamed.
    relation    oid         PRIMARY KEY,
    -- Its name before the switch, which is the name of the view afterwards; and the table's name afterwards.
    schema      name        NOT NULL,
    name        name        NOT NULL,
    kept_as     name        NOT NULL,
    -- prepared:  the table is as before; its relay, or the reader of the slot, publishes
    -- draining:  the view writes into the outbox; the table's remaining rows are published first
    -- adopted:   all of them are published; the relay of the outbox publishes
    -- returning: the table has its name again; what is left in the outbox is published first
    -- finished:  the table is dropped
    state       text        NOT NULL DEFAULT 'prepared'
                CHECK (state IN ('prepared', 'draining', 'adopted', 'returning', 'finished')),
    -- The consequences that the operator accepted.
    accepted    text[]      NOT NULL DEFAULT '{}',
    switched_at timestamptz,
    -- The slot whose reader, such as Debezium, publishes the table; null if a relay does.
    slot        name,
    -- Every transaction that wrote into the table has its commit in the log before this position.
    switched_lsn pg_lsn,
    -- What was committed when the table got its name again.
    returned    pg_snapshot,
    -- The archive file of the table, and when it was last proven equal.
    file        text,
    proven_at   timestamptz
);
CREATE UNIQUE INDEX outbox_adopted_one ON outbox_adopted ((true));
-- Every relay and every application that may use the schema looks here; it names tables only.
GRANT SELECT ON outbox_adopted TO PUBLIC;

INSERT INTO outbox_migrations (name) VALUES ('0009_adopted');
