-- Locks: none
-- processed_mark(event_id, source): whether the event is new, for handlers in any language. It is the first statement of
-- the handler's own transaction: true: do the work, and commit both; false: skip the event. While another transaction
-- has marked the same event, the call waits until that transaction ends. One statement; running it again changes nothing.
--
-- The body is parsed here, so it means the tables beside it, whatever the caller's search_path is. It runs with the
-- caller's privileges: a role that may not insert into processed_events cannot hide an event from a consumer. It is not
-- STRICT: NULL is an error, where NULL as the result would count as false, and the event would be skipped.
DO $mark$
DECLARE
    place text := (SELECT relnamespace::regnamespace FROM pg_class WHERE oid = to_regclass('processed_events'));
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('outbox consumer migrate'));
    IF EXISTS (SELECT FROM consumer_migrations WHERE name = '0004_processed_mark') THEN
        RETURN;
    END IF;

    EXECUTE format($create$
        CREATE FUNCTION %1$s.processed_source_is_long(bytes int) RETURNS text LANGUAGE plpgsql AS $long$
        BEGIN
            RAISE EXCEPTION 'the source of a processed event has %% bytes, more than 500', bytes
                USING ERRCODE = 'program_limit_exceeded', HINT = 'Give the consumer a shorter name.';
        END $long$ $create$, place);
    EXECUTE format($create$
        CREATE FUNCTION %1$s.processed_mark(event_id uuid, source text) RETURNS boolean LANGUAGE sql VOLATILE
        BEGIN ATOMIC
            WITH marked AS (
                INSERT INTO %1$s.processed_events (event_id, source, bucket)
                VALUES (processed_mark.event_id,
                        CASE WHEN octet_length(processed_mark.source) > 500
                             THEN %1$s.processed_source_is_long(octet_length(processed_mark.source))
                             ELSE processed_mark.source END,
                        %1$s.processed_bucket(processed_mark.event_id))
                ON CONFLICT DO NOTHING RETURNING true)
            SELECT EXISTS (SELECT FROM marked CROSS JOIN (
                -- The offset moves after the commit, which a crash must not undo.
                SELECT set_config('synchronous_commit', CASE current_setting('synchronous_commit')
                    WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)) AS durable);
        END $create$, place);
    -- For drivers that send a text with its type, such as JDBC's setString. A text that is no UUID is an error: an id
    -- such as 1 identifies one event of one topic, which this function does not know.
    EXECUTE format($create$
        CREATE FUNCTION %1$s.processed_mark(event_id text, source text) RETURNS boolean LANGUAGE sql VOLATILE
        BEGIN ATOMIC
            SELECT %1$s.processed_mark(CAST(processed_mark.event_id AS uuid), processed_mark.source);
        END $create$, place);

    INSERT INTO consumer_migrations (name) VALUES ('0004_processed_mark');
END $mark$;
