-- Locks: none
-- The event that has a key. A function of its own, so that only an event with a known key costs more; see outbox_claim_and_wait
-- for the setting. Volatile: it sees what another transaction has committed while this one waited for it.
CREATE FUNCTION outbox_event_of_key(wanted uuid) RETURNS uuid LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    RETURN (SELECT event_id FROM outbox_keys WHERE key = wanted);
END $$;

-- When an event is due, of a time or of a duration of ISO 8601 (PT90S). By the time of the transaction, so that events of
-- one transaction with the same delay keep their order.
CREATE FUNCTION outbox_due(deliver_after text) RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN deliver_after ~ '^-?P' THEN transaction_timestamp() + deliver_after::interval
            ELSE deliver_after::timestamptz END;

-- Writes an event that is due later. Its id tells no time: that of an event is about that of its day.
CREATE FUNCTION outbox_delay(
    INOUT id uuid, aggregate_type text, aggregate_id text, event_type text, payload jsonb, headers jsonb,
    idempotency_key text, correlation_id text, causation_id text, traceparent text, version int,
    deliver_after timestamptz, later_events_wait boolean
) LANGUAGE plpgsql AS $$
#variable_conflict use_variable
BEGIN
    IF deliver_after > clock_timestamp() + interval '10 years' THEN
        RAISE EXCEPTION 'outbox: % is due in more than ten years', left(event_type, 100)
            USING ERRCODE = 'datetime_field_overflow', HINT = 'Correct deliver_after.';
    END IF;
    IF later_events_wait THEN
        PERFORM nextval('outbox_has_waited');
    END IF;
    INSERT INTO outbox_delayed AS d (id, aggregate_type, aggregate_id, event_type, payload, headers, idempotency_key,
                                     correlation_id, causation_id, traceparent, version,
                                     deliver_after, due, later_events_wait)
    VALUES (coalesce(id, gen_random_uuid()), aggregate_type, aggregate_id, event_type, payload, headers,
            idempotency_key, correlation_id, causation_id, traceparent, version, deliver_after,
            greatest(deliver_after, outbox_waits_until(aggregate_type, aggregate_id)),
            coalesce(later_events_wait, false))
    RETURNING d.id INTO id;
END $$;

-- The call for every language: SELECT * FROM outbox_emit('order', '42', 'order.placed', '{"total": 5}').
-- One row: the event's id and seq; for a known idempotency key nothing is inserted, `duplicate` is true
-- and `id` is that of the event which had the key first. `seq` is NULL for an event that is due later: after
-- `deliver_after`, or behind an event with `later_events_wait`.
-- The functions of this file run with the owner's rights: they claim keys, and writers may not choose ids.
CREATE FUNCTION outbox_emit(
    aggregate_type  text,
    aggregate_id    text,
    event_type      text,
    payload         jsonb,
    headers         jsonb DEFAULT NULL,
    idempotency_key text  DEFAULT NULL,
    correlation_id  text  DEFAULT NULL,
    causation_id    text  DEFAULT NULL,
    traceparent     text  DEFAULT NULL,
    version         int   DEFAULT NULL,
    deliver_after   timestamptz DEFAULT NULL,
    later_events_wait boolean DEFAULT false,
    OUT id          uuid,
    OUT seq         bigint,
    OUT duplicate   boolean
) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_variable
DECLARE
    wanted     uuid;
    namespace  text;
    is_delayed boolean := coalesce(deliver_after > transaction_timestamp(), false);
