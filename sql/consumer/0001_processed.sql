-- Locks: none
-- What a consumer has handled: a row for each event and source. The table belongs to the database of the consumer's own
-- tables. One statement, so that every client creates all of it or nothing. Running it again changes nothing.
DO $processed$
DECLARE
    taken text;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('outbox consumer migrate'));
    -- A table of this name that an application made itself has no bucket; ours can be beside it, in a schema of its own.
    IF EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass('processed_events') AND attname = 'bucket') THEN
        RETURN;
    END IF;
    SELECT relname INTO taken FROM pg_class
    WHERE relnamespace = quote_ident(current_schema())::regnamespace
      AND relname IN ('processed_events', 'consumer_migrations');
    IF taken IS NOT NULL THEN
        RAISE EXCEPTION 'the schema % has a table % that is not the consumer''s', current_schema(), taken
            USING HINT = 'keep that table, and create the consumer''s tables in another schema '
                         '(OUTBOX_CONSUMER_SCHEMA), first in the search_path of the consumer''s connections';
    END IF;

    -- Every consumer looks here; it names files only.
    CREATE TABLE consumer_migrations (
        name text PRIMARY KEY,
        applied_at timestamptz NOT NULL DEFAULT now(),
        needs text -- the first version that runs with this file, if versions without it must not
    );
    GRANT SELECT ON consumer_migrations TO PUBLIC;

    -- An id of version 7 begins with milliseconds: its UTC day, counted round a ring of 64. Other ids tell no
    -- time: -1. A function of the id alone, so that the key below is unique for (event_id, source).
    CREATE FUNCTION processed_bucket(event_id uuid) RETURNS smallint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE -- not STRICT: it would not be inlined
    RETURN CASE
        WHEN get_byte(uuid_send(event_id), 6) >> 4 = 7 AND get_byte(uuid_send(event_id), 8) >> 6 = 2
        THEN ((get_byte(uuid_send(event_id), 0)::bigint << 40) + (get_byte(uuid_send(event_id), 1)::bigint << 32)
            + (get_byte(uuid_send(event_id), 2)::bigint << 24) + (get_byte(uuid_send(event_id), 3) << 16)
            + (get_byte(uuid_send(event_id), 4) << 8) + get_byte(uuid_send(event_id), 5)) / 86400000 % 64
        ELSE -1
    END;

    CREATE TABLE processed_events (
        event_id uuid NOT NULL,
        processed_at timestamptz NOT NULL DEFAULT now(),
        bucket smallint NOT NULL, -- processed_bucket(event_id); a CHECK of that costs much of an insert
        source text NOT NULL,
        content uuid, -- a digest, where the id is no UUID in the message: the same id with another content; or a replay
        PRIMARY KEY (event_id, source, bucket)
    ) PARTITION BY LIST (bucket);

    -- While a handler is at work only the consumer can commit: it ends the setting first, as its last statement.
    -- A handler's own COMMIT, by whatever driver, fails, and with it all that the handler has done.
    CREATE FUNCTION handled_guard() RETURNS trigger LANGUAGE plpgsql AS $guard$
    BEGIN
        IF current_setting('outbox.handling', true) = 'on' THEN
            RAISE EXCEPTION 'the handler ended the transaction: leave commit and rollback to the consumer';
        END IF;
        RETURN NULL;
    END $guard$;
    CREATE CONSTRAINT TRIGGER handled_guard AFTER INSERT ON processed_events DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW WHEN (current_setting('outbox.handling', true) = 'on') EXECUTE FUNCTION handled_guard();

    -- Every value that the function can have: no insert ever lacks a partition, and none is made later.
    FOR n IN 0..63 LOOP
        EXECUTE format('CREATE TABLE %I PARTITION OF processed_events FOR VALUES IN (%s)',
                       'processed_events_' || to_char(n, 'FM00'), n);
    END LOOP;
    CREATE TABLE processed_events_other PARTITION OF processed_events FOR VALUES IN (-1);

    INSERT INTO consumer_migrations (name) VALUES ('0001_processed');
END $processed$;
