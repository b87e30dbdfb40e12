-- Locks: none
-- The outbox: append-only, one partition a UTC day.
-- Every file here runs with psql alone, in order, into the first schema of the search_path.

-- A role that may create objects in the schema could have its own function called in place of one of PostgreSQL's,
-- with the rights of the role that calls ours. Names are qualified here for the same reason.
DO $$
DECLARE
    here pg_catalog.oid := pg_catalog.to_regnamespace(pg_catalog.quote_ident(pg_catalog.current_schema()));
BEGIN
    IF pg_catalog.has_schema_privilege('public', here, 'CREATE') THEN
        RAISE EXCEPTION 'outbox: every role may create objects in the schema %', pg_catalog.current_schema()
            USING ERRCODE = 'insufficient_privilege',
                  HINT = pg_catalog.concat('Run: REVOKE CREATE ON SCHEMA ',
                                           pg_catalog.quote_ident(pg_catalog.current_schema()), ' FROM PUBLIC');
    END IF;
END $$;

CREATE TABLE outbox_migrations (
    name        text PRIMARY KEY,
    applied_at  timestamptz NOT NULL DEFAULT now(),
    -- The first version that runs with the schema from this file on, if versions without the file must not.
    needs       text,
    -- What the catalog held after `outbox migrate`; the relay compares it at its start.
    description text[]
);

-- A version 7 uuid on servers before 18, which have uuidv7() of their own:
-- 48 bits of milliseconds, version and variant, the rest random (RFC 9562).
-- Its body is parsed here, not where it is called: no search_path affects it, and it is inlined.
CREATE FUNCTION outbox_uuidv7() RETURNS uuid LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN encode(
    set_bit(set_bit(
        overlay(uuid_send(gen_random_uuid())
                PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
                FROM 1 FOR 6),
        52, 1), 53, 1),
    'hex')::uuid;

-- Called at the end of each file that creates functions. Sets the schema's own path, with temporary tables last, so
-- that a caller cannot place its own table or function before ours. Without a grant, no other role may attach a trigger
-- function to a table, or call a function that runs with the owner's rights.
CREATE FUNCTION outbox_protect_functions() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    made record;
BEGIN
    FOR made IN
        SELECT p.oid::pg_catalog.regprocedure AS name, n.nspname AS schema, p.prosqlbody IS NULL AS is_text,
               -- The guard calls outbox_may_write as the inserting role. It only reads.
               (p.prosecdef OR p.prorettype = 'pg_catalog.trigger'::pg_catalog.regtype)
               AND p.proname <> 'outbox_may_write' AS is_ours_alone
        FROM pg_catalog.pg_proc p
        JOIN pg_catalog.pg_class c ON c.oid = 'outbox_migrations'::pg_catalog.regclass
        JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace AND n.oid = p.pronamespace
        WHERE pg_catalog.starts_with(p.proname, 'outbox_')
    LOOP
        IF made.is_text THEN
            EXECUTE pg_catalog.format('ALTER FUNCTION %s SET search_path = pg_catalog, %I, pg_temp',
                                      made.name, made.schema);
        END IF;
        IF made.is_ours_alone THEN
            EXECUTE pg_catalog.format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', made.name);
        END IF;
    END LOOP;
END $$;

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
    PRIMARY KEY (id, created_at)
) PARTITION BY RANGE (created_at);

DO $$
BEGIN
    IF current_setting('server_version_num')::int >= 180000 THEN
        ALTER TABLE outbox ALTER COLUMN id SET DEFAULT uuidv7();
    END IF;
END $$;

-- Indexes for what a tick reads (tx), for its order (seq), and for one aggregate's history. No others:
-- each index costs every business transaction.
-- The first two end with the aggregate's lane, so that one of several shards finds its rows without a look at those of
-- the others. In the second one it is written in another way, so that no read by tx fits this index.
-- The third one only says which pages may have rows of an aggregate. A btree by aggregate has no order in time: after a
-- checkpoint nearly each event touches another page of it, which goes to the WAL as a whole (2.6 of 3.2 kB an event).
CREATE INDEX outbox_tx ON outbox (tx, seq, hashtextextended(aggregate_id, hashtext(aggregate_type)));
CREATE INDEX outbox_seq_order ON outbox (seq, (hashtextextended(aggregate_id, hashtext(aggregate_type)) + 0));
CREATE INDEX outbox_aggregate ON outbox USING brin (aggregate_id text_bloom_ops) WITH (pages_per_range = 32);

INSERT INTO outbox_migrations (name) VALUES ('0001_outbox');