BEGIN
    IF NOT has_function_privilege(outbox_writer(), 'outbox_unrestricted()'::regprocedure, 'EXECUTE') THEN
        IF NOT outbox_may_write(outbox_writer(), aggregate_type) THEN
            PERFORM outbox_refuse_type(outbox_writer(), aggregate_type);
        END IF;
        namespace := outbox_key_namespace(outbox_writer());
    END IF;
    duplicate := false;
    IF idempotency_key IS NOT NULL THEN
        wanted := outbox_key(idempotency_key, namespace);
        LOOP
            INSERT INTO outbox_keys (key, event_id)
            VALUES (wanted, CASE WHEN is_delayed THEN gen_random_uuid() ELSE outbox_uuidv7() END)
            ON CONFLICT ON CONSTRAINT outbox_keys_pkey DO NOTHING
            RETURNING event_id INTO id;
            EXIT WHEN id IS NOT NULL;
            id := outbox_event_of_key(wanted);
            IF id IS NOT NULL THEN
                duplicate := true;
                RETURN;
            END IF;
            -- Purged between claim and look-up: the key is free again.
        END LOOP;
    END IF;
    IF is_delayed THEN
        id := outbox_delay(id, aggregate_type, aggregate_id, event_type, payload, headers, idempotency_key,
                           correlation_id, causation_id, traceparent, version, deliver_after, later_events_wait);
    ELSIF idempotency_key IS NOT NULL THEN
        INSERT INTO outbox AS o (id, aggregate_type, aggregate_id, event_type, payload, headers,
                                 idempotency_key, correlation_id, causation_id, traceparent, version)
        VALUES (id, aggregate_type, aggregate_id, event_type, payload, headers,
                idempotency_key, correlation_id, causation_id, traceparent, version)
        RETURNING o.seq INTO seq;
    ELSE
        INSERT INTO outbox AS o (aggregate_type, aggregate_id, event_type, payload, headers,
                                 correlation_id, causation_id, traceparent, version)
        VALUES (aggregate_type, aggregate_id, event_type, payload, headers,
                correlation_id, causation_id, traceparent, version)
        RETURNING o.id, o.seq INTO id, seq;
        IF id IS NULL THEN
            -- It waits.
            SELECT d.id INTO id FROM outbox_delayed d WHERE d.seq = currval('outbox_seq');
        END IF;
    END IF;
END $$;

-- The ids of a list count up from a drawn one, in its last 32 bits (a counter as in RFC 9562, 6.2): generating each id
-- took a quarter of a list's time. `digits` is the text of the drawn id without its last 8 digits; the counter is above
-- 2 to the 32nd, so that its text has leading zeros.
CREATE FUNCTION outbox_nth_id(digits text, counter bigint) RETURNS uuid LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (digits || right(to_hex(counter), 8))::uuid;

CREATE FUNCTION outbox_counter(drawn uuid) RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ('x' || right(drawn::text, 8))::bit(32)::bigint + 4294967296;

-- A list of events without keys, each column as one text: values between U+001E, U+001F for NULL, NULL for a column
-- of NULLs. This is how the Python writer sends lists: as a JSON array they took nearly twice as long. The orders of
-- writing and of the answer are both explicit, so that they do not depend on the plan.
CREATE FUNCTION outbox_emit_lists(
    aggregate_types text, aggregate_ids text, event_types text, payloads text, headers text,
    correlation_ids text, causation_ids text, traceparents text, versions text
) RETURNS TABLE (id uuid, seq bigint) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
    drawn   uuid := outbox_uuidv7();
    digits  text := left(drawn::text, -8);
    counter bigint := outbox_counter(drawn);
    refused text;
