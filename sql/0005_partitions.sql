-- Partitions ahead, by the database's clock; returns how many were made. Never blocks a writer: LIKE and
-- ATTACH need no lock that an INSERT waits for, CREATE ... PARTITION OF does. Yesterday is included for
-- transactions that began before midnight.
CREATE FUNCTION outbox_ensure_partitions(days_ahead int DEFAULT 14) RETURNS int
LANGUAGE plpgsql SET search_path FROM CURRENT SET lock_timeout = '2s' AS $$
DECLARE
    today date := (clock_timestamp() AT TIME ZONE 'UTC')::date;
    missing date;
    leaf text;
    made int := 0;
BEGIN
    -- Two callers at once: the second finds nothing left to do.
    PERFORM pg_advisory_xact_lock(hashtextextended('outbox_ensure_partitions', current_schema()::regnamespace::oid::bigint));
    FOR missing IN
        SELECT d::date FROM generate_series(today - 1, today + days_ahead, interval '1 day') d
        WHERE NOT EXISTS (SELECT FROM outbox_days WHERE day = d::date)
    LOOP
        leaf := 'outbox_' || to_char(missing, 'YYYYMMDD');
        EXECUTE format('CREATE TABLE %I (LIKE outbox INCLUDING ALL)', leaf);
        EXECUTE format('ALTER TABLE outbox ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
                       leaf, missing || ' 00:00:00+00', missing + 1 || ' 00:00:00+00');
        INSERT INTO outbox_days (day) VALUES (missing);
        made := made + 1;
    END LOOP;
    RETURN made;
END $$;

SELECT outbox_ensure_partitions();

INSERT INTO outbox_migrations (name) VALUES ('0005_partitions');
