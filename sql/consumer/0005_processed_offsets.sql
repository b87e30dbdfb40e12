-- How far a source has handled each partition, for consumers with dedupe="offset": instead of a row for each event. The
-- offset moves in the transaction of the events' effects. One statement; running it again changes nothing.
DO $offsets$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('outbox consumer migrate'));
    IF to_regclass('processed_offsets') IS NOT NULL THEN
        RETURN;
    END IF;

    CREATE TABLE processed_offsets (
        source text NOT NULL,
        topic text NOT NULL,
        partition int NOT NULL,
        topic_id text NOT NULL, -- Kafka's own: a topic that is created again has another one
        start_offset bigint NOT NULL, -- events before it are in processed_events, by their ids
        next_offset bigint NOT NULL, -- those before it are handled or in the inbox
        moved_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (source, topic, partition)
    ) WITH (fillfactor = 10); -- an update of each transaction finds room in the same page
    CREATE CONSTRAINT TRIGGER handled_guard AFTER UPDATE ON processed_offsets DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW WHEN (current_setting('outbox.handling', true) = 'on') EXECUTE FUNCTION handled_guard();
END $offsets$;