BEGIN
    -- An event that waits is not in the answer of an INSERT: the other function joins them.
    IF pg_sequence_last_value('outbox_has_waited') IS NOT NULL THEN
        RETURN QUERY
        SELECT keyed.id, keyed.seq FROM outbox_emit_keyed_lists(
            aggregate_types, aggregate_ids, event_types, payloads, headers,
            (SELECT string_agg(chr(31), chr(30)) FROM string_to_table(aggregate_types, chr(30))),
            correlation_ids, causation_ids, traceparents, versions) AS keyed;
        RETURN;
    END IF;
    IF NOT has_function_privilege(outbox_writer(), 'outbox_unrestricted()'::regprocedure, 'EXECUTE') THEN
        SELECT type INTO refused FROM string_to_table(aggregate_types, chr(30), chr(31)) AS type
        WHERE NOT outbox_may_write(outbox_writer(), type) LIMIT 1;
        IF refused IS NOT NULL THEN
            PERFORM outbox_refuse_type(outbox_writer(), refused);
        END IF;
    END IF;
    RETURN QUERY
    WITH written AS (
        INSERT INTO outbox AS o (id, aggregate_type, aggregate_id, event_type, payload, headers,
                                 correlation_id, causation_id, traceparent, version)
        SELECT outbox_nth_id(digits, counter + n), aggregate_type, aggregate_id, event_type, payload::jsonb,
               header::jsonb, correlation_id, causation_id, traceparent, version::int
        FROM ROWS FROM (
            string_to_table(aggregate_types, chr(30), chr(31)), string_to_table(aggregate_ids, chr(30), chr(31)),
            string_to_table(event_types, chr(30), chr(31)), string_to_table(payloads, chr(30), chr(31)),
            string_to_table(headers, chr(30), chr(31)), string_to_table(correlation_ids, chr(30), chr(31)),
            string_to_table(causation_ids, chr(30), chr(31)), string_to_table(traceparents, chr(30), chr(31)),
            string_to_table(versions, chr(30), chr(31)))
            WITH ORDINALITY AS event (aggregate_type, aggregate_id, event_type, payload, header,
                                      correlation_id, causation_id, traceparent, version, n)
        ORDER BY n
        RETURNING o.id, o.seq
    )
    SELECT w.id, w.seq FROM written w ORDER BY w.seq;
END $$;

-- Claims the keys of a list, one for each event or NULL. Returns each event's id, and whether it is to be written; if not,
-- the id is that of the event which has the key. Ids of a list with a delayed event tell no time: see outbox_delay.
CREATE FUNCTION outbox_claim_keys(keys uuid[], tell_time boolean, OUT ids uuid[], OUT are_new boolean[])
LANGUAGE plpgsql SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    drawn   uuid;
    digits  text;
    counter bigint;
    -- For each key the event that has it; of these events, those that got it here.
    owners  uuid[];
    claimed uuid[] := '{}';
BEGIN
    WHILE array_remove(keys, NULL) <> '{}' LOOP
        drawn := CASE WHEN tell_time THEN outbox_uuidv7() ELSE gen_random_uuid() END;
        digits := left(drawn::text, -8);
        counter := outbox_counter(drawn);
        -- Sorted, so that calls with the same keys wait for each other and do not deadlock.
        WITH claim AS (
            INSERT INTO outbox_keys (key, event_id)
            SELECT key, outbox_nth_id(digits, counter + row_number() OVER (ORDER BY key))
            FROM unnest(keys) AS key
            WHERE key IS NOT NULL
            GROUP BY key
            ORDER BY key
            ON CONFLICT ON CONSTRAINT outbox_keys_pkey DO NOTHING
            RETURNING event_id
        )
        SELECT claimed || array_agg(event_id) INTO claimed FROM claim;

        -- Key by key: a join that was planned while the table was empty would read all of it, as long as the
        -- session lives.
        -- Without an answer where a key was purged since the claim: it is free again.
        SELECT array_agg(k.event_id ORDER BY n) INTO owners
        FROM unnest(keys) WITH ORDINALITY AS given (wanted, n)
        LEFT JOIN LATERAL (SELECT event_id FROM outbox_keys WHERE key = wanted LIMIT 1) AS k ON true
        HAVING bool_and(k.event_id IS NOT NULL OR wanted IS NULL);
        EXIT WHEN FOUND;
    END LOOP;

    drawn := CASE WHEN tell_time THEN outbox_uuidv7() ELSE gen_random_uuid() END;
    digits := left(drawn::text, -8);
    counter := outbox_counter(drawn);
    SELECT array_agg(id ORDER BY n), array_agg(is_new ORDER BY n) INTO ids, are_new
    FROM (
        SELECT n, coalesce(owner, outbox_nth_id(digits, counter + n)) AS id,
               owner IS NULL
               OR claim.owner IS NOT NULL AND row_number() OVER (PARTITION BY owner ORDER BY n) = 1 AS is_new
        FROM unnest(keys, owners) WITH ORDINALITY AS given (key, owner, n)
        LEFT JOIN unnest(claimed) AS claim (owner) USING (owner)
    ) AS event;
