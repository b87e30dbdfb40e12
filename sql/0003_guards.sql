-- Locks: outbox SHARE ROW EXCLUSIVE, outbox_delayed SHARE ROW EXCLUSIVE
-- Triggers that keep the outbox append-only and its order correct.

-- Only the owner, and only after a declaration in the transaction, may do what the guards refuse.
CREATE FUNCTION outbox_owner_declared(relation oid, setting text) RETURNS boolean LANGUAGE sql STABLE
RETURN coalesce(current_setting(setting, true) = 'on', false)
    AND pg_has_role(current_user, (SELECT relowner FROM pg_class WHERE oid = relation), 'USAGE');

-- Does nothing: a role that may call it is a writer without restrictions. This check costs an INSERT less than a table.
CREATE FUNCTION outbox_unrestricted() RETURNS void LANGUAGE sql RETURN NULL;
REVOKE EXECUTE ON FUNCTION outbox_unrestricted() FROM PUBLIC;

-- Returns the writing role, for functions that run with the owner's rights. Within another role's SECURITY DEFINER
-- function, it is the caller of that function.
CREATE FUNCTION outbox_writer() RETURNS name LANGUAGE sql STABLE
RETURN coalesce(nullif(current_setting('role'), 'none')::name, session_user);

-- Rights add up. A role without any grant may write if no writer is restricted: it acts through a function of a role
-- that may write.
CREATE FUNCTION outbox_may_write(writer name, aggregate_type text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER AS $$
    SELECT has_function_privilege(writer, 'outbox_unrestricted()', 'EXECUTE')
        OR NOT EXISTS (SELECT FROM outbox_writers w WHERE w.aggregate_types IS NOT NULL)
        OR EXISTS (
            SELECT FROM outbox_writers w JOIN pg_roles r ON r.rolname = w.writer
            WHERE pg_has_role(outbox_may_write.writer, r.oid, 'USAGE')
              AND (w.aggregate_types IS NULL OR outbox_may_write.aggregate_type = ANY (w.aggregate_types)))
$$;

-- Of a writer that is restricted.
CREATE FUNCTION outbox_key_namespace(writer name) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT min(w.key_namespace) FROM outbox_writers w JOIN pg_roles r ON r.rolname = w.writer
    WHERE pg_has_role(outbox_key_namespace.writer, r.oid, 'USAGE')
$$;

CREATE FUNCTION outbox_refuse_type(writer name, aggregate_type text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'outbox: % may not write events of the aggregate type %', writer, aggregate_type
        USING ERRCODE = 'insufficient_privilege',
              HINT = 'The owner of the outbox grants aggregate types with outbox_grant_writer.';
END $$;

-- Checks all of a row. Without a WHEN: PostgreSQL parses and plans the WHEN of each trigger, and each CHECK, again for every
-- statement. As a WHEN and two CHECKs this took a single INSERT 12 µs, as a function it takes 3, of 20; only of a list it is
-- 1 µs more for each row. STABLE saves a snapshot for each row. The function runs with the rights, and by the name, of the
-- role that inserts; outbox_emit inserts as the owner, and has checked the aggregate type before.
CREATE FUNCTION outbox_check_row() RETURNS trigger LANGUAGE plpgsql STABLE AS $$
DECLARE
    size        int;
    content     int;
    column_name text;
    reserved    text;
BEGIN
    -- One condition lets a usual row pass, because each statement of this function costs more than what it compares; what
    -- is unusual is checked below, exactly. The least of the names is '' if one is, only an object contains the empty object,
    -- and texts that together are within the smallest limit are each within theirs; NULL counts as nothing.
    IF NEW.created_at = transaction_timestamp() AND NEW.tx = pg_current_xact_id() AND NEW.seq = currval('outbox_seq')
       AND has_function_privilege('outbox_unrestricted()'::regprocedure, 'EXECUTE')
       AND least(NEW.aggregate_type COLLATE "C", NEW.aggregate_id, NEW.event_type, NEW.idempotency_key) <> ''
       AND octet_length(concat(NEW.aggregate_type, NEW.aggregate_id, NEW.event_type, NEW.idempotency_key,
                               NEW.correlation_id, NEW.causation_id, NEW.traceparent, NEW.payload,
                               NEW.headers)) <= 10000
       AND (NEW.headers IS NULL OR NEW.headers @> '{}' AND NEW.headers::text !~*
            '"(id|event|aggregate|correlation|causation|traceparent|version|content|dead|replay)') THEN
        RETURN NEW;
    END IF;

    IF NEW.tx <> pg_current_xact_id() OR NEW.seq <> currval('outbox_seq') THEN
        RAISE EXCEPTION 'outbox: seq and tx are drawn by the database'
            USING ERRCODE = 'check_violation',
                  HINT = 'Leave both columns out of the INSERT: the relay finds events by them.';
    END IF;
    IF NEW.created_at <> transaction_timestamp() AND (
        NEW.created_at > transaction_timestamp() OR NOT outbox_owner_declared(TG_RELID, 'outbox.backfill')
    ) THEN
        RAISE EXCEPTION 'outbox: created_at is the time of the transaction'
            USING ERRCODE = 'check_violation',
                  HINT = 'Leave created_at out of the INSERT. For a backfill of past days the owner of the '
                         'table says SET LOCAL outbox.backfill = on first.';
    END IF;
    IF NOT has_function_privilege('outbox_unrestricted()'::regprocedure, 'EXECUTE')
       AND NOT outbox_may_write(current_user, NEW.aggregate_type) THEN
        PERFORM outbox_refuse_type(current_user, NEW.aggregate_type);
    END IF;

    SELECT name INTO column_name
    FROM (VALUES ('aggregate_type', NEW.aggregate_type), ('aggregate_id', NEW.aggregate_id),
                 ('event_type', NEW.event_type), ('idempotency_key', NEW.idempotency_key)) AS given (name, value)
    WHERE value = '' LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'outbox: % is empty', column_name
            USING ERRCODE = 'check_violation',
                  HINT = 'Topics and keys of messages are made of names. An event without an idempotency key has NULL.';
    END IF;

    -- Kafka accepts messages of up to about 1 MB, so every column has a limit on the length of its text. The text
    -- itself is measured: a few bytes of JSON can be a long text (the number 1e131071 is stored in 12 bytes).
    -- Bytes count as Kafka gets them; base64, perhaps with line breaks, is at most half as long again.
    size := octet_length(NEW.payload::text);
    IF size > 1000000 THEN
        BEGIN
            content := octet_length(decode(NEW.payload #>> '{outbox-bytes,base64}', 'base64'));
        EXCEPTION WHEN invalid_parameter_value THEN
            -- No base64: the relay parks what is not larger.
        END;
        IF content > 1000000 OR size <= 1500000 THEN
            size := coalesce(content, size);
        END IF;
    END IF;
    IF size > 1000000 THEN
        RAISE EXCEPTION 'outbox: the payload of % has % bytes, more than 1000000', left(NEW.event_type, 100), size
            USING ERRCODE = 'program_limit_exceeded',
                  HINT = 'Store it elsewhere (a table, object storage) and send the reference.';
    END IF;
    IF octet_length(concat(NEW.aggregate_type, NEW.aggregate_id, NEW.event_type, NEW.idempotency_key,
                           NEW.correlation_id, NEW.causation_id, NEW.traceparent)) > 10000 THEN
        SELECT c.name, octet_length(c.value) INTO column_name, size
        FROM (VALUES ('aggregate_type', NEW.aggregate_type), ('aggregate_id', NEW.aggregate_id),
                     ('event_type', NEW.event_type), ('idempotency_key', NEW.idempotency_key),
                     ('correlation_id', NEW.correlation_id), ('causation_id', NEW.causation_id),
                     ('traceparent', NEW.traceparent)) AS c (name, value)
        WHERE octet_length(c.value) > 10000 LIMIT 1;
        IF FOUND THEN
            RAISE EXCEPTION 'outbox: % has % bytes, more than 10000', column_name, size
                USING ERRCODE = 'program_limit_exceeded',
                      HINT = 'Use a shorter name or id: put content into the payload.';
        END IF;
    END IF;
    IF NEW.headers IS NULL THEN
        RETURN NEW;
    END IF;
    IF jsonb_typeof(NEW.headers) <> 'object' THEN
        RAISE EXCEPTION 'outbox: the headers of % are not an object', left(NEW.event_type, 100)
            USING ERRCODE = 'check_violation', HINT = 'Headers are an object of names and values, or NULL.';
    END IF;
    size := octet_length(NEW.headers::text);
    IF size > 100000 THEN
        RAISE EXCEPTION 'outbox: the headers of % have % bytes, more than 100000', left(NEW.event_type, 100), size
            USING ERRCODE = 'program_limit_exceeded',
                  HINT = 'Headers are for routing and tracing: put content into the payload.';
    END IF;
    -- Consumers know an event by these headers, and the relay makes them of the event's columns. The text is
    -- searched first: that is quick.
    IF NEW.headers::text ~* '"(id|event-type|aggregate-type|aggregate-id|idempotency-key|correlation-id|causation-id|'
                            'traceparent|version|content-type|dead-letter-[^"]*|replay-id|replayed-at)":' THEN
        SELECT string_agg(name, ', ' ORDER BY name) INTO reserved FROM jsonb_object_keys(NEW.headers) AS name
        WHERE name ~* '^(id|event-type|aggregate-type|aggregate-id|idempotency-key|correlation-id|causation-id|'
                      'traceparent|version|content-type|dead-letter-.*|replay-id|replayed-at)$';
        IF reserved IS NOT NULL THEN
            RAISE EXCEPTION 'outbox: the headers of % have reserved names: %', NEW.event_type, reserved
                USING ERRCODE = 'check_violation',
                      HINT = 'The relay sets these headers. Use the column of that name, or another name.';
        END IF;
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER outbox_checked BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION outbox_check_row();
CREATE TRIGGER outbox_checked BEFORE INSERT ON outbox_delayed FOR EACH ROW EXECUTE FUNCTION outbox_check_row();

-- Whether `outbox_move_due` is inserting this event: what its writer may do was checked when it was written.
CREATE FUNCTION outbox_is_moving(id uuid) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN coalesce(current_setting('outbox.moving', true) = 'on', false)
        AND EXISTS (SELECT FROM outbox_delayed d WHERE d.id = outbox_is_moving.id);
END $$;

-- Until when an event of an aggregate waits that is written now; NULL if for nothing. For the setting: see
-- outbox_claim_and_wait.
CREATE FUNCTION outbox_waits_until(aggregate_type text, aggregate_id text) RETURNS timestamptz
LANGUAGE plpgsql SET enable_seqscan = off AS $$
#variable_conflict use_variable
BEGIN
    RETURN (SELECT d.due FROM outbox_delayed d
            WHERE hashtextextended(d.aggregate_id, 0) = hashtextextended(aggregate_id, 0)
              AND d.aggregate_id = aggregate_id AND d.aggregate_type = aggregate_type AND d.later_events_wait
            ORDER BY d.due DESC LIMIT 1);
END $$;

-- Claims the key of an event, and writes one that must wait behind delayed ones in place of an INSERT, which then has no
-- row. One trigger for both, since each costs 2 µs. Triggers fire in the order of their names: content is checked before.
--
-- A known key raises unique_violation, as a UNIQUE column would. outbox_emit has claimed the key for this
-- very event, in this transaction, before it inserts; a client that repeats id and key has not. It runs with the owner's
-- rights: a writer that may write into outbox_keys could claim another one's key without an event.
-- A plan that is made when there are few keys, or none, would read all of them, and a session keeps it until the table is
-- analyzed again: thousands of keys later.
--
-- An event's number is drawn before this. A delayed event may have been moved since, with a higher one: so an event that
-- need not wait gets another one. Where the look does not see that it was moved, the event follows behind it later.
-- A backfill writes what happened before.
CREATE FUNCTION outbox_claim_and_wait() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off AS $$
DECLARE
    wanted      uuid;
    waits_until timestamptz;
BEGIN
    IF NEW.idempotency_key IS NOT NULL THEN
        IF has_function_privilege(outbox_writer(), 'outbox_unrestricted()'::regprocedure, 'EXECUTE') THEN
            wanted := outbox_key(NEW.idempotency_key);
        ELSE
            wanted := outbox_key(NEW.idempotency_key, outbox_key_namespace(outbox_writer()));
        END IF;
        PERFORM FROM outbox_keys k
        WHERE k.key = wanted AND k.event_id = NEW.id AND k.created_at = NEW.created_at;
        -- That of a delayed event was claimed when it was written.
        IF NOT FOUND AND NOT outbox_is_moving(NEW.id) THEN
            INSERT INTO outbox_keys (key, event_id) VALUES (wanted, NEW.id);
        END IF;
    END IF;

    IF pg_sequence_last_value('outbox_has_waited') IS NULL
       OR NEW.created_at <> transaction_timestamp() OR outbox_is_moving(NEW.id) THEN
        RETURN NEW;
    END IF;
    waits_until := outbox_waits_until(NEW.aggregate_type, NEW.aggregate_id);
    IF waits_until IS NULL THEN
        NEW.seq := nextval('outbox_seq');
        RETURN NEW;
    END IF;
    INSERT INTO outbox_delayed (id, seq, aggregate_type, aggregate_id, event_type, payload, headers, idempotency_key,
                                correlation_id, causation_id, traceparent, version, due, later_events_wait)
    VALUES (NEW.id, NEW.seq, NEW.aggregate_type, NEW.aggregate_id, NEW.event_type, NEW.payload, NEW.headers,
            NEW.idempotency_key, NEW.correlation_id, NEW.causation_id, NEW.traceparent, NEW.version,
            waits_until, true);
    RETURN NULL;
END $$;

CREATE TRIGGER outbox_unique_and_waiting BEFORE INSERT ON outbox FOR EACH ROW
WHEN (NEW.idempotency_key IS NOT NULL OR pg_sequence_last_value('outbox_has_waited') IS NOT NULL)
EXECUTE FUNCTION outbox_claim_and_wait();

CREATE FUNCTION outbox_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- `outbox relay --rebase` gives restored rows transaction ids of this database.
    IF TG_OP = 'UPDATE' AND outbox_owner_declared(TG_RELID, 'outbox.rebase') THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'outbox: % refused, the table is append-only', TG_OP
        USING ERRCODE = 'feature_not_supported',
              HINT = 'To correct an event, write another one. Whole days are removed by the retention.';
END $$;

CREATE TRIGGER outbox_append_only BEFORE UPDATE OR DELETE ON outbox FOR EACH ROW
EXECUTE FUNCTION outbox_refuse_change();
CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON outbox FOR EACH STATEMENT
EXECUTE FUNCTION outbox_refuse_change();

-- The partition of each closed day has a trigger with this function, so that archived rows do not change.
CREATE FUNCTION outbox_refuse_late_insert() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'outbox: % is closed, it takes no event of %', TG_TABLE_NAME, NEW.created_at
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = 'The transaction began too long ago, or the clock of the database went back. Run it again; '
                     'where the clock had been ahead, see outbox partitions reopen.';
END $$;

SELECT outbox_protect_functions();

INSERT INTO outbox_migrations (name) VALUES ('0003_guards');
