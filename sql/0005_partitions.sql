-- Locks: outbox SHARE UPDATE EXCLUSIVE
-- Creates partitions ahead, by the database's clock; returns how many. Never blocks a writer: LIKE and
-- ATTACH need no lock that an INSERT waits for, CREATE ... PARTITION OF does. Yesterday is included for
-- transactions that began before midnight; `since`, an earlier day, for an owner's declared backfill.
CREATE FUNCTION outbox_ensure_partitions(days_ahead int DEFAULT 14, since date DEFAULT NULL) RETURNS int
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    schema regnamespace := (SELECT relnamespace FROM pg_class WHERE oid = 'outbox'::regclass);
    today date := (clock_timestamp() AT TIME ZONE 'UTC')::date;
    missing date;
    leaf text;
    made int := 0;
BEGIN
    -- Two callers at once: the second finds nothing left to do.
    PERFORM pg_advisory_xact_lock(hashtextextended('outbox_ensure_partitions', 'outbox'::regclass::oid::bigint));
    -- Relays do not look there any more.
    IF since < outbox_open_from() THEN
        RAISE EXCEPTION 'outbox: days before % are closed', outbox_open_from()
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'A closed day never changes. Write the events of that time with the time of now.';
    END IF;
    -- A recorded day has had its partition, and is not made again: a dropped day would come back empty. But if
    -- it is open and not over, its partition was dropped by hand, and inserts fail.
    FOR missing IN
        SELECT today + n FROM generate_series(least(since - today, -1), days_ahead) n
        LEFT JOIN outbox_days d ON d.day = today + n
        WHERE today + n >= outbox_open_from()
          AND (d.day IS NULL OR n >= 0 AND d.state = 'open'
                                AND to_regclass(schema || '.outbox_' || to_char(today + n, 'YYYYMMDD')) IS NULL)
        ORDER BY n
    LOOP
        BEGIN
            leaf := 'outbox_' || to_char(missing, 'YYYYMMDD');
            -- An identity belongs to the parent alone, and ATTACH refuses another one.
            EXECUTE format('CREATE TABLE %s.%I (LIKE outbox INCLUDING ALL EXCLUDING IDENTITY)%s', schema, leaf,
                           (SELECT format(' TABLESPACE %I', s.spcname) FROM pg_class c
                            JOIN pg_tablespace s ON s.oid = c.reltablespace WHERE c.oid = 'outbox'::regclass));
            -- The caller may be another role, such as a superuser: a partition has the same owner as the table.
            EXECUTE format('ALTER TABLE %I OWNER TO %s', leaf,
                           (SELECT relowner::regrole FROM pg_class WHERE oid = 'outbox'::regclass));
            -- Triggers for each row come with ATTACH, those for each statement do not.
            EXECUTE format('CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON %I FOR EACH STATEMENT '
                           'EXECUTE FUNCTION outbox_refuse_change()', leaf);
            EXECUTE format('ALTER TABLE outbox ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
                           leaf, missing || ' 00:00:00+00', missing + 1 || ' 00:00:00+00');
            -- The new partition is not sealed.
            INSERT INTO outbox_days (day) VALUES (missing) ON CONFLICT (day) DO UPDATE SET sealed_at = NULL;
            made := made + 1;
        EXCEPTION WHEN invalid_object_definition THEN
            -- Another table has this day, such as a partition that was renamed: the other days are made.
            RAISE WARNING 'outbox: %: %', missing, SQLERRM;
        END;
    END LOOP;
    RETURN made;
END $$;

SELECT outbox_protect_functions();
-- A copy that is compared with the schema has no days: they would take most of the time.
SELECT outbox_ensure_partitions(coalesce(nullif(current_setting('outbox.first_days', true), '')::int, 14));

INSERT INTO outbox_migrations (name) VALUES ('0005_partitions');