END $$;

-- The same for a list of which at least one event has a key; the answer is that of outbox_emit_many.
CREATE FUNCTION outbox_emit_keyed_lists(
    aggregate_types text, aggregate_ids text, event_types text, payloads text, headers text, idempotency_keys text,
    correlation_ids text, causation_ids text, traceparents text, versions text
) RETURNS TABLE (id uuid, seq bigint, duplicate boolean) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
    refused   text;
    namespace text;
    ids       uuid[];
    are_new   boolean[];
BEGIN
    IF NOT has_function_privilege(outbox_writer(), 'outbox_unrestricted()'::regprocedure, 'EXECUTE') THEN
        SELECT type INTO refused FROM string_to_table(aggregate_types, chr(30), chr(31)) AS type
        WHERE NOT outbox_may_write(outbox_writer(), type) LIMIT 1;
        IF refused IS NOT NULL THEN
            PERFORM outbox_refuse_type(outbox_writer(), refused);
        END IF;
        namespace := outbox_key_namespace(outbox_writer());
    END IF;
    SELECT claim.* INTO ids, are_new
    FROM (SELECT array_agg(outbox_key(key, namespace) ORDER BY n) AS keys
          FROM string_to_table(idempotency_keys, chr(30), chr(31)) WITH ORDINALITY AS given (key, n)) AS wanted,
         outbox_claim_keys(wanted.keys, true) AS claim;
    RETURN QUERY
    WITH written AS (
        INSERT INTO outbox AS o (id, aggregate_type, aggregate_id, event_type, payload, headers,
                                 idempotency_key, correlation_id, causation_id, traceparent, version)
        SELECT id, aggregate_type, aggregate_id, event_type, payload::jsonb, header::jsonb,
               idempotency_key, correlation_id, causation_id, traceparent, version::int
        FROM ROWS FROM (
            string_to_table(aggregate_types, chr(30), chr(31)), string_to_table(aggregate_ids, chr(30), chr(31)),
            string_to_table(event_types, chr(30), chr(31)), string_to_table(payloads, chr(30), chr(31)),
            string_to_table(headers, chr(30), chr(31)), string_to_table(idempotency_keys, chr(30), chr(31)),
            string_to_table(correlation_ids, chr(30), chr(31)), string_to_table(causation_ids, chr(30), chr(31)),
            string_to_table(traceparents, chr(30), chr(31)), string_to_table(versions, chr(30), chr(31)),
            unnest(ids), unnest(are_new))
            WITH ORDINALITY AS event (aggregate_type, aggregate_id, event_type, payload, header, idempotency_key,
                                      correlation_id, causation_id, traceparent, version, id, is_new, n)
        WHERE is_new ORDER BY n
        RETURNING o.id, o.seq
    )
    SELECT event.id, written.seq, NOT is_new
    FROM unnest(ids, are_new) WITH ORDINALITY AS event (id, is_new, n)
    LEFT JOIN written ON written.id = event.id AND is_new
    ORDER BY n;
END $$;

-- The same, a JSON array of objects whose members have the names of the arguments above:
--   SELECT * FROM outbox_emit_many('[{"aggregate_type": "order", "aggregate_id": "42",
--                                     "event_type": "order.placed", "payload": {"total": 5}}]')
-- Returns one row per event, in the order of the list, which is also the order of writing. Of two events with the same
-- key the second is a duplicate.
CREATE FUNCTION outbox_emit_many(events jsonb)
RETURNS TABLE (id uuid, seq bigint, duplicate boolean) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
    stranger text;
    namespace text;
    keys     uuid[];
    ids      uuid[];
    are_new  boolean[];
    is_any_delayed boolean;
    given    record;
