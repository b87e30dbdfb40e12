-- Locks: none
-- Messages that are received and not handled yet, in the database of the consumer's own tables: those of slow
-- handlers, those whose handling failed, and those behind them with the same key. A message is in
-- processed_events from the moment it is received. One statement; running it again changes nothing.
DO $inbox$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('outbox consumer migrate'));
    IF EXISTS (SELECT FROM consumer_migrations WHERE name = '0002_inbox') THEN
        RETURN;
    END IF;
    IF to_regclass(quote_ident(current_schema()) || '.inbox') IS NOT NULL THEN
        RAISE EXCEPTION 'the schema % has a table inbox that is not the consumer''s', current_schema()
            USING HINT = 'keep that table, and create the consumer''s tables in another schema '
                         '(OUTBOX_CONSUMER_SCHEMA), first in the search_path of the consumer''s connections';
    END IF;

    CREATE TABLE inbox (
        seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, -- the order within a key
        message_id uuid NOT NULL, -- event_id of processed_events
        source text NOT NULL,
        topic text NOT NULL,
        partition int NOT NULL,
        "offset" bigint NOT NULL,
        key text NOT NULL, -- messages of one source, topic and key are handled one after the other
        key_hash bigint NOT NULL GENERATED ALWAYS AS (hashtextextended(key, 0)) STORED,
        event_type text NOT NULL,
        message_key bytea,
        payload bytea, -- as it was in Kafka; NULL: a tombstone
        headers json NOT NULL, -- [[name, value or null], …]; not jsonb, which refuses \u0000
        sent_at timestamptz NOT NULL, -- when it came to Kafka
        received_at timestamptz NOT NULL DEFAULT now(),
        state text NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'failed', 'processed', 'discarded')),
        attempts int NOT NULL DEFAULT 0, -- begun, so that one that ends the process counts too
        next_attempt_at timestamptz NOT NULL DEFAULT now(),
        last_error text,
        paused_since timestamptz, -- its handler was paused at its last attempt, which does not count, since then
        processed_at timestamptz -- or discarded
    );
    -- Whether a key is free, and the first message of each key; empty as long as no handler fails. Not the key itself:
    -- an index has no room for a long one. If two keys have one hash, the later message waits for the earlier one.
    CREATE INDEX inbox_open ON inbox (source, topic, key_hash, seq) INCLUDE (state) WHERE state IN ('waiting', 'failed');
    -- How far a source is behind, and which of its handlers are paused.
    CREATE INDEX inbox_age ON inbox (source, state, received_at) WHERE processed_at IS NULL;
    CREATE INDEX inbox_paused ON inbox (source) WHERE state = 'waiting' AND paused_since IS NOT NULL;
    CREATE INDEX inbox_message ON inbox (message_id);
    CREATE CONSTRAINT TRIGGER handled_guard AFTER UPDATE ON inbox DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW WHEN (NEW.state = 'processed' AND current_setting('outbox.handling', true) = 'on')
        EXECUTE FUNCTION handled_guard();

    -- Who dealt with a dead letter, when and why.
    CREATE TABLE inbox_audit (
        at timestamptz NOT NULL DEFAULT clock_timestamp(),
        actor text NOT NULL,
        action text NOT NULL CHECK (action IN ('replay', 'discard')),
        reason text,
        seq bigint NOT NULL,
        message_id uuid NOT NULL,
        source text NOT NULL
    );

    INSERT INTO consumer_migrations (name) VALUES ('0002_inbox');
END $inbox$;
