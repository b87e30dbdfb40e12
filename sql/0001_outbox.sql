-- The outbox: append-only, one partition a UTC day.
-- Every file here runs with psql alone, in order, into the first schema of the search_path.

CREATE TABLE outbox_migrations (
    name        text PRIMARY KEY,
    applied_at  timestamptz NOT NULL DEFAULT now(),
    -- What the catalog held after `outbox migrate`; the relay compares it at its start.
    description text[]
);

-- A version 7 uuid on servers before 18, which have uuidv7() of their own:
-- 48 bits of milliseconds, version and variant, the rest random (RFC 9562).
CREATE FUNCTION outbox_uuidv7() RETURNS uuid LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
    SELECT encode(
        set_bit(set_bit(
            overlay(uuid_send(gen_random_uuid())
                    PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
                    FROM 1 FOR 6),
            52, 1), 53, 1),
        'hex')::uuid
$$;

-- CACHE 1: a cached block would let a later transaction draw a lower number.
CREATE SEQUENCE outbox_seq AS bigint CACHE 1;

CREATE TABLE outbox (
    id              uuid        NOT NULL DEFAULT outbox_uuidv7(),
    -- Not IDENTITY: ATTACH refuses it on 17+, and LIKE makes a sequence per leaf before.
    seq             bigint      NOT NULL DEFAULT nextval('outbox_seq'),
    tx              xid8        NOT NULL DEFAULT pg_current_xact_id(),
    aggregate_type  text        NOT NULL,
    aggregate_id    text        NOT NULL,
    event_type      text        NOT NULL,
    payload         jsonb       NOT NULL,
    headers         jsonb,
    idempotency_key text,
    correlation_id  text,
    causation_id    text,
    traceparent     text,
    version         int,
    created_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (id, created_at),
    CONSTRAINT outbox_names_not_empty CHECK (
        aggregate_type <> '' AND aggregate_id <> '' AND event_type <> '' AND idempotency_key <> ''
    ),
    CONSTRAINT outbox_headers_are_an_object CHECK (jsonb_typeof(headers) = 'object')
) PARTITION BY RANGE (created_at);

DO $$
BEGIN
    IF current_setting('server_version_num')::int >= 180000 THEN
        ALTER TABLE outbox ALTER COLUMN id SET DEFAULT uuidv7();
    END IF;
END $$;

-- What a tick reads (tx), in which order (seq), and one aggregate's history. No more:
-- each index costs every business transaction.
CREATE INDEX outbox_tx ON outbox (tx, seq);
CREATE INDEX outbox_seq_order ON outbox (seq);
CREATE INDEX outbox_aggregate ON outbox (aggregate_type, aggregate_id, seq);

INSERT INTO outbox_migrations (name) VALUES ('0001_outbox');