BEGIN
    IF NOT has_function_privilege(outbox_writer(), 'outbox_unrestricted()'::regprocedure, 'EXECUTE') THEN
        PERFORM outbox_refuse_type(outbox_writer(), type)
        FROM (SELECT DISTINCT event ->> 'aggregate_type' AS type FROM jsonb_array_elements(events) AS event) types
        WHERE type IS NOT NULL AND NOT outbox_may_write(outbox_writer(), type);
        namespace := outbox_key_namespace(outbox_writer());
    END IF;
    SELECT max(nullif(event - '{aggregate_type, aggregate_id, event_type, payload, headers, idempotency_key,
                                correlation_id, causation_id, traceparent, version,
                                deliver_after, later_events_wait}'::text[], '{}')::text),
           array_agg(outbox_key(event ->> 'idempotency_key', namespace) ORDER BY n),
           bool_or(event ? 'deliver_after')
    INTO stranger, keys, is_any_delayed
    FROM jsonb_array_elements(events) WITH ORDINALITY AS given (event, n);
    IF stranger IS NOT NULL THEN
        RAISE EXCEPTION 'outbox: members of an event that are not known: %', stranger
            USING ERRCODE = 'invalid_parameter_value';
    END IF;

    SELECT * INTO ids, are_new FROM outbox_claim_keys(keys, NOT coalesce(is_any_delayed, false));

    -- One by one, because an event can wait for one before it in the list.
    FOR given IN
        SELECT event, id, is_new, outbox_due(event ->> 'deliver_after') AS deliver_after
        FROM ROWS FROM (jsonb_array_elements(events), unnest(ids), unnest(are_new))
            WITH ORDINALITY AS given (event, id, is_new, n)
        WHERE is_any_delayed ORDER BY n
    LOOP
        id := given.id;
        seq := NULL;
        duplicate := NOT given.is_new;
        IF given.is_new AND given.deliver_after > transaction_timestamp() THEN
            PERFORM outbox_delay(
                given.id, given.event ->> 'aggregate_type', given.event ->> 'aggregate_id',
                given.event ->> 'event_type', given.event -> 'payload', nullif(given.event -> 'headers', 'null'),
                given.event ->> 'idempotency_key', given.event ->> 'correlation_id',
                given.event ->> 'causation_id', given.event ->> 'traceparent', (given.event ->> 'version')::int,
                given.deliver_after, (given.event ->> 'later_events_wait')::boolean);
        ELSIF given.is_new THEN
            INSERT INTO outbox AS o (id, aggregate_type, aggregate_id, event_type, payload, headers,
                                     idempotency_key, correlation_id, causation_id, traceparent, version)
            VALUES (given.id, given.event ->> 'aggregate_type', given.event ->> 'aggregate_id',
                    given.event ->> 'event_type', given.event -> 'payload', nullif(given.event -> 'headers', 'null'),
                    given.event ->> 'idempotency_key', given.event ->> 'correlation_id',
                    given.event ->> 'causation_id', given.event ->> 'traceparent', (given.event ->> 'version')::int)
            RETURNING o.seq INTO seq;
        END IF;
        RETURN NEXT;
    END LOOP;
    IF is_any_delayed THEN
        RETURN;
    END IF;

    RETURN QUERY
    WITH written AS (
        INSERT INTO outbox AS o (id, aggregate_type, aggregate_id, event_type, payload, headers,
                                 idempotency_key, correlation_id, causation_id, traceparent, version)
        SELECT id, event ->> 'aggregate_type', event ->> 'aggregate_id', event ->> 'event_type',
               event -> 'payload', nullif(event -> 'headers', 'null'), event ->> 'idempotency_key',
               event ->> 'correlation_id', event ->> 'causation_id', event ->> 'traceparent',
               (event ->> 'version')::int
        FROM ROWS FROM (jsonb_array_elements(events), unnest(ids), unnest(are_new))
            WITH ORDINALITY AS given (event, id, is_new, n)
        WHERE is_new ORDER BY n
        RETURNING o.id, o.seq
    )
    SELECT given.id, written.seq, NOT is_new
    FROM unnest(ids, are_new) WITH ORDINALITY AS given (id, is_new, n)
    LEFT JOIN written ON written.id = given.id AND is_new
    ORDER BY n;
END $$;

SELECT outbox_protect_functions();

INSERT INTO outbox_migrations (name) VALUES ('0004_emit');
