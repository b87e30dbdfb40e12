SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;




CREATE FUNCTION public.handled_guard() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
    BEGIN
        IF current_setting('outbox.handling', true) = 'on' THEN
            RAISE EXCEPTION 'the handler ended the transaction: leave commit and rollback to the consumer';
        END IF;
        RETURN NULL;
    END $$;
CREATE FUNCTION public.outbox_act(action text, seqs bigint[], reason text, filter jsonb, on_behalf_of text) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
#variable_conflict use_column
DECLARE
    acted bigint[];
BEGIN
    -- In order of seq, like the relay (COMMANDS_RAN): in another order the two, or two actions, could deadlock.
    PERFORM FROM outbox_parked WHERE state = 'failed' AND seq = ANY (seqs) ORDER BY seq FOR UPDATE;
    IF outbox_act.action = 'replay' THEN
        WITH changed AS (
            UPDATE outbox_parked SET state = 'replaying', next_attempt_at = NULL, crashes = 0
            WHERE state = 'failed' AND seq = ANY (seqs) RETURNING seq
        ) SELECT array_agg(seq ORDER BY seq) INTO acted FROM changed;
    ELSIF outbox_act.action = 'discard' THEN
        WITH changed AS (
            UPDATE outbox_parked SET state = 'discarded', failed_at = coalesce(failed_at, clock_timestamp())
            WHERE state = 'failed' AND seq = ANY (seqs) RETURNING seq
        ) SELECT array_agg(seq ORDER BY seq) INTO acted FROM changed;
    ELSE
        RAISE EXCEPTION 'outbox: % is no action on dead letters', outbox_act.action
            USING ERRCODE = 'invalid_parameter_value', HINT = 'There are replay and discard.';
    END IF;
    IF acted IS NULL THEN
        RETURN 0;
    END IF;
    INSERT INTO outbox_audit (on_behalf_of, action, reason, filter, events)
    VALUES (outbox_act.on_behalf_of, outbox_act.action, outbox_act.reason, outbox_act.filter, acted);
    RETURN cardinality(acted);
END $$;
CREATE FUNCTION public.outbox_cancel(id uuid) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
DECLARE
    gone record;
    was_there boolean := false;
BEGIN
    FOR gone IN SELECT * FROM outbox_take_back(outbox_cancel.id) LOOP
        IF NOT has_function_privilege(outbox_writer(), 'outbox_unrestricted()'::regprocedure, 'EXECUTE')
           AND NOT outbox_may_write(outbox_writer(), gone.aggregate_type) THEN
            PERFORM outbox_refuse_type(outbox_writer(), gone.aggregate_type);
        END IF;
        was_there := true;
    END LOOP;
    RETURN was_there;
END $$;
CREATE FUNCTION public.outbox_cancel_delayed(ids uuid[], reason text, on_behalf_of text) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
DECLARE
    canceled jsonb;
    seqs bigint[];
BEGIN
    SELECT jsonb_agg(jsonb_build_object('id', c.id, 'aggregate_type', c.aggregate_type, 'aggregate_id', c.aggregate_id,
                                        'event_type', c.event_type, 'due', c.due) ORDER BY c.seq),
           array_agg(c.seq ORDER BY c.seq)
    INTO canceled, seqs FROM unnest(ids) AS given (id), outbox_take_back(given.id) AS c;
    IF seqs IS NULL THEN
        RETURN 0;
    END IF;
    INSERT INTO outbox_audit (on_behalf_of, action, reason, filter, events)
    VALUES (outbox_cancel_delayed.on_behalf_of, 'cancel', outbox_cancel_delayed.reason, canceled, seqs);
    RETURN cardinality(seqs);
END $$;
CREATE FUNCTION public.outbox_change_shards(wanted integer, started boolean, on_behalf_of text, OUT step text, OUT missing text) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
#variable_conflict use_column
DECLARE
    now_shards int;
    under_way  int;
    has_met    boolean;
BEGIN
    IF outbox_change_shards.wanted NOT BETWEEN 1 AND 64 THEN
        RAISE EXCEPTION 'outbox: % shards', outbox_change_shards.wanted
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Choose 1 to 64.';
    END IF;
    PERFORM FROM outbox_shards ORDER BY shard FOR UPDATE;
    SELECT s.shards, s.wanted, s.barrier IS NOT NULL INTO now_shards, under_way, has_met
    FROM outbox_shards s ORDER BY s.shard LIMIT 1;
    IF under_way IS NULL THEN
        IF now_shards = outbox_change_shards.wanted THEN
            step := 'nothing';
        ELSIF outbox_change_shards.started THEN
            step := 'given up';
        ELSIF EXISTS (SELECT FROM outbox_shards WHERE slot IS NOT NULL) THEN
            RAISE EXCEPTION 'outbox: a slot has one shard: run `outbox cutover --to polling` first'
                USING ERRCODE = 'object_not_in_prerequisite_state';
        ELSE
            UPDATE outbox_shards
            SET wanted = outbox_change_shards.wanted, wanted_at = clock_timestamp(),
                barrier_paused = false, barrier_reached = false, barrier = NULL;
            step := 'wait';
            missing := 'the relays settle what they have read';
        END IF;
        RETURN;
    END IF;
    IF under_way <> outbox_change_shards.wanted THEN
        step := 'busy';
        missing := under_way;
        RETURN;
    END IF;
    -- The command that requested the change is still running.
    UPDATE outbox_shards SET wanted_at = clock_timestamp();
    step := 'wait';
    IF has_met AND EXISTS (SELECT FROM outbox_shards WHERE NOT barrier_paused) THEN
        -- A relay has taken its shard since, and may have gone past the barrier: all meet again, further on.
        UPDATE outbox_shards SET barrier = NULL, barrier_reached = false;
        has_met := false;
    END IF;
    IF NOT has_met THEN
        SELECT string_agg(shard::text, ', ' ORDER BY shard) INTO missing FROM outbox_shards WHERE NOT barrier_paused;
        IF missing IS NOT NULL THEN
            missing := format('no answer from the relay of shard %s yet (is one running?)', missing);
            RETURN;
        END IF;
        -- Everybody has stopped somewhere: here all meet.
        UPDATE outbox_shards SET barrier = pg_current_snapshot();
        missing := 'the relays proceed to the barrier';
        RETURN;
    END IF;
    SELECT string_agg(shard::text, ', ' ORDER BY shard) INTO missing FROM outbox_shards
    WHERE NOT (barrier_reached AND done::text = barrier::text AND target IS NULL);
    IF missing IS NOT NULL THEN
        missing := format('shard %s has not published all committed events yet', missing);
        RETURN;
    END IF;
    -- All stand at the barrier: from there the new ones start. The epoch ends the old ones.
    DELETE FROM outbox_shards WHERE shard >= outbox_change_shards.wanted;
    INSERT INTO outbox_shards (shard, shards, done, system_identifier, database)
    SELECT n, outbox_change_shards.wanted, s.done, s.system_identifier, s.database
    FROM outbox_shards s, generate_series(0, outbox_change_shards.wanted - 1) n
    WHERE s.shard = 0 AND NOT EXISTS (SELECT FROM outbox_shards o WHERE o.shard = n);
    UPDATE outbox_shards
    SET shards = outbox_change_shards.wanted, epoch = epoch + 1, owner = NULL, owned_since = NULL, tick_id = NULL,
        wanted = NULL, wanted_at = NULL, barrier_paused = false, barrier_reached = false, barrier = NULL;
    INSERT INTO outbox_audit (on_behalf_of, action, reason, filter, events)
    VALUES (outbox_change_shards.on_behalf_of, 'shards',
            format('from %s to %s shards', now_shards, outbox_change_shards.wanted), '{}', '{}');
    step := 'done';
END $$;
CREATE FUNCTION public.outbox_check_row() RETURNS trigger
    LANGUAGE plpgsql STABLE
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $_$
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
END $_$;
CREATE FUNCTION public.outbox_claim_and_wait() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET enable_seqscan TO 'off'
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
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
CREATE FUNCTION public.outbox_claim_keys(keys uuid[], tell_time boolean, OUT ids uuid[], OUT are_new boolean[]) RETURNS record
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
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
CREATE FUNCTION public.outbox_columns(relation regclass, VARIADIC without text[] DEFAULT '{}'::text[]) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
    SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute
    WHERE attrelid = relation AND attnum > 0 AND NOT attisdropped AND attname <> ALL (without)
      AND attname <> ALL (SELECT attname FROM pg_attribute WHERE attrelid = 'outbox'::regclass)
$$;
CREATE FUNCTION public.outbox_counter(drawn uuid) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN (((('x'::text || "right"((drawn)::text, 8)))::bit(32))::bigint + '4294967296'::bigint);
CREATE FUNCTION public.outbox_covers(done pg_snapshot, target pg_snapshot, last_seq bigint, tx xid8, seq bigint) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN (pg_visible_in_snapshot(tx, done) OR COALESCE(((seq <= last_seq) AND pg_visible_in_snapshot(tx, target)), false));
CREATE FUNCTION public.outbox_delay(INOUT id uuid, aggregate_type text, aggregate_id text, event_type text, payload jsonb, headers jsonb, idempotency_key text, correlation_id text, causation_id text, traceparent text, version integer, deliver_after timestamp with time zone, later_events_wait boolean) RETURNS uuid
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
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
CREATE FUNCTION public.outbox_due(deliver_after text) RETURNS timestamp with time zone
    LANGUAGE sql STABLE PARALLEL SAFE
    RETURN CASE WHEN (deliver_after ~ '^-?P'::text) THEN (transaction_timestamp() + (deliver_after)::interval) ELSE (deliver_after)::timestamp with time zone END;
CREATE FUNCTION public.outbox_emit(aggregate_type text, aggregate_id text, event_type text, payload jsonb, headers jsonb DEFAULT NULL::jsonb, idempotency_key text DEFAULT NULL::text, correlation_id text DEFAULT NULL::text, causation_id text DEFAULT NULL::text, traceparent text DEFAULT NULL::text, version integer DEFAULT NULL::integer, deliver_after timestamp with time zone DEFAULT NULL::timestamp with time zone, later_events_wait boolean DEFAULT false, OUT id uuid, OUT seq bigint, OUT duplicate boolean) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
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
CREATE FUNCTION public.outbox_emit_keyed_lists(aggregate_types text, aggregate_ids text, event_types text, payloads text, headers text, idempotency_keys text, correlation_ids text, causation_ids text, traceparents text, versions text) RETURNS TABLE(id uuid, seq bigint, duplicate boolean)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
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
CREATE FUNCTION public.outbox_emit_lists(aggregate_types text, aggregate_ids text, event_types text, payloads text, headers text, correlation_ids text, causation_ids text, traceparents text, versions text) RETURNS TABLE(id uuid, seq bigint)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
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
CREATE FUNCTION public.outbox_emit_many(events jsonb) RETURNS TABLE(id uuid, seq bigint, duplicate boolean)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
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
CREATE FUNCTION public.outbox_ensure_partitions(days_ahead integer DEFAULT 14, since date DEFAULT NULL::date) RETURNS integer
    LANGUAGE plpgsql
    SET lock_timeout TO '2s'
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
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
CREATE FUNCTION public.outbox_event_of_key(wanted uuid) RETURNS uuid
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
BEGIN
    RETURN (SELECT event_id FROM outbox_keys WHERE key = wanted);
END $$;
CREATE FUNCTION public.outbox_grant_analyst(analyst regrole) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
DECLARE
    schema regnamespace := (SELECT relnamespace FROM pg_class WHERE oid = 'outbox'::regclass);
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA %s TO %s', schema, analyst);
    EXECUTE format('GRANT SELECT ON outbox_events, outbox_days, outbox_migrations TO %s', analyst);
    EXECUTE format('GRANT SELECT (id, seq, state, attempts, last_error) ON outbox_parked TO %s', analyst);
    EXECUTE format('GRANT SELECT (id, seq, published_at, attempts) ON outbox_released TO %s', analyst);
    EXECUTE format('GRANT EXECUTE ON FUNCTION outbox_covers, outbox_shard_of TO %s', analyst);
    PERFORM outbox_require_grants(analyst, '{outbox_events, outbox_parked, outbox_released}', '{outbox_covers}');
END $$;
CREATE FUNCTION public.outbox_grant_operator(operator regrole) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
DECLARE
    schema regnamespace := (SELECT relnamespace FROM pg_class WHERE oid = 'outbox'::regclass);
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA %s TO %s', schema, operator);
    EXECUTE format('GRANT SELECT ON outbox, outbox_shards, outbox_progress, outbox_parked, outbox_released, '
                   'outbox_delayed, outbox_audit, outbox_days, outbox_migrations, outbox_writers, outbox_events, '
                   'outbox_replays, outbox_archive_changes TO %s', operator);
    EXECUTE format('GRANT SELECT ON SEQUENCE outbox_seq TO %s', operator);
    EXECUTE format('GRANT EXECUTE ON FUNCTION outbox_covers, outbox_shard_of, outbox_open_from, outbox_last_seq, '
                   'outbox_act, outbox_cancel_delayed, outbox_move_due, outbox_change_shards, outbox_keep_shards, '
                   'outbox_replay_begin, outbox_replay_advance TO %s', operator);
    PERFORM outbox_require_grants(operator, '{outbox, outbox_parked, outbox_delayed}',
                                  '{outbox_act, outbox_cancel_delayed, outbox_change_shards}');
END $$;
CREATE FUNCTION public.outbox_grant_relay(relay regrole) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
DECLARE
    schema regnamespace := (SELECT relnamespace FROM pg_class WHERE oid = 'outbox'::regclass);
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA %s TO %s', schema, relay);
    EXECUTE format('GRANT SELECT ON outbox, outbox_shards, outbox_progress, outbox_parked, outbox_released, '
                   'outbox_delayed, outbox_days, outbox_migrations, outbox_events, outbox_audit, outbox_replays '
                   'TO %s', relay);
    EXECUTE format('GRANT UPDATE (%s) ON outbox_shards TO %s',
                   outbox_columns('outbox_shards', 'shard', 'shards', 'system_identifier', 'database'), relay);
    EXECUTE format('GRANT UPDATE (%s) ON outbox_parked TO %s', outbox_columns('outbox_parked', 'parked_at'), relay);
    EXECUTE format('GRANT INSERT ON outbox_progress TO %s', relay);
    -- Whether it was set back. And a process with many outboxes looks at it, not into the table.
    EXECUTE format('GRANT SELECT ON SEQUENCE outbox_seq TO %s', relay);
    EXECUTE format('GRANT EXECUTE ON FUNCTION outbox_covers, outbox_shard_of, outbox_open_from, outbox_last_seq, '
                   'outbox_park, outbox_release, outbox_move_due TO %s', relay);
    PERFORM outbox_require_grants(relay, '{outbox, outbox_shards, outbox_parked, outbox_delayed}',
                                  '{outbox_park, outbox_release, outbox_move_due}');
END $$;
CREATE FUNCTION public.outbox_grant_writer(writer regrole, aggregate_types text[] DEFAULT NULL::text[], key_namespace text DEFAULT NULL::text, own_ids boolean DEFAULT false) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
#variable_conflict use_variable
DECLARE
    schema regnamespace := (SELECT relnamespace FROM pg_class WHERE oid = 'outbox'::regclass);
    login name := (SELECT rolname FROM pg_roles WHERE oid = writer);
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA %s TO %s', schema, writer);
    EXECUTE format('GRANT USAGE ON SEQUENCE outbox_seq TO %s', writer);
    EXECUTE format(
        'GRANT INSERT (aggregate_type, aggregate_id, event_type, payload, headers, idempotency_key, '
        'correlation_id, causation_id, traceparent, version), SELECT (id, seq) ON outbox TO %s', writer);
    -- An INSERT whose event waits returns no row.
    EXECUTE format('GRANT SELECT (id, seq) ON outbox_delayed TO %s', writer);
    IF own_ids THEN
        EXECUTE format('GRANT INSERT (id) ON outbox TO %s', writer);
    ELSE
        EXECUTE format('REVOKE INSERT (id) ON outbox FROM %s', writer);
    END IF;
    -- PUBLIC may call what does not run with the owner's rights, but in hardened databases.
    EXECUTE format('GRANT EXECUTE ON FUNCTION outbox_uuidv7, outbox_owner_declared, outbox_may_write, '
                   'outbox_refuse_type, outbox_due, outbox_emit, outbox_emit_many, outbox_emit_lists, '
                   'outbox_emit_keyed_lists, outbox_cancel TO %s', writer);
    DELETE FROM outbox_writers w WHERE w.writer = login;
    IF aggregate_types IS NULL AND key_namespace IS NULL THEN
        EXECUTE format('GRANT EXECUTE ON FUNCTION outbox_unrestricted TO %s', writer);
    ELSE
        INSERT INTO outbox_writers (writer, aggregate_types, key_namespace)
        VALUES (login, aggregate_types, key_namespace);
        EXECUTE format('REVOKE EXECUTE ON FUNCTION outbox_unrestricted FROM %s', writer);
    END IF;
    PERFORM outbox_require_grants(writer, '{outbox}', '{outbox_emit, outbox_emit_many}');
END $$;
CREATE FUNCTION public.outbox_is_moving(id uuid) RETURNS boolean
    LANGUAGE plpgsql STABLE
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
BEGIN
    RETURN coalesce(current_setting('outbox.moving', true) = 'on', false)
        AND EXISTS (SELECT FROM outbox_delayed d WHERE d.id = outbox_is_moving.id);
END $$;
CREATE FUNCTION public.outbox_keep_shards() RETURNS void
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
    SELECT FROM outbox_shards ORDER BY shard FOR UPDATE;
    UPDATE outbox_shards
    SET wanted = NULL, wanted_at = NULL, barrier_paused = false, barrier_reached = false, barrier = NULL
    WHERE wanted IS NOT NULL
$$;
CREATE FUNCTION public.outbox_key(idempotency_key text, namespace text DEFAULT NULL::text) RETURNS uuid
    LANGUAGE sql STABLE PARALLEL SAFE
    RETURN (encode(SUBSTRING(sha256((COALESCE((convert_to(namespace, 'UTF8'::name) || '\x00'::bytea), '\x'::bytea) || convert_to(idempotency_key, 'UTF8'::name))) FROM 1 FOR 16), 'hex'::text))::uuid;
CREATE FUNCTION public.outbox_key_namespace(writer name) RETURNS text
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
    SELECT min(w.key_namespace) FROM outbox_writers w JOIN pg_roles r ON r.rolname = w.writer
    WHERE pg_has_role(outbox_key_namespace.writer, r.oid, 'USAGE')
$$;
CREATE FUNCTION public.outbox_last_seq() RETURNS bigint
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
    SELECT greatest((SELECT max(seq) FROM outbox), (SELECT max(seq) FROM outbox_parked),
                    (SELECT max(seq) FROM outbox_released), (SELECT max(seq) FROM outbox_delayed),
                    (SELECT max(last_seq) FROM outbox_days), 0)
$$;
CREATE FUNCTION public.outbox_may_write(writer name, aggregate_type text) RETURNS boolean
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
    SELECT has_function_privilege(writer, 'outbox_unrestricted()', 'EXECUTE')
        OR NOT EXISTS (SELECT FROM outbox_writers w WHERE w.aggregate_types IS NOT NULL)
        OR EXISTS (
            SELECT FROM outbox_writers w JOIN pg_roles r ON r.rolname = w.writer
            WHERE pg_has_role(outbox_may_write.writer, r.oid, 'USAGE')
              AND (w.aggregate_types IS NULL OR outbox_may_write.aggregate_type = ANY (w.aggregate_types)))
$$;
CREATE FUNCTION public.outbox_move(seqs bigint[]) RETURNS void
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
    INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers, idempotency_key,
                        correlation_id, causation_id, traceparent, version)
    SELECT id, aggregate_type, aggregate_id, event_type, payload, headers, idempotency_key,
           correlation_id, causation_id, traceparent, version
    FROM outbox_delayed WHERE seq = ANY (seqs) ORDER BY due, seq;
    DELETE FROM outbox_delayed WHERE seq = ANY (seqs);
$$;
CREATE FUNCTION public.outbox_move_due(most integer DEFAULT 500, again boolean DEFAULT false) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER
    SET enable_seqscan TO 'off'
    SET lock_timeout TO '100ms'
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
DECLARE
    at     timestamptz := clock_timestamp();
    found  bigint[];
    behind bigint[];
    last   outbox_delayed;
    one    bigint;
BEGIN
    IF NOT EXISTS (SELECT FROM outbox_delayed d WHERE d.due <= at)
       OR NOT pg_try_advisory_xact_lock(hashtextextended('outbox_move_due', 'outbox'::regclass::oid::bigint)) THEN
        RETURN 0;
    END IF;
    IF again THEN
        UPDATE outbox_delayed SET retry_at = NULL WHERE seq IN (
            SELECT seq FROM outbox_delayed WHERE due <= at AND retry_at IS NOT NULL FOR UPDATE SKIP LOCKED);
    END IF;
    SELECT array_agg(c.seq ORDER BY c.due, c.seq) INTO found FROM (
        SELECT d.due, d.seq FROM outbox_delayed d
        WHERE d.due <= at AND (d.retry_at IS NULL OR d.retry_at <= at) AND NOT EXISTS (
            SELECT FROM outbox_delayed p
            WHERE hashtextextended(p.aggregate_id, 0) = hashtextextended(d.aggregate_id, 0)
              AND p.aggregate_id = d.aggregate_id AND p.aggregate_type = d.aggregate_type
              AND p.later_events_wait AND p.retry_at > at AND (p.due, p.seq) < (d.due, d.seq))
        ORDER BY d.due, d.seq LIMIT most FOR UPDATE SKIP LOCKED) AS c;
    -- Behind one that another session has locked.
    SELECT * INTO last FROM outbox_delayed WHERE seq = found[cardinality(found)];
    SELECT array_agg(DISTINCT c.seq) INTO behind
    FROM (SELECT p.* FROM outbox_delayed p
          WHERE (p.due, p.seq) < (last.due, last.seq) AND p.later_events_wait
            AND p.seq NOT IN (SELECT unnest(found))) AS passed
    JOIN outbox_delayed c ON c.seq = ANY (found)
     AND c.aggregate_id = passed.aggregate_id AND c.aggregate_type = passed.aggregate_type
     AND (passed.due, passed.seq) < (c.due, c.seq);
    IF behind IS NOT NULL THEN
        -- For a moment they make room for others.
        UPDATE outbox_delayed SET retry_at = at + interval '10 seconds', last_error = 'behind an event that is locked'
        WHERE seq = ANY (behind);
    END IF;
    PERFORM set_config('outbox.moving', 'on', true);
    BEGIN
        PERFORM outbox_move(ARRAY(SELECT unnest(found) EXCEPT SELECT unnest(behind)));
        RETURN coalesce(cardinality(found), 0);
    EXCEPTION WHEN OTHERS THEN
        -- An outage, not an event.
        IF left(SQLSTATE, 2) IN ('08', '40', '53', '57', '58') OR SQLSTATE IN ('25006', '55006', '55P03') THEN
            RAISE;
        END IF;
    END;
    FOR one IN
        SELECT d.seq FROM outbox_delayed d
        WHERE d.seq = ANY (found) AND d.seq <> ALL (coalesce(behind, '{}')) ORDER BY d.due, d.seq
    LOOP
        CONTINUE WHEN EXISTS (
            SELECT FROM outbox_delayed p JOIN outbox_delayed d ON d.seq = one
             AND hashtextextended(p.aggregate_id, 0) = hashtextextended(d.aggregate_id, 0)
             AND p.aggregate_id = d.aggregate_id AND p.aggregate_type = d.aggregate_type
             AND p.later_events_wait AND p.retry_at > at AND (p.due, p.seq) < (d.due, d.seq));
        BEGIN
            PERFORM outbox_move(ARRAY[one]);
        EXCEPTION WHEN OTHERS THEN
            IF left(SQLSTATE, 2) IN ('08', '40', '53', '57', '58') OR SQLSTATE IN ('25006', '55006', '55P03') THEN
                RAISE;
            END IF;
            UPDATE outbox_delayed SET retry_at = clock_timestamp() + interval '1 minute', last_error = SQLERRM
            WHERE seq = one;
        END;
    END LOOP;
    RETURN cardinality(found);
END $$;
CREATE FUNCTION public.outbox_nth_id(digits text, counter bigint) RETURNS uuid
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN ((digits || "right"(to_hex(counter), 8)))::uuid;
CREATE FUNCTION public.outbox_open_from() RETURNS date
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
    SELECT CASE WHEN bool_and(state = 'open') IS NOT false THEN '-infinity'
                ELSE least(min(day) FILTER (WHERE state = 'open'), max(day) FILTER (WHERE state <> 'open') + 1)
           END::date
    FROM outbox_days
$$;
CREATE FUNCTION public.outbox_owner_declared(relation oid, setting text) RETURNS boolean
    LANGUAGE sql STABLE
    RETURN (COALESCE((current_setting(setting, true) = 'on'::text), false) AND pg_has_role(CURRENT_USER, (SELECT pg_class.relowner FROM pg_class WHERE (pg_class.oid = outbox_owner_declared.relation)), 'USAGE'::text));
CREATE FUNCTION public.outbox_park(seqs bigint[], states text[], errors text[], start timestamp with time zone, stop timestamp with time zone, first bigint, last bigint, OUT present bigint, OUT twice bigint) RETURNS record
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
    WITH before AS MATERIALIZED (
        SELECT k.seq, k.id, k.tx FROM outbox_parked k WHERE k.seq = ANY (outbox_park.seqs)
    ), found AS MATERIALIZED (
        SELECT o.*, coalesce(p.state, 'waiting') AS state, p.error, k.seq IS NOT NULL AS is_parked,
               (k.id, k.tx) <> (o.id, o.tx) AS is_another
        FROM unnest(outbox_park.seqs, outbox_park.states, outbox_park.errors) AS p (seq, state, error)
        JOIN outbox o ON o.seq = p.seq
        LEFT JOIN before k ON k.seq = o.seq
        WHERE o.created_at >= outbox_park.start AND o.created_at < outbox_park.stop
          AND o.seq >= outbox_park.first AND o.seq <= outbox_park.last
    ), counted AS MATERIALIZED (
        SELECT count(*) AS present, min(seq) FILTER (WHERE times > 1 OR is_another) AS twice
        FROM (SELECT seq, count(*) AS times, bool_or(is_another) AS is_another FROM found GROUP BY seq) AS each_seq
    ), parked AS (
        INSERT INTO outbox_parked (id, seq, tx, aggregate_type, aggregate_id, event_type, payload, headers,
                                   idempotency_key, correlation_id, causation_id, traceparent, version, created_at,
                                   state, next_attempt_at, last_error, failed_at)
        SELECT id, seq, tx, aggregate_type, aggregate_id, event_type, payload, headers,
               idempotency_key, correlation_id, causation_id, traceparent, version, created_at,
               state, CASE WHEN state = 'retrying' THEN clock_timestamp() END, error,
               CASE WHEN state = 'failed' THEN clock_timestamp() END
        FROM found, counted
        WHERE NOT is_parked AND state NOT IN ('replaying', 'discarded')
          AND present = cardinality(outbox_park.seqs) AND twice IS NULL
    )
    SELECT present, twice FROM counted
$$;
CREATE FUNCTION public.outbox_protect_functions() RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
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
CREATE FUNCTION public.outbox_refuse_action() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
BEGIN
    IF pg_has_role(current_user, (SELECT relowner FROM pg_class WHERE oid = TG_RELID), 'USAGE') THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'outbox: % may not change a dead letter from % to %', current_user, OLD.state, NEW.state
        USING ERRCODE = 'insufficient_privilege',
              HINT = 'Operators replay and discard dead letters by outbox_act, which records it.';
END $$;
CREATE FUNCTION public.outbox_refuse_change() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
BEGIN
    -- `outbox relay --rebase` gives restored rows transaction ids of this database.
    IF TG_OP = 'UPDATE' AND outbox_owner_declared(TG_RELID, 'outbox.rebase') THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'outbox: % refused, the table is append-only', TG_OP
        USING ERRCODE = 'feature_not_supported',
              HINT = 'To correct an event, write another one. Whole days are removed by the retention.';
END $$;
CREATE FUNCTION public.outbox_refuse_late_insert() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
BEGIN
    RAISE EXCEPTION 'outbox: % is closed, it takes no event of %', TG_TABLE_NAME, NEW.created_at
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = 'The transaction began too long ago, or the clock of the database went back. Run it again; '
                     'where the clock had been ahead, see outbox partitions reopen.';
END $$;
CREATE FUNCTION public.outbox_refuse_type(writer name, aggregate_type text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
BEGIN
    RAISE EXCEPTION 'outbox: % may not write events of the aggregate type %', writer, aggregate_type
        USING ERRCODE = 'insufficient_privilege',
              HINT = 'The owner of the outbox grants aggregate types with outbox_grant_writer.';
END $$;
CREATE FUNCTION public.outbox_release(seqs bigint[]) RETURNS void
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
    WITH gone AS (
        DELETE FROM outbox_parked
        WHERE seq = ANY (seqs) AND state IN ('waiting', 'retrying', 'replaying')
        RETURNING seq, id, attempts
    )
    INSERT INTO outbox_released (seq, id, attempts) SELECT seq, id, attempts FROM gone
    ON CONFLICT (seq, id) DO NOTHING
$$;
CREATE FUNCTION public.outbox_replay_advance(replay uuid, seq bigint, events bigint, state text, error text) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
#variable_conflict use_column
DECLARE
    current_state text;
BEGIN
    UPDATE outbox_replays r
    SET sent = CASE WHEN outbox_replay_advance.seq > r.position THEN outbox_replay_advance.events ELSE r.sent END,
        position = greatest(r.position, outbox_replay_advance.seq),
        state = CASE WHEN r.state = 'canceled' THEN r.state ELSE outbox_replay_advance.state END,
        -- Why it stopped is also why it was canceled.
        error = CASE WHEN 'canceled' IN (r.state, outbox_replay_advance.state) THEN r.error
                     ELSE outbox_replay_advance.error END,
        progress_at = clock_timestamp()
    WHERE r.id = outbox_replay_advance.replay AND r.state <> 'done';
    SELECT r.state INTO current_state FROM outbox_replays r WHERE r.id = outbox_replay_advance.replay;
    RETURN current_state;
END $$;
CREATE FUNCTION public.outbox_replay_begin(selection jsonb, target text, files jsonb, events bigint, last_seq bigint, reason text, on_behalf_of text, notes text[] DEFAULT '{}'::text[]) RETURNS uuid
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
    INSERT INTO outbox_replays (selection, target, files, events, last_seq, reason, on_behalf_of, notes)
    VALUES (outbox_replay_begin.selection, outbox_replay_begin.target, outbox_replay_begin.files,
            outbox_replay_begin.events, outbox_replay_begin.last_seq, outbox_replay_begin.reason,
            outbox_replay_begin.on_behalf_of, outbox_replay_begin.notes)
    RETURNING id
$$;
CREATE FUNCTION public.outbox_require_grants(grantee regrole, readable text[], callable text[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
DECLARE
    schema regnamespace := (SELECT relnamespace FROM pg_class WHERE oid = 'outbox'::regclass);
    missing text;
BEGIN
    SELECT string_agg(lacking, ', ') INTO missing FROM (
        SELECT format('USAGE ON SCHEMA %s', schema) WHERE NOT has_schema_privilege(grantee, schema, 'USAGE')
        UNION ALL
        SELECT format('SELECT ON %s', c.relname) FROM pg_class c
        WHERE c.relnamespace = schema AND c.relname = ANY (readable)
          AND NOT has_any_column_privilege(grantee, c.oid, 'SELECT')
        UNION ALL
        SELECT format('EXECUTE ON FUNCTION %s', p.proname) FROM pg_proc p
        WHERE p.pronamespace = schema AND p.proname = ANY (callable)
          AND NOT has_function_privilege(grantee, p.oid, 'EXECUTE')) AS rights (lacking);
    IF missing IS NOT NULL THEN
        RAISE EXCEPTION 'outbox: % could not grant to %: %', current_user, grantee, missing
            USING ERRCODE = 'insufficient_privilege',
                  HINT = format('The owner of the schema, or a superuser, runs GRANT USAGE ON SCHEMA %s TO %s; the '
                                'owner of the outbox grants the rest.', schema, grantee);
    END IF;
END $$;
CREATE FUNCTION public.outbox_shard_of(aggregate_type text, aggregate_id text, shards integer) RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN (((((hashtextextended(aggregate_id, (hashtext(aggregate_type))::bigint) >> 32) + '2147483648'::bigint) * shards) >> 32))::integer;
CREATE FUNCTION public.outbox_take_back(wanted uuid) RETURNS TABLE(id uuid, seq bigint, aggregate_type text, aggregate_id text, event_type text, due timestamp with time zone)
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
#variable_conflict use_column
DECLARE
    gone record;
BEGIN
    FOR gone IN DELETE FROM outbox_delayed d WHERE d.id = wanted RETURNING * LOOP
        UPDATE outbox_delayed d SET due = n.due FROM (
            SELECT seq, coalesce(greatest(
                       deliver_after,
                       max(deliver_after) FILTER (WHERE later_events_wait) OVER (ORDER BY seq)), created_at) AS due
            FROM outbox_delayed
            WHERE hashtextextended(aggregate_id, 0) = hashtextextended(gone.aggregate_id, 0)
              AND aggregate_id = gone.aggregate_id AND aggregate_type = gone.aggregate_type) AS n
        WHERE gone.later_events_wait AND d.seq = n.seq AND d.due <> n.due;
        RETURN QUERY
        SELECT gone.id, gone.seq, gone.aggregate_type, gone.aggregate_id, gone.event_type, gone.due;
    END LOOP;
END $$;
CREATE FUNCTION public.outbox_unrestricted() RETURNS void
    LANGUAGE sql
    RETURN NULL::text;
CREATE FUNCTION public.outbox_uuidv7() RETURNS uuid
    LANGUAGE sql PARALLEL SAFE
    RETURN (encode(set_bit(set_bit(OVERLAY(uuid_send(gen_random_uuid()) PLACING SUBSTRING(int8send(((EXTRACT(epoch FROM clock_timestamp()) * (1000)::numeric))::bigint) FROM 3) FROM 1 FOR 6), (52)::bigint, 1), (53)::bigint, 1), 'hex'::text))::uuid;
CREATE FUNCTION public.outbox_waits_until(aggregate_type text, aggregate_id text) RETURNS timestamp with time zone
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET search_path TO 'pg_catalog', 'public', 'pg_temp'
    AS $$
#variable_conflict use_variable
BEGIN
    RETURN (SELECT d.due FROM outbox_delayed d
            WHERE hashtextextended(d.aggregate_id, 0) = hashtextextended(aggregate_id, 0)
              AND d.aggregate_id = aggregate_id AND d.aggregate_type = aggregate_type AND d.later_events_wait
            ORDER BY d.due DESC LIMIT 1);
END $$;
CREATE FUNCTION public.outbox_writer() RETURNS name
    LANGUAGE sql STABLE
    RETURN COALESCE((NULLIF(current_setting('role'::text), 'none'::text))::name, SESSION_USER);
CREATE FUNCTION public.processed_bucket(event_id uuid) RETURNS smallint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN (((get_byte(uuid_send(event_id), 6) >> 4) = 7) AND ((get_byte(uuid_send(event_id), 8) >> 6) = 2)) THEN (((((((((get_byte(uuid_send(event_id), 0))::bigint << 40) + ((get_byte(uuid_send(event_id), 1))::bigint << 32)) + ((get_byte(uuid_send(event_id), 2))::bigint << 24)) + (get_byte(uuid_send(event_id), 3) << 16)) + (get_byte(uuid_send(event_id), 4) << 8)) + get_byte(uuid_send(event_id), 5)) / 86400000) % (64)::bigint) ELSE ('-1'::integer)::bigint END;
CREATE FUNCTION public.processed_source_is_long(bytes integer) RETURNS text
    LANGUAGE plpgsql
    AS $$
        BEGIN
            RAISE EXCEPTION 'the source of a processed event has % bytes, more than 500', bytes
                USING ERRCODE = 'program_limit_exceeded', HINT = 'Give the consumer a shorter name.';
        END $$;




CREATE TABLE public.processed_events (
    event_id uuid NOT NULL,
    processed_at timestamp with time zone DEFAULT now() NOT NULL,
    bucket smallint NOT NULL,
    source text NOT NULL,
    content uuid
)
PARTITION BY LIST (bucket);
CREATE FUNCTION public.processed_mark(event_id uuid, source text) RETURNS boolean
    LANGUAGE sql
    BEGIN ATOMIC
 WITH marked AS (
          INSERT INTO public.processed_events (event_id, source, bucket)
           VALUES (processed_mark.event_id,
                 CASE
                     WHEN (octet_length(processed_mark.source) > 500) THEN public.processed_source_is_long(octet_length(processed_mark.source))
                     ELSE processed_mark.source
                 END, public.processed_bucket(processed_mark.event_id)) ON CONFLICT DO NOTHING
           RETURNING true AS "?column?"
         )
  SELECT (EXISTS ( SELECT
            FROM (marked
              CROSS JOIN ( SELECT set_config('synchronous_commit'::text,
                         CASE current_setting('synchronous_commit'::text)
                             WHEN 'remote_apply'::text THEN 'remote_apply'::text
                             ELSE 'on'::text
                         END, true) AS set_config) durable))) AS "exists";
END;
CREATE FUNCTION public.processed_mark(event_id text, source text) RETURNS boolean
    LANGUAGE sql
    BEGIN ATOMIC
 SELECT public.processed_mark((event_id)::uuid, source) AS processed_mark;
END;




CREATE TABLE public.key_store (
    only_one boolean DEFAULT true NOT NULL,
    master_key text NOT NULL,
    CONSTRAINT key_store_master_key_check CHECK ((master_key <> ''::text)),
    CONSTRAINT key_store_only_one_check CHECK (only_one)
);
CREATE TABLE public.subject_keys (
    key_id uuid DEFAULT gen_random_uuid() NOT NULL,
    subject text NOT NULL,
    wrapped bytea,
    wrapped_by text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    forgotten_at timestamp with time zone,
    forgotten_by text,
    reason text,
    CONSTRAINT a_reason_is_given CHECK ((((wrapped IS NULL) = (reason IS NOT NULL)) AND (reason ~ '\S'::text))),
    CONSTRAINT subject_keys_check CHECK ((((wrapped IS NULL) = (forgotten_at IS NOT NULL)) AND ((wrapped IS NULL) = (wrapped_by IS NULL)))),
    CONSTRAINT subject_keys_subject_check CHECK (((octet_length(subject) >= 1) AND (octet_length(subject) <= 500))),
    CONSTRAINT wrapped_key_has_32_bytes_or_more CHECK ((octet_length(wrapped) >= 32))
)
WITH (autovacuum_vacuum_threshold='0', autovacuum_vacuum_scale_factor='0');
CREATE FUNCTION public.subject_keys_add(subjects text[], proposed bytea[], master text) RETURNS TABLE(subject text, key_id uuid, wrapped bytea, wrapped_by text)
    LANGUAGE sql SECURITY DEFINER
    BEGIN ATOMIC
 WITH now AS MATERIALIZED (
          SELECT key_store.master_key
            FROM public.key_store
           WHERE (key_store.master_key = subject_keys_add.master)
          FOR SHARE OF key_store
         )
  INSERT INTO public.subject_keys AS k (subject, wrapped, wrapped_by)  SELECT given.s,
             given.w,
             now.master_key
            FROM now,
             UNNEST(subject_keys_add.subjects, subject_keys_add.proposed) given(s, w)
           ORDER BY given.s ON CONFLICT(subject) DO UPDATE SET subject = excluded.subject
   RETURNING k.subject,
     k.key_id,
     k.wrapped,
     k.wrapped_by;
END;
CREATE FUNCTION public.subject_keys_find(subjects text[]) RETURNS TABLE(subject text, key_id uuid, wrapped bytea, wrapped_by text)
    LANGUAGE sql STABLE SECURITY DEFINER
    BEGIN ATOMIC
 SELECT k.subject,
     k.key_id,
     k.wrapped,
     k.wrapped_by
    FROM public.subject_keys k
   WHERE (k.subject = ANY (subject_keys_find.subjects));
END;
CREATE FUNCTION public.subject_keys_forget(forgotten text, actor text, why text) RETURNS TABLE(key_id uuid, forgotten_at timestamp with time zone, forgotten_by text, reason text, is_new boolean)
    LANGUAGE sql SECURITY DEFINER
    BEGIN ATOMIC
 UPDATE public.subject_keys k SET wrapped = NULL::bytea, wrapped_by = NULL::text, forgotten_at = COALESCE(k.forgotten_at, now()), reason = COALESCE(k.reason, subject_keys_forget.why), forgotten_by = COALESCE(k.forgotten_by, concat_ws(', '::text, NULLIF(btrim(subject_keys_forget.actor), ''::text), ('role '::text || (SESSION_USER)::text)))
   WHERE (k.subject = subject_keys_forget.forgotten)
   RETURNING k.key_id,
     k.forgotten_at,
     k.forgotten_by,
     k.reason,
     (k.forgotten_at = now());
END;
CREATE FUNCTION public.subject_keys_grant(grantee regrole, kind text) RETURNS void
    LANGUAGE plpgsql
    AS $$
    BEGIN
        EXECUTE format('GRANT USAGE ON SCHEMA %s TO %s',
                       (SELECT relnamespace::regnamespace FROM pg_class WHERE oid = 'subject_keys'::regclass), grantee);
        EXECUTE format('GRANT SELECT ON key_store TO %s', grantee);
        CASE kind
            WHEN 'writer' THEN EXECUTE format('GRANT EXECUTE ON FUNCTION subject_keys_find, subject_keys_add TO %s', grantee);
            WHEN 'reader' THEN EXECUTE format('GRANT EXECUTE ON FUNCTION subject_keys_read TO %s', grantee);
            WHEN 'operator' THEN
                EXECUTE format('GRANT EXECUTE ON FUNCTION subject_keys_forget TO %s', grantee);
                EXECUTE format('GRANT SELECT (key_id, subject, created_at, forgotten_at, forgotten_by, reason) '
                               'ON subject_keys TO %s', grantee);
        END CASE;
    EXCEPTION WHEN case_not_found THEN
        RAISE EXCEPTION 'there is no kind of role %', kind USING HINT = 'Give writer, reader or operator.';
    END $$;
CREATE FUNCTION public.subject_keys_read(ids uuid[]) RETURNS TABLE(key_id uuid, wrapped bytea, wrapped_by text)
    LANGUAGE sql STABLE SECURITY DEFINER
    BEGIN ATOMIC
 SELECT k.key_id,
     k.wrapped,
     k.wrapped_by
    FROM public.subject_keys k
   WHERE (k.key_id = ANY (subject_keys_read.ids));
END;
CREATE TABLE public.consumer_migrations (
    name text NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL,
    needs text
);
CREATE TABLE public.events (
    seq bigint NOT NULL,
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    aggregate_type text NOT NULL,
    aggregate_id text NOT NULL,
    event_type text NOT NULL,
    payload jsonb NOT NULL,
    headers jsonb,
    correlation_id text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    retry_count integer DEFAULT 0 NOT NULL,
    last_error text,
    next_attempt_at timestamp with time zone,
    published_at timestamp with time zone
);
ALTER TABLE public.events ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.events_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE public.inbox (
    seq bigint NOT NULL,
    message_id uuid NOT NULL,
    source text NOT NULL,
    topic text NOT NULL,
    partition integer NOT NULL,
    "offset" bigint NOT NULL,
    key text NOT NULL,
    key_hash bigint GENERATED ALWAYS AS (hashtextextended(key, (0)::bigint)) STORED NOT NULL,
    event_type text NOT NULL,
    message_key bytea,
    payload bytea,
    headers json NOT NULL,
    sent_at timestamp with time zone NOT NULL,
    received_at timestamp with time zone DEFAULT now() NOT NULL,
    state text DEFAULT 'waiting'::text NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    next_attempt_at timestamp with time zone DEFAULT now() NOT NULL,
    last_error text,
    paused_since timestamp with time zone,
    processed_at timestamp with time zone,
    CONSTRAINT inbox_state_check CHECK ((state = ANY (ARRAY['waiting'::text, 'failed'::text, 'processed'::text, 'discarded'::text])))
);
CREATE TABLE public.inbox_audit (
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    actor text NOT NULL,
    action text NOT NULL,
    reason text,
    seq bigint NOT NULL,
    message_id uuid NOT NULL,
    source text NOT NULL,
    CONSTRAINT inbox_audit_action_check CHECK ((action = ANY (ARRAY['replay'::text, 'discard'::text])))
);
ALTER TABLE public.inbox ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.inbox_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE public.key_store_migrations (
    name text NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL,
    needs text
);
CREATE SEQUENCE public.outbox_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
CREATE TABLE public.outbox (
    id uuid DEFAULT uuidv7() NOT NULL,
    seq bigint DEFAULT nextval('public.outbox_seq'::regclass) NOT NULL,
    tx xid8 DEFAULT pg_current_xact_id() NOT NULL,
    aggregate_type text NOT NULL,
    aggregate_id text NOT NULL,
    event_type text NOT NULL,
    payload jsonb NOT NULL,
    headers jsonb,
    idempotency_key text,
    correlation_id text,
    causation_id text,
    traceparent text,
    version integer,
    created_at timestamp with time zone DEFAULT now() NOT NULL
)
PARTITION BY RANGE (created_at);
CREATE TABLE public.outbox_20261124 (
    id uuid DEFAULT uuidv7() CONSTRAINT outbox_id_not_null NOT NULL,
    seq bigint DEFAULT nextval('public.outbox_seq'::regclass) CONSTRAINT outbox_seq_not_null NOT NULL,
    tx xid8 DEFAULT pg_current_xact_id() CONSTRAINT outbox_tx_not_null NOT NULL,
    aggregate_type text CONSTRAINT outbox_aggregate_type_not_null NOT NULL,
    aggregate_id text CONSTRAINT outbox_aggregate_id_not_null NOT NULL,
    event_type text CONSTRAINT outbox_event_type_not_null NOT NULL,
    payload jsonb CONSTRAINT outbox_payload_not_null NOT NULL,
    headers jsonb,
    idempotency_key text,
    correlation_id text,
    causation_id text,
    traceparent text,
    version integer,
    created_at timestamp with time zone DEFAULT now() CONSTRAINT outbox_created_at_not_null NOT NULL
);
CREATE TABLE public.outbox_20261125 (
    id uuid DEFAULT uuidv7() CONSTRAINT outbox_id_not_null NOT NULL,
    seq bigint DEFAULT nextval('public.outbox_seq'::regclass) CONSTRAINT outbox_seq_not_null NOT NULL,
    tx xid8 DEFAULT pg_current_xact_id() CONSTRAINT outbox_tx_not_null NOT NULL,
    aggregate_type text CONSTRAINT outbox_aggregate_type_not_null NOT NULL,
    aggregate_id text CONSTRAINT outbox_aggregate_id_not_null NOT NULL,
    event_type text CONSTRAINT outbox_event_type_not_null NOT NULL,
    payload jsonb CONSTRAINT outbox_payload_not_null NOT NULL,
    headers jsonb,
    idempotency_key text,
    correlation_id text,
    causation_id text,
    traceparent text,
    version integer,
    created_at timestamp with time zone DEFAULT now() CONSTRAINT outbox_created_at_not_null NOT NULL
);
CREATE TABLE public.outbox_20261126 (
    id uuid DEFAULT uuidv7() CONSTRAINT outbox_id_not_null NOT NULL,
    seq bigint DEFAULT nextval('public.outbox_seq'::regclass) CONSTRAINT outbox_seq_not_null NOT NULL,
    tx xid8 DEFAULT pg_current_xact_id() CONSTRAINT outbox_tx_not_null NOT NULL,
    aggregate_type text CONSTRAINT outbox_aggregate_type_not_null NOT NULL,
    aggregate_id text CONSTRAINT outbox_aggregate_id_not_null NOT NULL,
    event_type text CONSTRAINT outbox_event_type_not_null NOT NULL,
    payload jsonb CONSTRAINT outbox_payload_not_null NOT NULL,
    headers jsonb,
    idempotency_key text,
    correlation_id text,
    causation_id text,
    traceparent text,
    version integer,
    created_at timestamp with time zone DEFAULT now() CONSTRAINT outbox_created_at_not_null NOT NULL
);
CREATE TABLE public.outbox_20261127 (
    id uuid DEFAULT uuidv7() CONSTRAINT outbox_id_not_null NOT NULL,
    seq bigint DEFAULT nextval('public.outbox_seq'::regclass) CONSTRAINT outbox_seq_not_null NOT NULL,
    tx xid8 DEFAULT pg_current_xact_id() CONSTRAINT outbox_tx_not_null NOT NULL,
    aggregate_type text CONSTRAINT outbox_aggregate_type_not_null NOT NULL,
    aggregate_id text CONSTRAINT outbox_aggregate_id_not_null NOT NULL,
    event_type text CONSTRAINT outbox_event_type_not_null NOT NULL,
    payload jsonb CONSTRAINT outbox_payload_not_null NOT NULL,
    headers jsonb,
    idempotency_key text,
    correlation_id text,
    causation_id text,
    traceparent text,
    version integer,
    created_at timestamp with time zone DEFAULT now() CONSTRAINT outbox_created_at_not_null NOT NULL
);
CREATE TABLE public.outbox_20261128 (
    id uuid DEFAULT uuidv7() CONSTRAINT outbox_id_not_null NOT NULL,
    seq bigint DEFAULT nextval('public.outbox_seq'::regclass) CONSTRAINT outbox_seq_not_null NOT NULL,
    tx xid8 DEFAULT pg_current_xact_id() CONSTRAINT outbox_tx_not_null NOT NULL,
    aggregate_type text CONSTRAINT outbox_aggregate_type_not_null NOT NULL,
    aggregate_id text CONSTRAINT outbox_aggregate_id_not_null NOT NULL,
    event_type text CONSTRAINT outbox_event_type_not_null NOT NULL,
    payload jsonb CONSTRAINT outbox_payload_not_null NOT NULL,
    headers jsonb,
    idempotency_key text,
    correlation_id text,
    causation_id text,
    traceparent text,
    version integer,
    created_at timestamp with time zone DEFAULT now() CONSTRAINT outbox_created_at_not_null NOT NULL
);
CREATE TABLE public.outbox_adopted (
    relation oid NOT NULL,
    schema name NOT NULL,
    name name NOT NULL,
    kept_as name NOT NULL,
    state text DEFAULT 'prepared'::text NOT NULL,
    accepted text[] DEFAULT '{}'::text[] NOT NULL,
    switched_at timestamp with time zone,
    slot name,
    switched_lsn pg_lsn,
    returned pg_snapshot,
    file text,
    proven_at timestamp with time zone,
    CONSTRAINT outbox_adopted_state_check CHECK ((state = ANY (ARRAY['prepared'::text, 'draining'::text, 'adopted'::text, 'returning'::text, 'finished'::text])))
);
CREATE TABLE public.outbox_archive_changes (
    manifest_sha256 text NOT NULL,
    former_manifest_sha256 text NOT NULL,
    former_sha256 text NOT NULL,
    day date NOT NULL,
    at timestamp with time zone NOT NULL,
    changed_by text NOT NULL,
    reason text NOT NULL,
    kind text NOT NULL,
    names text[] NOT NULL,
    events bigint NOT NULL,
    rows_before bigint NOT NULL,
    rows_after bigint NOT NULL,
    former_deleted_at timestamp with time zone,
    CONSTRAINT outbox_archive_changes_kind_check CHECK ((kind = ANY (ARRAY['redacted'::text, 'expired'::text]))),
    CONSTRAINT outbox_archive_changes_reason_check CHECK ((reason <> ''::text))
);
CREATE TABLE public.outbox_audit (
    number bigint NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    actor name DEFAULT SESSION_USER NOT NULL,
    on_behalf_of text,
    action text NOT NULL,
    reason text NOT NULL,
    filter jsonb NOT NULL,
    events bigint[] NOT NULL,
    CONSTRAINT outbox_audit_action_check CHECK ((action = ANY (ARRAY['replay'::text, 'discard'::text, 'shards'::text, 'cancel'::text]))),
    CONSTRAINT outbox_audit_reason_check CHECK ((reason <> ''::text))
);
ALTER TABLE public.outbox_audit ALTER COLUMN number ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.outbox_audit_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE public.outbox_days (
    day date NOT NULL,
    state text DEFAULT 'open'::text NOT NULL,
    sealed_at timestamp with time zone,
    closed_at timestamp with time zone,
    published pg_snapshot,
    archived_at timestamp with time zone,
    proven_at timestamp with time zone,
    dropped_at timestamp with time zone,
    last_seq bigint,
    events bigint,
    manifest_sha256 text,
    archive uuid,
    CONSTRAINT outbox_days_closed CHECK (((state = 'open'::text) OR (closed_at >= sealed_at))),
    CONSTRAINT outbox_days_state_check CHECK ((state = ANY (ARRAY['open'::text, 'closed'::text, 'archived'::text, 'dropped'::text])))
);
CREATE TABLE public.outbox_delayed (
    id uuid DEFAULT uuidv7() CONSTRAINT outbox_id_not_null NOT NULL,
    seq bigint DEFAULT nextval('public.outbox_seq'::regclass) CONSTRAINT outbox_seq_not_null NOT NULL,
    tx xid8 DEFAULT pg_current_xact_id() CONSTRAINT outbox_tx_not_null NOT NULL,
    aggregate_type text CONSTRAINT outbox_aggregate_type_not_null NOT NULL,
    aggregate_id text CONSTRAINT outbox_aggregate_id_not_null NOT NULL,
    event_type text CONSTRAINT outbox_event_type_not_null NOT NULL,
    payload jsonb CONSTRAINT outbox_payload_not_null NOT NULL,
    headers jsonb,
    idempotency_key text,
    correlation_id text,
    causation_id text,
    traceparent text,
    version integer,
    created_at timestamp with time zone DEFAULT now() CONSTRAINT outbox_created_at_not_null NOT NULL,
    deliver_after timestamp with time zone,
    due timestamp with time zone NOT NULL,
    later_events_wait boolean NOT NULL,
    retry_at timestamp with time zone,
    last_error text
);
CREATE TABLE public.outbox_parked (
    id uuid CONSTRAINT outbox_id_not_null NOT NULL,
    seq bigint CONSTRAINT outbox_seq_not_null NOT NULL,
    tx xid8 CONSTRAINT outbox_tx_not_null NOT NULL,
    aggregate_type text CONSTRAINT outbox_aggregate_type_not_null NOT NULL,
    aggregate_id text CONSTRAINT outbox_aggregate_id_not_null NOT NULL,
    event_type text CONSTRAINT outbox_event_type_not_null NOT NULL,
    payload jsonb CONSTRAINT outbox_payload_not_null NOT NULL,
    headers jsonb,
    idempotency_key text,
    correlation_id text,
    causation_id text,
    traceparent text,
    version integer,
    created_at timestamp with time zone CONSTRAINT outbox_created_at_not_null NOT NULL,
    state text NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    next_attempt_at timestamp with time zone,
    last_error text,
    parked_at timestamp with time zone DEFAULT now() NOT NULL,
    failed_at timestamp with time zone,
    trying boolean DEFAULT false NOT NULL,
    crashes integer DEFAULT 0 NOT NULL,
    command_due boolean DEFAULT false NOT NULL,
    CONSTRAINT outbox_parked_attempts_check CHECK ((attempts >= 0)),
    CONSTRAINT outbox_parked_state_check CHECK ((state = ANY (ARRAY['waiting'::text, 'retrying'::text, 'failed'::text, 'replaying'::text, 'discarded'::text])))
);
CREATE TABLE public.outbox_progress (
    shard integer NOT NULL,
    shards integer DEFAULT 1 NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    done pg_snapshot NOT NULL,
    target pg_snapshot,
    last_seq bigint,
    events bigint NOT NULL,
    latency double precision,
    CONSTRAINT outbox_progress_events_check CHECK ((events > 0))
);
CREATE TABLE public.outbox_released (
    seq bigint NOT NULL,
    id uuid NOT NULL,
    published_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    attempts integer NOT NULL
);
CREATE TABLE public.outbox_shards (
    shard integer NOT NULL,
    shards integer DEFAULT 1 NOT NULL,
    owner text,
    pid integer,
    epoch bigint DEFAULT 0 NOT NULL,
    owned_since timestamp with time zone,
    heartbeat timestamp with time zone,
    done pg_snapshot NOT NULL,
    target pg_snapshot,
    last_seq bigint,
    tick_id uuid,
    wanted integer,
    wanted_at timestamp with time zone,
    barrier_paused boolean DEFAULT false NOT NULL,
    barrier pg_snapshot,
    barrier_reached boolean DEFAULT false NOT NULL,
    slot text,
    slot_snapshot pg_snapshot,
    slot_ends boolean DEFAULT false NOT NULL,
    slot_error text,
    breaker text DEFAULT 'closed'::text NOT NULL,
    breaker_reason text,
    top_up_error text,
    crashes integer DEFAULT 0 NOT NULL,
    crash_guard_seq bigint,
    crash_guard_crashes integer DEFAULT 0 NOT NULL,
    system_identifier bigint NOT NULL,
    database oid NOT NULL,
    CONSTRAINT outbox_shards_breaker_check CHECK ((breaker = ANY (ARRAY['closed'::text, 'open'::text, 'half-open'::text]))),
    CONSTRAINT outbox_shards_check CHECK ((shards > shard)),
    CONSTRAINT outbox_shards_shard_check CHECK ((shard >= 0)),
    CONSTRAINT outbox_shards_slot CHECK (((slot IS NOT NULL) OR ((NOT slot_ends) AND (num_nonnulls(slot_snapshot, slot_error) = 0)))),
    CONSTRAINT outbox_shards_tick CHECK (((target IS NULL) = (last_seq IS NULL))),
    CONSTRAINT outbox_shards_wanted_check CHECK ((wanted > 0))
)
WITH (fillfactor='10', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000');
CREATE VIEW public.outbox_events AS
 SELECT e.id,
    e.seq,
    e.aggregate_type,
    e.aggregate_id,
    e.event_type,
    e.payload AS event_data,
    e.headers,
    e.idempotency_key,
    e.correlation_id,
    e.causation_id,
    e.traceparent,
    e.version,
    e.created_at,
        CASE
            WHEN (p.state = 'failed'::text) THEN 'FAILED'::text
            WHEN (p.state = 'discarded'::text) THEN 'DISCARDED'::text
            WHEN ((p.seq IS NULL) AND (late.day IS NULL) AND public.outbox_covers(s.done, s.target, s.last_seq, e.tx, e.seq)) THEN 'PROCESSED'::text
            ELSE 'PENDING'::text
        END AS status,
        CASE
            WHEN ((p.seq IS NULL) AND (late.day IS NULL)) THEN COALESCE(r.published_at, ( SELECT g.at
               FROM public.outbox_progress g
              WHERE ((g.shard = public.outbox_shard_of(e.aggregate_type, e.aggregate_id, g.shards)) AND (g.at >= e.created_at) AND public.outbox_covers(g.done, g.target, g.last_seq, e.tx, e.seq))
              ORDER BY g.at
             LIMIT 1))
            ELSE NULL::timestamp with time zone
        END AS processed_at,
    COALESCE(p.attempts, r.attempts, 0) AS retry_count,
    p.last_error
   FROM ((((public.outbox e
     JOIN public.outbox_shards s ON ((s.shard = public.outbox_shard_of(e.aggregate_type, e.aggregate_id, s.shards))))
     LEFT JOIN public.outbox_parked p ON (((p.seq = e.seq) AND (p.id = e.id))))
     LEFT JOIN public.outbox_released r ON (((r.seq = e.seq) AND (r.id = e.id))))
     LEFT JOIN public.outbox_days late ON (((late.day = ((e.created_at AT TIME ZONE 'UTC'::text))::date) AND (NOT pg_visible_in_snapshot(e.tx, late.published)))));
CREATE SEQUENCE public.outbox_has_waited
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
CREATE TABLE public.outbox_keys (
    key uuid NOT NULL,
    event_id uuid NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);
CREATE TABLE public.outbox_migrations (
    name text NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL,
    needs text,
    description text[]
);
CREATE TABLE public.outbox_replays (
    id uuid DEFAULT public.outbox_uuidv7() NOT NULL,
    started_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    actor name DEFAULT SESSION_USER NOT NULL,
    on_behalf_of text,
    reason text NOT NULL,
    selection jsonb NOT NULL,
    target text NOT NULL,
    files jsonb NOT NULL,
    notes text[] NOT NULL,
    events bigint NOT NULL,
    last_seq bigint NOT NULL,
    "position" bigint DEFAULT 0 NOT NULL,
    sent bigint DEFAULT 0 NOT NULL,
    state text DEFAULT 'running'::text NOT NULL,
    error text,
    progress_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT outbox_replays_reason_check CHECK ((reason <> ''::text)),
    CONSTRAINT outbox_replays_state_check CHECK ((state = ANY (ARRAY['running'::text, 'stopped'::text, 'done'::text, 'canceled'::text])))
);
CREATE TABLE public.outbox_writers (
    writer name NOT NULL,
    aggregate_types text[],
    key_namespace text,
    CONSTRAINT outbox_writers_are_restricted CHECK ((num_nonnulls(aggregate_types, key_namespace) > 0)),
    CONSTRAINT outbox_writers_key_namespace_check CHECK ((key_namespace <> ''::text))
);
CREATE TABLE public.partition_owners (
    source text NOT NULL,
    consumer_group text NOT NULL,
    topic text NOT NULL,
    partition integer NOT NULL,
    owner uuid NOT NULL,
    crashes integer DEFAULT 0 NOT NULL,
    owned_since timestamp with time zone DEFAULT now() NOT NULL
);
CREATE TABLE public.processed_events_00 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_01 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_02 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_03 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_04 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_05 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_06 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_07 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_08 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_09 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_10 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_11 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_12 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_13 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_14 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_15 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_16 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_17 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_18 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_19 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_20 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_21 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_22 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_23 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_24 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_25 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_26 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_27 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_28 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_29 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_30 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_31 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_32 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_33 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_34 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_35 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_36 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_37 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_38 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_39 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_40 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_41 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_42 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_43 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_44 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_45 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_46 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_47 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_48 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_49 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_50 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_51 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_52 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_53 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_54 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_55 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_56 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_57 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_58 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_59 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_60 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_61 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_62 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_63 (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
CREATE TABLE public.processed_events_other (
    event_id uuid CONSTRAINT processed_events_event_id_not_null NOT NULL,
    processed_at timestamp with time zone DEFAULT now() CONSTRAINT processed_events_processed_at_not_null NOT NULL,
    bucket smallint CONSTRAINT processed_events_bucket_not_null NOT NULL,
    source text CONSTRAINT processed_events_source_not_null NOT NULL,
    content uuid
);
ALTER TABLE ONLY public.outbox ATTACH PARTITION public.outbox_20261124 FOR VALUES FROM ('2026-11-24 00:00:00+00') TO ('2026-11-25 00:00:00+00');
ALTER TABLE ONLY public.outbox ATTACH PARTITION public.outbox_20261125 FOR VALUES FROM ('2026-11-25 00:00:00+00') TO ('2026-11-26 00:00:00+00');
ALTER TABLE ONLY public.outbox ATTACH PARTITION public.outbox_20261126 FOR VALUES FROM ('2026-11-26 00:00:00+00') TO ('2026-11-27 00:00:00+00');
ALTER TABLE ONLY public.outbox ATTACH PARTITION public.outbox_20261127 FOR VALUES FROM ('2026-11-27 00:00:00+00') TO ('2026-11-28 00:00:00+00');
ALTER TABLE ONLY public.outbox ATTACH PARTITION public.outbox_20261128 FOR VALUES FROM ('2026-11-28 00:00:00+00') TO ('2026-11-29 00:00:00+00');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_00 FOR VALUES IN ('0');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_01 FOR VALUES IN ('1');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_02 FOR VALUES IN ('2');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_03 FOR VALUES IN ('3');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_04 FOR VALUES IN ('4');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_05 FOR VALUES IN ('5');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_06 FOR VALUES IN ('6');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_07 FOR VALUES IN ('7');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_08 FOR VALUES IN ('8');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_09 FOR VALUES IN ('9');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_10 FOR VALUES IN ('10');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_11 FOR VALUES IN ('11');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_12 FOR VALUES IN ('12');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_13 FOR VALUES IN ('13');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_14 FOR VALUES IN ('14');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_15 FOR VALUES IN ('15');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_16 FOR VALUES IN ('16');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_17 FOR VALUES IN ('17');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_18 FOR VALUES IN ('18');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_19 FOR VALUES IN ('19');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_20 FOR VALUES IN ('20');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_21 FOR VALUES IN ('21');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_22 FOR VALUES IN ('22');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_23 FOR VALUES IN ('23');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_24 FOR VALUES IN ('24');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_25 FOR VALUES IN ('25');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_26 FOR VALUES IN ('26');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_27 FOR VALUES IN ('27');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_28 FOR VALUES IN ('28');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_29 FOR VALUES IN ('29');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_30 FOR VALUES IN ('30');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_31 FOR VALUES IN ('31');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_32 FOR VALUES IN ('32');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_33 FOR VALUES IN ('33');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_34 FOR VALUES IN ('34');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_35 FOR VALUES IN ('35');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_36 FOR VALUES IN ('36');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_37 FOR VALUES IN ('37');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_38 FOR VALUES IN ('38');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_39 FOR VALUES IN ('39');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_40 FOR VALUES IN ('40');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_41 FOR VALUES IN ('41');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_42 FOR VALUES IN ('42');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_43 FOR VALUES IN ('43');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_44 FOR VALUES IN ('44');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_45 FOR VALUES IN ('45');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_46 FOR VALUES IN ('46');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_47 FOR VALUES IN ('47');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_48 FOR VALUES IN ('48');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_49 FOR VALUES IN ('49');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_50 FOR VALUES IN ('50');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_51 FOR VALUES IN ('51');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_52 FOR VALUES IN ('52');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_53 FOR VALUES IN ('53');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_54 FOR VALUES IN ('54');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_55 FOR VALUES IN ('55');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_56 FOR VALUES IN ('56');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_57 FOR VALUES IN ('57');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_58 FOR VALUES IN ('58');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_59 FOR VALUES IN ('59');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_60 FOR VALUES IN ('60');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_61 FOR VALUES IN ('61');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_62 FOR VALUES IN ('62');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_63 FOR VALUES IN ('63');
ALTER TABLE ONLY public.processed_events ATTACH PARTITION public.processed_events_other FOR VALUES IN ('-1');
INSERT INTO public.consumer_migrations VALUES ('0001_processed', '2026-11-28 20:17:41.161796+00', NULL);
INSERT INTO public.consumer_migrations VALUES ('0002_inbox', '2026-11-28 20:17:41.161796+00', NULL);
INSERT INTO public.consumer_migrations VALUES ('0003_partition_owners', '2026-11-28 20:17:41.161796+00', NULL);
INSERT INTO public.consumer_migrations VALUES ('0004_processed_mark', '2026-11-28 20:17:41.161796+00', NULL);
INSERT INTO public.events OVERRIDING SYSTEM VALUE VALUES (1, 'dfe176d8-e98d-4cdb-838e-6f86e2e7fde1', 'order', 'old', 'order.placed', '{"n": 1}', NULL, NULL, '2026-11-28 20:17:55.345014+00', 0, NULL, NULL, '2026-11-28 20:17:56.640559+00');
INSERT INTO public.events OVERRIDING SYSTEM VALUE VALUES (2, '009a2952-6f3d-4cd5-b9ba-d68f427efe21', 'order', 'old', 'order.placed', '{"n": 2}', NULL, NULL, '2026-11-28 20:17:55.345014+00', 0, NULL, NULL, '2026-11-28 20:17:56.640578+00');
INSERT INTO public.events OVERRIDING SYSTEM VALUE VALUES (3, '76415d75-d757-49a1-9e90-5ffb7fea0a2a', 'order', 'old', 'order.placed', '{"n": 3}', NULL, NULL, '2026-11-28 20:17:56.653545+00', 0, NULL, NULL, NULL);
INSERT INTO public.inbox OVERRIDING SYSTEM VALUE VALUES (2, '01a223ce-73cc-7578-8c54-96be85d8f3a7', 'billing', 'release-order-events', 0, 13, 'order.paused', DEFAULT, 'order.paused', '\x6f726465722e706175736564', '\x7b226e223a20307d', '[["id", "01a223ce-73cc-7578-8c54-96be85d8f3a7"], ["event-type", "order.paused"], ["aggregate-type", "order"]]', '2026-11-28 20:17:42.974+00', '2026-11-28 20:17:44.814917+00', 'waiting', 0, '2026-11-28 20:17:45.814917+00', 'OutageError: its service is unavailable', '2026-11-28 20:17:44.814917+00', NULL);
INSERT INTO public.inbox OVERRIDING SYSTEM VALUE VALUES (3, '01a223ce-73ca-779b-99dd-176f011ad0a4', 'billing', 'release-order-events', 0, 14, 'order.failing', DEFAULT, 'order.failing', '\x6f726465722e6661696c696e67', '\x7b226e223a20307d', '[["id", "01a223ce-73ca-779b-99dd-176f011ad0a4"], ["event-type", "order.failing"], ["aggregate-type", "order"]]', '2026-11-28 20:17:43.487+00', '2026-11-28 20:17:44.822725+00', 'waiting', 0, '2026-11-28 20:17:44.822725+00', NULL, NULL, NULL);
INSERT INTO public.inbox OVERRIDING SYSTEM VALUE VALUES (1, '01a223ce-73c9-7c80-9137-7d9495ed14e4', 'billing', 'release-order-events', 0, 12, 'order.failing', DEFAULT, 'order.failing', '\x6f726465722e6661696c696e67', '\x7b226e223a20307d', '[["id", "01a223ce-73c9-7c80-9137-7d9495ed14e4"], ["event-type", "order.failing"], ["aggregate-type", "order"]]', '2026-11-28 20:17:42.974+00', '2026-11-28 20:17:44.803419+00', 'failed', 5, '2026-11-28 20:23:42.43264+00', 'ValueError: it fails', NULL, NULL);
INSERT INTO public.inbox_audit VALUES ('2026-11-28 20:17:45.086577+00', 'ann', 'replay', 'corrected', 2, '01a223ce-73cc-7578-8c54-96be85d8f3a7', 'billing');
INSERT INTO public.key_store VALUES (true, '737a3bb19f4b96b0');
INSERT INTO public.key_store_migrations VALUES ('0001_keys', '2026-11-28 20:17:55.182866+00', NULL);
INSERT INTO public.outbox_20261124 VALUES ('01a20ada-2df4-7541-b6ad-d0f84950f274', 4, '10', 'order', '0', 'order.placed', '{}', '{"tenant": "7"}', NULL, 'c-1', NULL, NULL, NULL, '2026-11-24 00:00:00.5+00');
INSERT INTO public.outbox_20261124 VALUES ('01a20ada-31dc-7bc2-8c86-e71fceeb9316', 5, '10', 'order', '1', 'order.placed', '{}', '{"tenant": "7"}', NULL, 'c-1', NULL, NULL, NULL, '2026-11-24 00:00:01.5+00');
INSERT INTO public.outbox_20261124 VALUES ('01a20ada-35c4-736d-83a9-337ef8ff67d8', 6, '10', 'order', '2', 'order.placed', '{}', '{"tenant": "7"}', NULL, 'c-1', NULL, NULL, NULL, '2026-11-24 00:00:02.5+00');
INSERT INTO public.outbox_20261125 VALUES ('01a21000-89f4-7891-93bf-955c46a1709d', 7, '11', 'order', '0', 'order.placed', '{}', '{"tenant": "7"}', NULL, 'c-1', NULL, NULL, NULL, '2026-11-25 00:00:00.5+00');
INSERT INTO public.outbox_20261125 VALUES ('01a21000-8ddc-786d-816a-fee181268133', 8, '11', 'order', '1', 'order.placed', '{}', '{"tenant": "7"}', NULL, 'c-1', NULL, NULL, NULL, '2026-11-25 00:00:01.5+00');
INSERT INTO public.outbox_20261125 VALUES ('01a21000-91c4-72b6-9ef0-fd6fd9b1dc41', 9, '11', 'order', '2', 'order.placed', '{}', '{"tenant": "7"}', NULL, 'c-1', NULL, NULL, NULL, '2026-11-25 00:00:02.5+00');


INSERT INTO public.outbox_20261128 VALUES ('01a223ce-73b5-7f26-aa68-26face17229b', 10, '17', 'order', 'order.placed', 'order.placed', '{"n": 0}', NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-28 20:17:42.309998+00');
INSERT INTO public.outbox_20261128 VALUES ('01a223ce-73c9-7c80-9137-7d9495ed14e4', 11, '18', 'order', 'order.failing', 'order.failing', '{"n": 0}', NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-28 20:17:42.345242+00');
INSERT INTO public.outbox_20261128 VALUES ('01a223ce-73ca-779b-99dd-176f011ad0a4', 12, '19', 'order', 'order.failing', 'order.failing', '{"n": 0}', NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-28 20:17:42.346257+00');
INSERT INTO public.outbox_20261128 VALUES ('01a223ce-73cc-7578-8c54-96be85d8f3a7', 13, '20', 'order', 'order.paused', 'order.paused', '{"n": 0}', NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-28 20:17:42.347326+00');
INSERT INTO public.outbox_20261128 VALUES ('01a223ce-9acb-7ee6-9c2c-35edc4062822', 14, '23', 'order', 'dead', 'order.placed', '{"noise": ["00000", "07919", "15838", "23757", "31676", "39595", "47514", "55433", "63352", "71271", "79190", "87109", "95028", "02944", "10863", "18782", "26701", "34620", "42539", "50458", "58377", "66296", "74215", "82134", "90053", "97972", "05888", "13807", "21726", "29645", "37564", "45483", "53402", "61321", "69240", "77159", "85078", "92997", "00913", "08832", "16751", "24670", "32589", "40508", "48427", "56346", "64265", "72184", "80103", "88022", "95941", "03857", "11776", "19695", "27614", "35533", "43452", "51371", "59290", "67209", "75128", "83047", "90966", "98885", "06801", "14720", "22639", "30558", "38477", "46396", "54315", "62234", "70153", "78072", "85991", "93910", "01826", "09745", "17664", "25583", "33502", "41421", "49340", "57259", "65178", "73097", "81016", "88935", "96854", "04770", "12689", "20608", "28527", "36446", "44365", "52284", "60203", "68122", "76041", "83960", "91879", "99798", "07714", "15633", "23552", "31471", "39390", "47309", "55228", "63147", "71066", "78985", "86904", "94823", "02739", "10658", "18577", "26496", "34415", "42334", "50253", "58172", "66091", "74010", "81929", "89848", "97767", "05683", "13602", "21521", "29440", "37359", "45278", "53197", "61116", "69035", "76954", "84873", "92792", "00708", "08627", "16546", "24465", "32384", "40303", "48222", "56141", "64060", "71979", "79898", "87817", "95736", "03652", "11571", "19490", "27409", "35328", "43247", "51166", "59085", "67004", "74923", "82842", "90761", "98680", "06596", "14515", "22434", "30353", "38272", "46191", "54110", "62029", "69948", "77867", "85786", "93705", "01621", "09540", "17459", "25378", "33297", "41216", "49135", "57054", "64973", "72892", "80811", "88730", "96649", "04565", "12484", "20403", "28322", "36241", "44160", "52079", "59998", "67917", "75836", "83755", "91674", "99593", "07509", "15428", "23347", "31266", "39185", "47104", "55023", "62942", "70861", "78780", "86699", "94618", "02534", "10453", "18372", "26291", "34210", "42129", "50048", "57967", "65886", "73805", "81724", "89643", "97562", "05478", "13397", "21316", "29235", "37154", "45073", "52992", "60911", "68830", "76749", "84668", "92587", "00503", "08422", "16341", "24260", "32179", "40098", "48017", "55936", "63855", "71774", "79693", "87612", "95531", "03447", "11366", "19285", "27204", "35123", "43042", "50961", "58880", "66799", "74718", "82637", "90556", "98475", "06391", "14310", "22229", "30148", "38067", "45986", "53905", "61824", "69743", "77662", "85581", "93500", "01416", "09335", "17254", "25173", "33092", "41011", "48930", "56849", "64768", "72687", "80606", "88525", "96444", "04360", "12279", "20198", "28117", "36036", "43955", "51874", "59793", "67712", "75631", "83550", "91469", "99388", "07304", "15223", "23142", "31061", "38980", "46899", "54818", "62737", "70656", "78575", "86494", "94413", "02329", "10248", "18167", "26086"]}', NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-28 20:17:52.328459+00');
INSERT INTO public.outbox_20261128 VALUES ('01a223ce-9ad4-7584-8479-75f6844045b7', 15, '23', 'order', 'discarded', 'order.placed', '{"noise": ["00000", "07919", "15838", "23757", "31676", "39595", "47514", "55433", "63352", "71271", "79190", "87109", "95028", "02944", "10863", "18782", "26701", "34620", "42539", "50458", "58377", "66296", "74215", "82134", "90053", "97972", "05888", "13807", "21726", "29645", "37564", "45483", "53402", "61321", "69240", "77159", "85078", "92997", "00913", "08832", "16751", "24670", "32589", "40508", "48427", "56346", "64265", "72184", "80103", "88022", "95941", "03857", "11776", "19695", "27614", "35533", "43452", "51371", "59290", "67209", "75128", "83047", "90966", "98885", "06801", "14720", "22639", "30558", "38477", "46396", "54315", "62234", "70153", "78072", "85991", "93910", "01826", "09745", "17664", "25583", "33502", "41421", "49340", "57259", "65178", "73097", "81016", "88935", "96854", "04770", "12689", "20608", "28527", "36446", "44365", "52284", "60203", "68122", "76041", "83960", "91879", "99798", "07714", "15633", "23552", "31471", "39390", "47309", "55228", "63147", "71066", "78985", "86904", "94823", "02739", "10658", "18577", "26496", "34415", "42334", "50253", "58172", "66091", "74010", "81929", "89848", "97767", "05683", "13602", "21521", "29440", "37359", "45278", "53197", "61116", "69035", "76954", "84873", "92792", "00708", "08627", "16546", "24465", "32384", "40303", "48222", "56141", "64060", "71979", "79898", "87817", "95736", "03652", "11571", "19490", "27409", "35328", "43247", "51166", "59085", "67004", "74923", "82842", "90761", "98680", "06596", "14515", "22434", "30353", "38272", "46191", "54110", "62029", "69948", "77867", "85786", "93705", "01621", "09540", "17459", "25378", "33297", "41216", "49135", "57054", "64973", "72892", "80811", "88730", "96649", "04565", "12484", "20403", "28322", "36241", "44160", "52079", "59998", "67917", "75836", "83755", "91674", "99593", "07509", "15428", "23347", "31266", "39185", "47104", "55023", "62942", "70861", "78780", "86699", "94618", "02534", "10453", "18372", "26291", "34210", "42129", "50048", "57967", "65886", "73805", "81724", "89643", "97562", "05478", "13397", "21316", "29235", "37154", "45073", "52992", "60911", "68830", "76749", "84668", "92587", "00503", "08422", "16341", "24260", "32179", "40098", "48017", "55936", "63855", "71774", "79693", "87612", "95531", "03447", "11366", "19285", "27204", "35123", "43042", "50961", "58880", "66799", "74718", "82637", "90556", "98475", "06391", "14310", "22229", "30148", "38067", "45986", "53905", "61824", "69743", "77662", "85581", "93500", "01416", "09335", "17254", "25173", "33092", "41011", "48930", "56849", "64768", "72687", "80606", "88525", "96444", "04360", "12279", "20198", "28117", "36036", "43955", "51874", "59793", "67712", "75631", "83550", "91469", "99388", "07304", "15223", "23142", "31061", "38980", "46899", "54818", "62737", "70656", "78575", "86494", "94413", "02329", "10248", "18167", "26086"]}', NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-28 20:17:52.328459+00');
INSERT INTO public.outbox_20261128 VALUES ('01a223ce-9ad6-7567-ad1a-bd4cfd340f54', 16, '23', 'order', 'replayed', 'order.placed', '{"noise": ["00000", "07919", "15838", "23757", "31676", "39595", "47514", "55433", "63352", "71271", "79190", "87109", "95028", "02944", "10863", "18782", "26701", "34620", "42539", "50458", "58377", "66296", "74215", "82134", "90053", "97972", "05888", "13807", "21726", "29645", "37564", "45483", "53402", "61321", "69240", "77159", "85078", "92997", "00913", "08832", "16751", "24670", "32589", "40508", "48427", "56346", "64265", "72184", "80103", "88022", "95941", "03857", "11776", "19695", "27614", "35533", "43452", "51371", "59290", "67209", "75128", "83047", "90966", "98885", "06801", "14720", "22639", "30558", "38477", "46396", "54315", "62234", "70153", "78072", "85991", "93910", "01826", "09745", "17664", "25583", "33502", "41421", "49340", "57259", "65178", "73097", "81016", "88935", "96854", "04770", "12689", "20608", "28527", "36446", "44365", "52284", "60203", "68122", "76041", "83960", "91879", "99798", "07714", "15633", "23552", "31471", "39390", "47309", "55228", "63147", "71066", "78985", "86904", "94823", "02739", "10658", "18577", "26496", "34415", "42334", "50253", "58172", "66091", "74010", "81929", "89848", "97767", "05683", "13602", "21521", "29440", "37359", "45278", "53197", "61116", "69035", "76954", "84873", "92792", "00708", "08627", "16546", "24465", "32384", "40303", "48222", "56141", "64060", "71979", "79898", "87817", "95736", "03652", "11571", "19490", "27409", "35328", "43247", "51166", "59085", "67004", "74923", "82842", "90761", "98680", "06596", "14515", "22434", "30353", "38272", "46191", "54110", "62029", "69948", "77867", "85786", "93705", "01621", "09540", "17459", "25378", "33297", "41216", "49135", "57054", "64973", "72892", "80811", "88730", "96649", "04565", "12484", "20403", "28322", "36241", "44160", "52079", "59998", "67917", "75836", "83755", "91674", "99593", "07509", "15428", "23347", "31266", "39185", "47104", "55023", "62942", "70861", "78780", "86699", "94618", "02534", "10453", "18372", "26291", "34210", "42129", "50048", "57967", "65886", "73805", "81724", "89643", "97562", "05478", "13397", "21316", "29235", "37154", "45073", "52992", "60911", "68830", "76749", "84668", "92587", "00503", "08422", "16341", "24260", "32179", "40098", "48017", "55936", "63855", "71774", "79693", "87612", "95531", "03447", "11366", "19285", "27204", "35123", "43042", "50961", "58880", "66799", "74718", "82637", "90556", "98475", "06391", "14310", "22229", "30148", "38067", "45986", "53905", "61824", "69743", "77662", "85581", "93500", "01416", "09335", "17254", "25173", "33092", "41011", "48930", "56849", "64768", "72687", "80606", "88525", "96444", "04360", "12279", "20198", "28117", "36036", "43955", "51874", "59793", "67712", "75631", "83550", "91469", "99388", "07304", "15223", "23142", "31061", "38980", "46899", "54818", "62737", "70656", "78575", "86494", "94413", "02329", "10248", "18167", "26086"]}', NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-28 20:17:52.328459+00');
INSERT INTO public.outbox_20261128 VALUES ('01a223ce-a0d0-75d5-80cd-31337c58493d', 17, '24', 'order', 'waiting', 'order.placed', '{"noise": ["00000", "07919", "15838", "23757", "31676", "39595", "47514", "55433", "63352", "71271", "79190", "87109", "95028", "02944", "10863", "18782", "26701", "34620", "42539", "50458", "58377", "66296", "74215", "82134", "90053", "97972", "05888", "13807", "21726", "29645", "37564", "45483", "53402", "61321", "69240", "77159", "85078", "92997", "00913", "08832", "16751", "24670", "32589", "40508", "48427", "56346", "64265", "72184", "80103", "88022", "95941", "03857", "11776", "19695", "27614", "35533", "43452", "51371", "59290", "67209", "75128", "83047", "90966", "98885", "06801", "14720", "22639", "30558", "38477", "46396", "54315", "62234", "70153", "78072", "85991", "93910", "01826", "09745", "17664", "25583", "33502", "41421", "49340", "57259", "65178", "73097", "81016", "88935", "96854", "04770", "12689", "20608", "28527", "36446", "44365", "52284", "60203", "68122", "76041", "83960", "91879", "99798", "07714", "15633", "23552", "31471", "39390", "47309", "55228", "63147", "71066", "78985", "86904", "94823", "02739", "10658", "18577", "26496", "34415", "42334", "50253", "58172", "66091", "74010", "81929", "89848", "97767", "05683", "13602", "21521", "29440", "37359", "45278", "53197", "61116", "69035", "76954", "84873", "92792", "00708", "08627", "16546", "24465", "32384", "40303", "48222", "56141", "64060", "71979", "79898", "87817", "95736", "03652", "11571", "19490", "27409", "35328", "43247", "51166", "59085", "67004", "74923", "82842", "90761", "98680", "06596", "14515", "22434", "30353", "38272", "46191", "54110", "62029", "69948", "77867", "85786", "93705", "01621", "09540", "17459", "25378", "33297", "41216", "49135", "57054", "64973", "72892", "80811", "88730", "96649", "04565", "12484", "20403", "28322", "36241", "44160", "52079", "59998", "67917", "75836", "83755", "91674", "99593", "07509", "15428", "23347", "31266", "39185", "47104", "55023", "62942", "70861", "78780", "86699", "94618", "02534", "10453", "18372", "26291", "34210", "42129", "50048", "57967", "65886", "73805", "81724", "89643", "97562", "05478", "13397", "21316", "29235", "37154", "45073", "52992", "60911", "68830", "76749", "84668", "92587", "00503", "08422", "16341", "24260", "32179", "40098", "48017", "55936", "63855", "71774", "79693", "87612", "95531", "03447", "11366", "19285", "27204", "35123", "43042", "50961", "58880", "66799", "74718", "82637", "90556", "98475", "06391", "14310", "22229", "30148", "38067", "45986", "53905", "61824", "69743", "77662", "85581", "93500", "01416", "09335", "17254", "25173", "33092", "41011", "48930", "56849", "64768", "72687", "80606", "88525", "96444", "04360", "12279", "20198", "28117", "36036", "43955", "51874", "59793", "67712", "75631", "83550", "91469", "99388", "07304", "15223", "23142", "31061", "38980", "46899", "54818", "62737", "70656", "78575", "86494", "94413", "02329", "10248", "18167", "26086"]}', NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-28 20:17:53.87076+00');
INSERT INTO public.outbox_20261128 VALUES ('01a223ce-a0d6-7ef6-848c-a1271047c8fb', 18, '24', 'order', 'waiting', 'order.placed', '{"n": 1}', NULL, 'key-1', NULL, NULL, NULL, 2, '2026-11-28 20:17:53.87076+00');
INSERT INTO public.outbox_20261128 VALUES ('01a223ce-a5d5-7d39-916f-635992f2f235', 23, '27', 'order', 'unpublished', 'order.placed', '{"n": 1}', NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-28 20:17:55.146995+00');
INSERT INTO public.outbox_20261128 VALUES ('01a223ce-a625-7b6a-aad9-96ff06a32dc8', 25, '28', 'customer', 'ann', 'customer.moved', '{"email": "outbox-encrypted:1:b5f99961-4451-4d20-a60e-45faba7f61bb:o1z-EjrAc0GMZWQMopSJ-2Ve3x6LgOsn_jADtpI47MNIxUY2oGBeEEcstUU9"}', NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-28 20:17:55.218864+00');
INSERT INTO public.outbox_20261128 VALUES ('01a223ce-a632-7b77-a40b-3ba608239932', 27, '28', 'customer', 'bob', 'customer.moved', '{"email": "outbox-encrypted:1:aa7d5bdd-d7e5-4076-a4cf-426ee1a5a1a0:QwRAnM3GGtOhu354RwvpuxtrMj9MjmrvzG3cT0ylT-HanROgFUkX7PIMs0GP"}', NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-28 20:17:55.218864+00');


INSERT INTO public.outbox_audit OVERRIDING SYSTEM VALUE VALUES (1, '2026-11-28 20:16:57.443945+00', 'postgres', NULL, 'shards', 'from 1 to 2 shards', '{}', '{}');
INSERT INTO public.outbox_audit OVERRIDING SYSTEM VALUE VALUES (2, '2026-11-28 20:17:53.694345+00', 'postgres', 'ann@example', 'discard', 'a test', '{"aggregate_id": "discarded"}', '{15}');
INSERT INTO public.outbox_audit OVERRIDING SYSTEM VALUE VALUES (3, '2026-11-28 20:17:53.840671+00', 'postgres', 'ann@example', 'replay', 'a test', '{"aggregate_id": "replayed"}', '{16}');
INSERT INTO public.outbox_days VALUES ('2026-11-27', 'open', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.outbox_days VALUES ('2026-11-28', 'open', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.outbox_days VALUES ('2026-11-26', 'open', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.outbox_days VALUES ('2026-11-23', 'dropped', '2026-11-28 20:17:02.83369+00', '2026-11-28 20:17:02.839206+00', '14:14:', '2026-11-28 20:17:03.640952+00', '2026-11-28 20:17:04.117936+00', '2026-11-28 20:17:04.117936+00', 3, 3, 'f1f6879e4d27654b26667424125be3b273ba74bef9eb5f750e09b4f03a8a4d36', '2e5e20b0-3799-4186-948f-971fd0285e5c');
INSERT INTO public.outbox_days VALUES ('2026-11-25', 'closed', '2026-11-28 20:17:04.533262+00', '2026-11-28 20:17:04.56357+00', '16:16:', NULL, NULL, NULL, 9, NULL, NULL, NULL);
INSERT INTO public.outbox_days VALUES ('2026-11-24', 'archived', '2026-11-28 20:17:04.283305+00', '2026-11-28 20:17:04.329804+00', '15:15:', '2026-11-28 20:17:07.721364+00', '2026-11-28 20:17:40.32696+00', NULL, 6, 3, '9f4b376b27160c339af0660fd2515d94d3c395da547e0378243050b8d02bd6d1', '2e5e20b0-3799-4186-948f-971fd0285e5c');
INSERT INTO public.outbox_delayed VALUES ('9ac59014-9507-49df-adbb-3159d0704595', 19, '27', 'order', 'far', 'order.placed', '{"n": 1}', NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-28 20:17:55.146995+00', '2036-11-25 20:17:55.146995+00', '2036-11-25 20:17:55.146995+00', true, NULL, NULL);
INSERT INTO public.outbox_delayed VALUES ('01a223ce-a5d3-70b6-8524-d6d0c61423b6', 20, '27', 'order', 'far', 'order.placed', '{"n": 2}', NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-28 20:17:55.146995+00', NULL, '2036-11-25 20:17:55.146995+00', true, NULL, NULL);
INSERT INTO public.outbox_delayed VALUES ('496dc034-30fa-4d10-b429-41dc1782b04e', 21, '27', 'order', 'due', 'order.placed', '{"n": 1}', NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-28 20:17:55.146995+00', '2026-11-28 20:17:56.146995+00', '2026-11-28 20:17:56.146995+00', false, NULL, NULL);
INSERT INTO public.outbox_keys VALUES ('be297454-6978-e373-9e6d-6da85c4be9f3', '01a223ce-a0d6-7ef6-848c-a1271047c8fb', '2026-11-28 20:17:53.87076+00');
INSERT INTO public.outbox_migrations VALUES ('0001_outbox', '2026-11-28 20:16:52.598319+00', NULL, NULL);
INSERT INTO public.outbox_migrations VALUES ('0002_beside', '2026-11-28 20:16:52.598319+00', NULL, NULL);
INSERT INTO public.outbox_migrations VALUES ('0003_guards', '2026-11-28 20:16:52.598319+00', NULL, NULL);
INSERT INTO public.outbox_migrations VALUES ('0004_emit', '2026-11-28 20:16:52.598319+00', NULL, NULL);
INSERT INTO public.outbox_migrations VALUES ('0005_partitions', '2026-11-28 20:16:52.598319+00', NULL, NULL);
INSERT INTO public.outbox_migrations VALUES ('0006_events_view', '2026-11-28 20:16:52.598319+00', NULL, NULL);
INSERT INTO public.outbox_migrations VALUES ('0007_actions', '2026-11-28 20:16:52.598319+00', NULL, NULL);
INSERT INTO public.outbox_migrations VALUES ('0008_roles', '2026-11-28 20:16:52.598319+00', NULL, NULL);
INSERT INTO public.outbox_migrations VALUES ('0009_adopted', '2026-11-28 20:16:52.598319+00', NULL, '{"column outbox.aggregate_id text not null","column outbox.aggregate_type text not null","column outbox.causation_id text","column outbox.correlation_id text","column outbox.created_at timestamp with time zone not null default now()","column outbox.event_type text not null","column outbox.headers jsonb","column outbox.id uuid not null default uuidv7()","column outbox.idempotency_key text","column outbox.payload jsonb not null","column outbox.seq bigint not null default nextval(''outbox_seq''::regclass)","column outbox.traceparent text","column outbox.tx xid8 not null default pg_current_xact_id()","column outbox.version integer","column outbox_adopted.accepted text[] not null default ''{}''::text[]","column outbox_adopted.file text","column outbox_adopted.kept_as name not null","column outbox_adopted.name name not null","column outbox_adopted.proven_at timestamp with time zone","column outbox_adopted.relation oid not null","column outbox_adopted.returned pg_snapshot","column outbox_adopted.schema name not null","column outbox_adopted.slot name","column outbox_adopted.state text not null default ''prepared''::text","column outbox_adopted.switched_at timestamp with time zone","column outbox_adopted.switched_lsn pg_lsn","column outbox_archive_changes.at timestamp with time zone not null","column outbox_archive_changes.changed_by text not null","column outbox_archive_changes.day date not null","column outbox_archive_changes.events bigint not null","column outbox_archive_changes.former_deleted_at timestamp with time zone","column outbox_archive_changes.former_manifest_sha256 text not null","column outbox_archive_changes.former_sha256 text not null","column outbox_archive_changes.kind text not null","column outbox_archive_changes.manifest_sha256 text not null","column outbox_archive_changes.names text[] not null","column outbox_archive_changes.reason text not null","column outbox_archive_changes.rows_after bigint not null","column outbox_archive_changes.rows_before bigint not null","column outbox_audit.action text not null","column outbox_audit.actor name not null default SESSION_USER","column outbox_audit.at timestamp with time zone not null default clock_timestamp()","column outbox_audit.events bigint[] not null","column outbox_audit.filter jsonb not null","column outbox_audit.number bigint not null identity","column outbox_audit.on_behalf_of text","column outbox_audit.reason text not null","column outbox_days.archive uuid","column outbox_days.archived_at timestamp with time zone","column outbox_days.closed_at timestamp with time zone","column outbox_days.day date not null","column outbox_days.dropped_at timestamp with time zone","column outbox_days.events bigint","column outbox_days.last_seq bigint","column outbox_days.manifest_sha256 text","column outbox_days.proven_at timestamp with time zone","column outbox_days.published pg_snapshot","column outbox_days.sealed_at timestamp with time zone","column outbox_days.state text not null default ''open''::text","column outbox_delayed.aggregate_id text not null","column outbox_delayed.aggregate_type text not null","column outbox_delayed.causation_id text","column outbox_delayed.correlation_id text","column outbox_delayed.created_at timestamp with time zone not null default now()","column outbox_delayed.deliver_after timestamp with time zone","column outbox_delayed.due timestamp with time zone not null","column outbox_delayed.event_type text not null","column outbox_delayed.headers jsonb","column outbox_delayed.id uuid not null default uuidv7()","column outbox_delayed.idempotency_key text","column outbox_delayed.last_error text","column outbox_delayed.later_events_wait boolean not null","column outbox_delayed.payload jsonb not null","column outbox_delayed.retry_at timestamp with time zone","column outbox_delayed.seq bigint not null default nextval(''outbox_seq''::regclass)","column outbox_delayed.traceparent text","column outbox_delayed.tx xid8 not null default pg_current_xact_id()","column outbox_delayed.version integer","column outbox_keys.created_at timestamp with time zone not null default now()","column outbox_keys.event_id uuid not null","column outbox_keys.key uuid not null","column outbox_migrations.applied_at timestamp with time zone not null default now()","column outbox_migrations.description text[]","column outbox_migrations.name text not null","column outbox_migrations.needs text","column outbox_parked.aggregate_id text not null","column outbox_parked.aggregate_type text not null","column outbox_parked.attempts integer not null default 0","column outbox_parked.causation_id text","column outbox_parked.command_due boolean not null default false","column outbox_parked.correlation_id text","column outbox_parked.crashes integer not null default 0","column outbox_parked.created_at timestamp with time zone not null","column outbox_parked.event_type text not null","column outbox_parked.failed_at timestamp with time zone","column outbox_parked.headers jsonb","column outbox_parked.id uuid not null","column outbox_parked.idempotency_key text","column outbox_parked.last_error text","column outbox_parked.next_attempt_at timestamp with time zone","column outbox_parked.parked_at timestamp with time zone not null default now()","column outbox_parked.payload jsonb not null","column outbox_parked.seq bigint not null","column outbox_parked.state text not null","column outbox_parked.traceparent text","column outbox_parked.trying boolean not null default false","column outbox_parked.tx xid8 not null","column outbox_parked.version integer","column outbox_progress.at timestamp with time zone not null default clock_timestamp()","column outbox_progress.done pg_snapshot not null","column outbox_progress.events bigint not null","column outbox_progress.last_seq bigint","column outbox_progress.latency double precision","column outbox_progress.shard integer not null","column outbox_progress.shards integer not null default 1","column outbox_progress.target pg_snapshot","column outbox_released.attempts integer not null","column outbox_released.id uuid not null","column outbox_released.published_at timestamp with time zone not null default clock_timestamp()","column outbox_released.seq bigint not null","column outbox_replays.actor name not null default SESSION_USER","column outbox_replays.error text","column outbox_replays.events bigint not null","column outbox_replays.files jsonb not null","column outbox_replays.id uuid not null default uuidv7()","column outbox_replays.last_seq bigint not null","column outbox_replays.notes text[] not null","column outbox_replays.on_behalf_of text","column outbox_replays.position bigint not null default 0","column outbox_replays.progress_at timestamp with time zone not null default clock_timestamp()","column outbox_replays.reason text not null","column outbox_replays.selection jsonb not null","column outbox_replays.sent bigint not null default 0","column outbox_replays.started_at timestamp with time zone not null default clock_timestamp()","column outbox_replays.state text not null default ''running''::text","column outbox_replays.target text not null","column outbox_shards.barrier pg_snapshot","column outbox_shards.barrier_paused boolean not null default false","column outbox_shards.barrier_reached boolean not null default false","column outbox_shards.breaker text not null default ''closed''::text","column outbox_shards.breaker_reason text","column outbox_shards.crash_guard_crashes integer not null default 0","column outbox_shards.crash_guard_seq bigint","column outbox_shards.crashes integer not null default 0","column outbox_shards.database oid not null","column outbox_shards.done pg_snapshot not null","column outbox_shards.epoch bigint not null default 0","column outbox_shards.heartbeat timestamp with time zone","column outbox_shards.last_seq bigint","column outbox_shards.owned_since timestamp with time zone","column outbox_shards.owner text","column outbox_shards.pid integer","column outbox_shards.shard integer not null","column outbox_shards.shards integer not null default 1","column outbox_shards.slot text","column outbox_shards.slot_ends boolean not null default false","column outbox_shards.slot_error text","column outbox_shards.slot_snapshot pg_snapshot","column outbox_shards.system_identifier bigint not null","column outbox_shards.target pg_snapshot","column outbox_shards.tick_id uuid","column outbox_shards.top_up_error text","column outbox_shards.wanted integer","column outbox_shards.wanted_at timestamp with time zone","column outbox_writers.aggregate_types text[]","column outbox_writers.key_namespace text","column outbox_writers.writer name not null","constraint outbox.outbox_pkey PRIMARY KEY (id, created_at)","constraint outbox_adopted.outbox_adopted_pkey PRIMARY KEY (relation)","constraint outbox_adopted.outbox_adopted_state_check CHECK (state = ANY (ARRAY[''prepared''::text, ''draining''::text, ''adopted''::text, ''returning''::text, ''finished''::text]))","constraint outbox_archive_changes.outbox_archive_changes_kind_check CHECK (kind = ANY (ARRAY[''redacted''::text, ''expired''::text]))","constraint outbox_archive_changes.outbox_archive_changes_pkey PRIMARY KEY (manifest_sha256)","constraint outbox_archive_changes.outbox_archive_changes_reason_check CHECK (reason <> ''''::text)","constraint outbox_audit.outbox_audit_action_check CHECK (action = ANY (ARRAY[''replay''::text, ''discard''::text, ''shards''::text, ''cancel''::text]))","constraint outbox_audit.outbox_audit_pkey PRIMARY KEY (number)","constraint outbox_audit.outbox_audit_reason_check CHECK (reason <> ''''::text)","constraint outbox_days.outbox_days_closed CHECK (state = ''open''::text OR closed_at >= sealed_at)","constraint outbox_days.outbox_days_pkey PRIMARY KEY (day)","constraint outbox_days.outbox_days_state_check CHECK (state = ANY (ARRAY[''open''::text, ''closed''::text, ''archived''::text, ''dropped''::text]))","constraint outbox_delayed.outbox_delayed_pkey PRIMARY KEY (seq)","constraint outbox_keys.outbox_keys_pkey PRIMARY KEY (key)","constraint outbox_migrations.outbox_migrations_pkey PRIMARY KEY (name)","constraint outbox_parked.outbox_parked_attempts_check CHECK (attempts >= 0)","constraint outbox_parked.outbox_parked_pkey PRIMARY KEY (seq)","constraint outbox_parked.outbox_parked_state_check CHECK (state = ANY (ARRAY[''waiting''::text, ''retrying''::text, ''failed''::text, ''replaying''::text, ''discarded''::text]))","constraint outbox_progress.outbox_progress_events_check CHECK (events > 0)","constraint outbox_progress.outbox_progress_pkey PRIMARY KEY (shard, at)","constraint outbox_released.outbox_released_pkey PRIMARY KEY (seq, id)","constraint outbox_replays.outbox_replays_pkey PRIMARY KEY (id)","constraint outbox_replays.outbox_replays_reason_check CHECK (reason <> ''''::text)","constraint outbox_replays.outbox_replays_state_check CHECK (state = ANY (ARRAY[''running''::text, ''stopped''::text, ''done''::text, ''canceled''::text]))","constraint outbox_shards.outbox_shards_breaker_check CHECK (breaker = ANY (ARRAY[''closed''::text, ''open''::text, ''half-open''::text]))","constraint outbox_shards.outbox_shards_check CHECK (shards > shard)","constraint outbox_shards.outbox_shards_pkey PRIMARY KEY (shard)","constraint outbox_shards.outbox_shards_shard_check CHECK (shard >= 0)","constraint outbox_shards.outbox_shards_slot CHECK (slot IS NOT NULL OR NOT slot_ends AND num_nonnulls(slot_snapshot, slot_error) = 0)","constraint outbox_shards.outbox_shards_tick CHECK ((target IS NULL) = (last_seq IS NULL))","constraint outbox_shards.outbox_shards_wanted_check CHECK (wanted > 0)","constraint outbox_writers.outbox_writers_are_restricted CHECK (num_nonnulls(aggregate_types, key_namespace) > 0)","constraint outbox_writers.outbox_writers_key_namespace_check CHECK (key_namespace <> ''''::text)","constraint outbox_writers.outbox_writers_pkey PRIMARY KEY (writer)","function outbox_act(action text, seqs bigint[], reason text, filter jsonb, on_behalf_of text) 9708ff88c8a08f0829ca8ee13557a7ad","function outbox_cancel(id uuid) c8c68c557e8fd8f1f88fa19aa6b468e9","function outbox_cancel_delayed(ids uuid[], reason text, on_behalf_of text) 6504fd0a48986ec45c2e6951b62c8423","function outbox_change_shards(wanted integer, started boolean, on_behalf_of text, OUT step text, OUT missing text) e18e889742aade9fb19ebb08b6f43230","function outbox_check_row() 50f15c22567502e7bd4038b8adc04575","function outbox_claim_and_wait() 5ac62904d17f150f59da22068ff2851a","function outbox_claim_keys(keys uuid[], tell_time boolean, OUT ids uuid[], OUT are_new boolean[]) a9aff16375d8d01bbc278fa1e3cc7310","function outbox_columns(relation regclass, VARIADIC without text[] DEFAULT ''{}''::text[]) 8599b6a2b349e0745eb5be5bcb3bd74f","function outbox_counter(drawn uuid) 7c507312d218b3cc2aebc3232072be2a","function outbox_covers(done pg_snapshot, target pg_snapshot, last_seq bigint, tx xid8, seq bigint) a7d90ccaef64f1a10c4f25f7aee218de","function outbox_delay(INOUT id uuid, aggregate_type text, aggregate_id text, event_type text, payload jsonb, headers jsonb, idempotency_key text, correlation_id text, causation_id text, traceparent text, version integer, deliver_after timestamp with time zone, later_events_wait boolean) efb0a6ca0de9023e04df978f0c289668","function outbox_due(deliver_after text) 7ae71b02358e5262cae86aad43ffa318","function outbox_emit(aggregate_type text, aggregate_id text, event_type text, payload jsonb, headers jsonb DEFAULT NULL::jsonb, idempotency_key text DEFAULT NULL::text, correlation_id text DEFAULT NULL::text, causation_id text DEFAULT NULL::text, traceparent text DEFAULT NULL::text, version integer DEFAULT NULL::integer, deliver_after timestamp with time zone DEFAULT NULL::timestamp with time zone, later_events_wait boolean DEFAULT false, OUT id uuid, OUT seq bigint, OUT duplicate boolean) 3b82e742835e48693c59caa6817ced83","function outbox_emit_keyed_lists(aggregate_types text, aggregate_ids text, event_types text, payloads text, headers text, idempotency_keys text, correlation_ids text, causation_ids text, traceparents text, versions text) 1994436566720b87eed0224360cdb033","function outbox_emit_lists(aggregate_types text, aggregate_ids text, event_types text, payloads text, headers text, correlation_ids text, causation_ids text, traceparents text, versions text) b89f7e540095dfe69fdf548b2cb59ae6","function outbox_emit_many(events jsonb) 2e76c1116ffed4d21f95dcccc2373e8c","function outbox_ensure_partitions(days_ahead integer DEFAULT 14, since date DEFAULT NULL::date) 198cf6721969f4f31729061597103d15","function outbox_event_of_key(wanted uuid) 54e5a952cbbe8218ea276abb3ac09065","function outbox_grant_analyst(analyst regrole) bbaa270d35507f4ca1165e1e606181ba","function outbox_grant_operator(operator regrole) c305ff628da764b3ba5c04d211fbea51","function outbox_grant_relay(relay regrole) d89b21e9499f4cd5d5c766a9c1d3210f","function outbox_grant_writer(writer regrole, aggregate_types text[] DEFAULT NULL::text[], key_namespace text DEFAULT NULL::text, own_ids boolean DEFAULT false) 47214b3bf7e34995c7d793db59e39c6e","function outbox_is_moving(id uuid) 887d488250c19f1d86d5c49ebd427090","function outbox_keep_shards() 02561bfef2dd0bf794662bd50a0625d0","function outbox_key(idempotency_key text, namespace text DEFAULT NULL::text) bfd77c250983ea0f66378f1492ce27ab","function outbox_key_namespace(writer name) f60df89badc70edab30e28c8cfaf0a10","function outbox_last_seq() 0e641de1515bb1902296ecd5dd0ba474","function outbox_may_write(writer name, aggregate_type text) 90fcba6130b9f8f05dadf4f46bb381bb","function outbox_move(seqs bigint[]) 11d8f7ca1c86ba493b0745e2645082ce","function outbox_move_due(most integer DEFAULT 500, again boolean DEFAULT false) be05d62798a7bd3b5c6f398ac2bd2e9f","function outbox_nth_id(digits text, counter bigint) 104ede45ee4ff48f7a74665367349841","function outbox_open_from() 1776f86eac9571e56fd457c669397257","function outbox_owner_declared(relation oid, setting text) d0a8a7eab2253c44e0e0f16560a698aa","function outbox_park(seqs bigint[], states text[], errors text[], start timestamp with time zone, stop timestamp with time zone, first bigint, last bigint, OUT present bigint, OUT twice bigint) 79ede3e9e58e52571c3ba3072005a809","function outbox_protect_functions() 23d7f6458f3a1c579ba6c6a4da54ab81","function outbox_refuse_action() 0976a4b8ddc44ee1a5189a7566d4c244","function outbox_refuse_change() aa60e9bd9a073fb492cb0d0983d069ae","function outbox_refuse_late_insert() a211c2766b4047f2506158c53e7d2f8a","function outbox_refuse_type(writer name, aggregate_type text) 9fcfe4c4b7281e67fee12d56ed684abd","function outbox_release(seqs bigint[]) 563d52be51c871aef4768a82f802c81c","function outbox_replay_advance(replay uuid, seq bigint, events bigint, state text, error text) 47ad4ef4618eecfb71f7f0e88128fea3","function outbox_replay_begin(selection jsonb, target text, files jsonb, events bigint, last_seq bigint, reason text, on_behalf_of text, notes text[] DEFAULT ''{}''::text[]) 6faaca704c8df4ef1a1553d4ca2378a2","function outbox_require_grants(grantee regrole, readable text[], callable text[]) 4c14f5f54b8d5107b33ef8c519ba3083","function outbox_shard_of(aggregate_type text, aggregate_id text, shards integer) 593208d1ccf0aac1fa976303f871cdbd","function outbox_take_back(wanted uuid) 95abf84596948e8f2a2607f1754e2593","function outbox_unrestricted() d92c2f6fb4edd6de244af80b16c4f87c","function outbox_uuidv7() 1879dc8f38666a628c89fe9f08f18800","function outbox_waits_until(aggregate_type text, aggregate_id text) 9c044635755396195a1ef6b74d6f7257","function outbox_writer() 40cb3014591b6724e0d952662f905d01","index outbox_adopted_one CREATE UNIQUE INDEX outbox_adopted_one ON outbox_adopted USING btree ((true))","index outbox_adopted_pkey CREATE UNIQUE INDEX outbox_adopted_pkey ON outbox_adopted USING btree (relation)","index outbox_aggregate CREATE INDEX outbox_aggregate ON ONLY outbox USING brin (aggregate_id text_bloom_ops) WITH (pages_per_range=''32'')","index outbox_archive_changes_pkey CREATE UNIQUE INDEX outbox_archive_changes_pkey ON outbox_archive_changes USING btree (manifest_sha256)","index outbox_audit_pkey CREATE UNIQUE INDEX outbox_audit_pkey ON outbox_audit USING btree (number)","index outbox_days_pkey CREATE UNIQUE INDEX outbox_days_pkey ON outbox_days USING btree (day)","index outbox_delayed_due CREATE INDEX outbox_delayed_due ON outbox_delayed USING btree (due, seq)","index outbox_delayed_id CREATE INDEX outbox_delayed_id ON outbox_delayed USING btree (id)","index outbox_delayed_pkey CREATE UNIQUE INDEX outbox_delayed_pkey ON outbox_delayed USING btree (seq)","index outbox_delayed_stuck CREATE INDEX outbox_delayed_stuck ON outbox_delayed USING btree (hashtextextended(aggregate_id, 0::bigint)) WHERE later_events_wait AND retry_at IS NOT NULL","index outbox_delayed_waited_for CREATE INDEX outbox_delayed_waited_for ON outbox_delayed USING btree (hashtextextended(aggregate_id, 0::bigint), due) WHERE later_events_wait","index outbox_keys_pkey CREATE UNIQUE INDEX outbox_keys_pkey ON outbox_keys USING btree (key)","index outbox_migrations_pkey CREATE UNIQUE INDEX outbox_migrations_pkey ON outbox_migrations USING btree (name)","index outbox_parked_commands CREATE INDEX outbox_parked_commands ON outbox_parked USING btree (failed_at) WHERE command_due","index outbox_parked_failed CREATE INDEX outbox_parked_failed ON outbox_parked USING btree (failed_at) WHERE state = ANY (ARRAY[''failed''::text, ''replaying''::text])","index outbox_parked_id CREATE INDEX outbox_parked_id ON outbox_parked USING btree (id)","index outbox_parked_order CREATE INDEX outbox_parked_order ON outbox_parked USING btree (hashtextextended(aggregate_id, 0::bigint), seq)","index outbox_parked_pkey CREATE UNIQUE INDEX outbox_parked_pkey ON outbox_parked USING btree (seq)","index outbox_parked_suspects CREATE INDEX outbox_parked_suspects ON outbox_parked USING btree (hashtextextended(aggregate_id, 0::bigint), seq) WHERE state <> ''waiting''::text","index outbox_parked_trying CREATE INDEX outbox_parked_trying ON outbox_parked USING btree (seq) WHERE trying","index outbox_pkey CREATE UNIQUE INDEX outbox_pkey ON ONLY outbox USING btree (id, created_at)","index outbox_progress_pkey CREATE UNIQUE INDEX outbox_progress_pkey ON outbox_progress USING btree (shard, at)","index outbox_released_pkey CREATE UNIQUE INDEX outbox_released_pkey ON outbox_released USING btree (seq, id)","index outbox_replays_pkey CREATE UNIQUE INDEX outbox_replays_pkey ON outbox_replays USING btree (id)","index outbox_seq_order CREATE INDEX outbox_seq_order ON ONLY outbox USING btree (seq, (hashtextextended(aggregate_id, hashtext(aggregate_type)::bigint) + 0))","index outbox_shards_pkey CREATE UNIQUE INDEX outbox_shards_pkey ON outbox_shards USING btree (shard)","index outbox_tx CREATE INDEX outbox_tx ON ONLY outbox USING btree (tx, seq, hashtextextended(aggregate_id, hashtext(aggregate_type)::bigint))","index outbox_writers_pkey CREATE UNIQUE INDEX outbox_writers_pkey ON outbox_writers USING btree (writer)","row security of outbox: off","row security of outbox_adopted: off","row security of outbox_archive_changes: off","row security of outbox_audit: off","row security of outbox_days: off","row security of outbox_delayed: off","row security of outbox_keys: off","row security of outbox_migrations: off","row security of outbox_parked: off","row security of outbox_progress: off","row security of outbox_released: off","row security of outbox_replays: off","row security of outbox_shards: off","row security of outbox_writers: off","rules of outbox: none","rules of outbox_adopted: none","rules of outbox_archive_changes: none","rules of outbox_audit: none","rules of outbox_days: none","rules of outbox_delayed: none","rules of outbox_keys: none","rules of outbox_migrations: none","rules of outbox_parked: none","rules of outbox_progress: none","rules of outbox_released: none","rules of outbox_replays: none","rules of outbox_shards: none","rules of outbox_writers: none","sequence outbox_audit_number_seq bigint increment 1 cache 1","sequence outbox_has_waited bigint increment 1 cache 1","sequence outbox_seq bigint increment 1 cache 1","server 18 form d16df4df","table outbox","table outbox_adopted","table outbox_archive_changes","table outbox_audit","table outbox_days","table outbox_delayed","table outbox_keys","table outbox_migrations","table outbox_parked","table outbox_progress","table outbox_released","table outbox_replays","table outbox_shards","table outbox_writers","trigger outbox.outbox_append_only CREATE TRIGGER outbox_append_only BEFORE DELETE OR UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION outbox_refuse_change()","trigger outbox.outbox_checked CREATE TRIGGER outbox_checked BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION outbox_check_row()","trigger outbox.outbox_no_truncate CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON outbox FOR EACH STATEMENT EXECUTE FUNCTION outbox_refuse_change()","trigger outbox.outbox_unique_and_waiting CREATE TRIGGER outbox_unique_and_waiting BEFORE INSERT ON outbox FOR EACH ROW WHEN (new.idempotency_key IS NOT NULL OR pg_sequence_last_value(''outbox_has_waited''::regclass) IS NOT NULL) EXECUTE FUNCTION outbox_claim_and_wait()","trigger outbox_delayed.outbox_checked CREATE TRIGGER outbox_checked BEFORE INSERT ON outbox_delayed FOR EACH ROW EXECUTE FUNCTION outbox_check_row()","trigger outbox_parked.outbox_kept CREATE TRIGGER outbox_kept BEFORE UPDATE OF state ON outbox_parked FOR EACH ROW WHEN (old.state <> new.state AND ((old.state = ANY (ARRAY[''failed''::text, ''discarded''::text])) OR (new.state = ANY (ARRAY[''replaying''::text, ''discarded''::text])))) EXECUTE FUNCTION outbox_refuse_action()","view outbox_events cf3accdf087b85e39ef2444c94e5e955"}');
INSERT INTO public.outbox_parked VALUES ('01a223ce-9acb-7ee6-9c2c-35edc4062822', 14, '23', 'order', 'dead', 'order.placed', '{"noise": ["00000", "07919", "15838", "23757", "31676", "39595", "47514", "55433", "63352", "71271", "79190", "87109", "95028", "02944", "10863", "18782", "26701", "34620", "42539", "50458", "58377", "66296", "74215", "82134", "90053", "97972", "05888", "13807", "21726", "29645", "37564", "45483", "53402", "61321", "69240", "77159", "85078", "92997", "00913", "08832", "16751", "24670", "32589", "40508", "48427", "56346", "64265", "72184", "80103", "88022", "95941", "03857", "11776", "19695", "27614", "35533", "43452", "51371", "59290", "67209", "75128", "83047", "90966", "98885", "06801", "14720", "22639", "30558", "38477", "46396", "54315", "62234", "70153", "78072", "85991", "93910", "01826", "09745", "17664", "25583", "33502", "41421", "49340", "57259", "65178", "73097", "81016", "88935", "96854", "04770", "12689", "20608", "28527", "36446", "44365", "52284", "60203", "68122", "76041", "83960", "91879", "99798", "07714", "15633", "23552", "31471", "39390", "47309", "55228", "63147", "71066", "78985", "86904", "94823", "02739", "10658", "18577", "26496", "34415", "42334", "50253", "58172", "66091", "74010", "81929", "89848", "97767", "05683", "13602", "21521", "29440", "37359", "45278", "53197", "61116", "69035", "76954", "84873", "92792", "00708", "08627", "16546", "24465", "32384", "40303", "48222", "56141", "64060", "71979", "79898", "87817", "95736", "03652", "11571", "19490", "27409", "35328", "43247", "51166", "59085", "67004", "74923", "82842", "90761", "98680", "06596", "14515", "22434", "30353", "38272", "46191", "54110", "62029", "69948", "77867", "85786", "93705", "01621", "09540", "17459", "25378", "33297", "41216", "49135", "57054", "64973", "72892", "80811", "88730", "96649", "04565", "12484", "20403", "28322", "36241", "44160", "52079", "59998", "67917", "75836", "83755", "91674", "99593", "07509", "15428", "23347", "31266", "39185", "47104", "55023", "62942", "70861", "78780", "86699", "94618", "02534", "10453", "18372", "26291", "34210", "42129", "50048", "57967", "65886", "73805", "81724", "89643", "97562", "05478", "13397", "21316", "29235", "37154", "45073", "52992", "60911", "68830", "76749", "84668", "92587", "00503", "08422", "16341", "24260", "32179", "40098", "48017", "55936", "63855", "71774", "79693", "87612", "95531", "03447", "11366", "19285", "27204", "35123", "43042", "50961", "58880", "66799", "74718", "82637", "90556", "98475", "06391", "14310", "22229", "30148", "38067", "45986", "53905", "61824", "69743", "77662", "85581", "93500", "01416", "09335", "17254", "25173", "33092", "41011", "48930", "56849", "64768", "72687", "80606", "88525", "96444", "04360", "12279", "20198", "28117", "36036", "43955", "51874", "59793", "67712", "75631", "83550", "91469", "99388", "07304", "15223", "23142", "31061", "38980", "46899", "54818", "62737", "70656", "78575", "86494", "94413", "02329", "10248", "18167", "26086"]}', NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-28 20:17:52.328459+00', 'failed', 1, '2026-11-28 20:18:03.735946+00', 'MSG_SIZE_TOO_LARGE: larger than the topic''s max.message.bytes', '2026-11-28 20:17:52.915958+00', '2026-11-28 20:17:53.078259+00', false, 0, false);
INSERT INTO public.outbox_parked VALUES ('01a223ce-9ad4-7584-8479-75f6844045b7', 15, '23', 'order', 'discarded', 'order.placed', '{"noise": ["00000", "07919", "15838", "23757", "31676", "39595", "47514", "55433", "63352", "71271", "79190", "87109", "95028", "02944", "10863", "18782", "26701", "34620", "42539", "50458", "58377", "66296", "74215", "82134", "90053", "97972", "05888", "13807", "21726", "29645", "37564", "45483", "53402", "61321", "69240", "77159", "85078", "92997", "00913", "08832", "16751", "24670", "32589", "40508", "48427", "56346", "64265", "72184", "80103", "88022", "95941", "03857", "11776", "19695", "27614", "35533", "43452", "51371", "59290", "67209", "75128", "83047", "90966", "98885", "06801", "14720", "22639", "30558", "38477", "46396", "54315", "62234", "70153", "78072", "85991", "93910", "01826", "09745", "17664", "25583", "33502", "41421", "49340", "57259", "65178", "73097", "81016", "88935", "96854", "04770", "12689", "20608", "28527", "36446", "44365", "52284", "60203", "68122", "76041", "83960", "91879", "99798", "07714", "15633", "23552", "31471", "39390", "47309", "55228", "63147", "71066", "78985", "86904", "94823", "02739", "10658", "18577", "26496", "34415", "42334", "50253", "58172", "66091", "74010", "81929", "89848", "97767", "05683", "13602", "21521", "29440", "37359", "45278", "53197", "61116", "69035", "76954", "84873", "92792", "00708", "08627", "16546", "24465", "32384", "40303", "48222", "56141", "64060", "71979", "79898", "87817", "95736", "03652", "11571", "19490", "27409", "35328", "43247", "51166", "59085", "67004", "74923", "82842", "90761", "98680", "06596", "14515", "22434", "30353", "38272", "46191", "54110", "62029", "69948", "77867", "85786", "93705", "01621", "09540", "17459", "25378", "33297", "41216", "49135", "57054", "64973", "72892", "80811", "88730", "96649", "04565", "12484", "20403", "28322", "36241", "44160", "52079", "59998", "67917", "75836", "83755", "91674", "99593", "07509", "15428", "23347", "31266", "39185", "47104", "55023", "62942", "70861", "78780", "86699", "94618", "02534", "10453", "18372", "26291", "34210", "42129", "50048", "57967", "65886", "73805", "81724", "89643", "97562", "05478", "13397", "21316", "29235", "37154", "45073", "52992", "60911", "68830", "76749", "84668", "92587", "00503", "08422", "16341", "24260", "32179", "40098", "48017", "55936", "63855", "71774", "79693", "87612", "95531", "03447", "11366", "19285", "27204", "35123", "43042", "50961", "58880", "66799", "74718", "82637", "90556", "98475", "06391", "14310", "22229", "30148", "38067", "45986", "53905", "61824", "69743", "77662", "85581", "93500", "01416", "09335", "17254", "25173", "33092", "41011", "48930", "56849", "64768", "72687", "80606", "88525", "96444", "04360", "12279", "20198", "28117", "36036", "43955", "51874", "59793", "67712", "75631", "83550", "91469", "99388", "07304", "15223", "23142", "31061", "38980", "46899", "54818", "62737", "70656", "78575", "86494", "94413", "02329", "10248", "18167", "26086"]}', NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-28 20:17:52.328459+00', 'discarded', 1, '2026-11-28 20:18:02.917679+00', 'MSG_SIZE_TOO_LARGE: larger than the topic''s max.message.bytes', '2026-11-28 20:17:52.915958+00', '2026-11-28 20:17:53.078433+00', false, 0, false);
INSERT INTO public.outbox_parked VALUES ('01a223ce-9ad6-7567-ad1a-bd4cfd340f54', 16, '23', 'order', 'replayed', 'order.placed', '{"noise": ["00000", "07919", "15838", "23757", "31676", "39595", "47514", "55433", "63352", "71271", "79190", "87109", "95028", "02944", "10863", "18782", "26701", "34620", "42539", "50458", "58377", "66296", "74215", "82134", "90053", "97972", "05888", "13807", "21726", "29645", "37564", "45483", "53402", "61321", "69240", "77159", "85078", "92997", "00913", "08832", "16751", "24670", "32589", "40508", "48427", "56346", "64265", "72184", "80103", "88022", "95941", "03857", "11776", "19695", "27614", "35533", "43452", "51371", "59290", "67209", "75128", "83047", "90966", "98885", "06801", "14720", "22639", "30558", "38477", "46396", "54315", "62234", "70153", "78072", "85991", "93910", "01826", "09745", "17664", "25583", "33502", "41421", "49340", "57259", "65178", "73097", "81016", "88935", "96854", "04770", "12689", "20608", "28527", "36446", "44365", "52284", "60203", "68122", "76041", "83960", "91879", "99798", "07714", "15633", "23552", "31471", "39390", "47309", "55228", "63147", "71066", "78985", "86904", "94823", "02739", "10658", "18577", "26496", "34415", "42334", "50253", "58172", "66091", "74010", "81929", "89848", "97767", "05683", "13602", "21521", "29440", "37359", "45278", "53197", "61116", "69035", "76954", "84873", "92792", "00708", "08627", "16546", "24465", "32384", "40303", "48222", "56141", "64060", "71979", "79898", "87817", "95736", "03652", "11571", "19490", "27409", "35328", "43247", "51166", "59085", "67004", "74923", "82842", "90761", "98680", "06596", "14515", "22434", "30353", "38272", "46191", "54110", "62029", "69948", "77867", "85786", "93705", "01621", "09540", "17459", "25378", "33297", "41216", "49135", "57054", "64973", "72892", "80811", "88730", "96649", "04565", "12484", "20403", "28322", "36241", "44160", "52079", "59998", "67917", "75836", "83755", "91674", "99593", "07509", "15428", "23347", "31266", "39185", "47104", "55023", "62942", "70861", "78780", "86699", "94618", "02534", "10453", "18372", "26291", "34210", "42129", "50048", "57967", "65886", "73805", "81724", "89643", "97562", "05478", "13397", "21316", "29235", "37154", "45073", "52992", "60911", "68830", "76749", "84668", "92587", "00503", "08422", "16341", "24260", "32179", "40098", "48017", "55936", "63855", "71774", "79693", "87612", "95531", "03447", "11366", "19285", "27204", "35123", "43042", "50961", "58880", "66799", "74718", "82637", "90556", "98475", "06391", "14310", "22229", "30148", "38067", "45986", "53905", "61824", "69743", "77662", "85581", "93500", "01416", "09335", "17254", "25173", "33092", "41011", "48930", "56849", "64768", "72687", "80606", "88525", "96444", "04360", "12279", "20198", "28117", "36036", "43955", "51874", "59793", "67712", "75631", "83550", "91469", "99388", "07304", "15223", "23142", "31061", "38980", "46899", "54818", "62737", "70656", "78575", "86494", "94413", "02329", "10248", "18167", "26086"]}', NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-28 20:17:52.328459+00', 'failed', 2, '2026-11-28 20:22:52.449512+00', 'MSG_SIZE_TOO_LARGE: larger than the topic''s max.message.bytes', '2026-11-28 20:17:52.915958+00', '2026-11-28 20:17:54.604663+00', false, 0, false);
INSERT INTO public.outbox_parked VALUES ('01a223ce-a0d6-7ef6-848c-a1271047c8fb', 18, '24', 'order', 'waiting', 'order.placed', '{"n": 1}', NULL, 'key-1', NULL, NULL, NULL, 2, '2026-11-28 20:17:53.87076+00', 'waiting', 0, NULL, NULL, '2026-11-28 20:17:54.945023+00', NULL, false, 0, false);
INSERT INTO public.outbox_parked VALUES ('01a223ce-a0d0-75d5-80cd-31337c58493d', 17, '24', 'order', 'waiting', 'order.placed', '{"noise": ["00000", "07919", "15838", "23757", "31676", "39595", "47514", "55433", "63352", "71271", "79190", "87109", "95028", "02944", "10863", "18782", "26701", "34620", "42539", "50458", "58377", "66296", "74215", "82134", "90053", "97972", "05888", "13807", "21726", "29645", "37564", "45483", "53402", "61321", "69240", "77159", "85078", "92997", "00913", "08832", "16751", "24670", "32589", "40508", "48427", "56346", "64265", "72184", "80103", "88022", "95941", "03857", "11776", "19695", "27614", "35533", "43452", "51371", "59290", "67209", "75128", "83047", "90966", "98885", "06801", "14720", "22639", "30558", "38477", "46396", "54315", "62234", "70153", "78072", "85991", "93910", "01826", "09745", "17664", "25583", "33502", "41421", "49340", "57259", "65178", "73097", "81016", "88935", "96854", "04770", "12689", "20608", "28527", "36446", "44365", "52284", "60203", "68122", "76041", "83960", "91879", "99798", "07714", "15633", "23552", "31471", "39390", "47309", "55228", "63147", "71066", "78985", "86904", "94823", "02739", "10658", "18577", "26496", "34415", "42334", "50253", "58172", "66091", "74010", "81929", "89848", "97767", "05683", "13602", "21521", "29440", "37359", "45278", "53197", "61116", "69035", "76954", "84873", "92792", "00708", "08627", "16546", "24465", "32384", "40303", "48222", "56141", "64060", "71979", "79898", "87817", "95736", "03652", "11571", "19490", "27409", "35328", "43247", "51166", "59085", "67004", "74923", "82842", "90761", "98680", "06596", "14515", "22434", "30353", "38272", "46191", "54110", "62029", "69948", "77867", "85786", "93705", "01621", "09540", "17459", "25378", "33297", "41216", "49135", "57054", "64973", "72892", "80811", "88730", "96649", "04565", "12484", "20403", "28322", "36241", "44160", "52079", "59998", "67917", "75836", "83755", "91674", "99593", "07509", "15428", "23347", "31266", "39185", "47104", "55023", "62942", "70861", "78780", "86699", "94618", "02534", "10453", "18372", "26291", "34210", "42129", "50048", "57967", "65886", "73805", "81724", "89643", "97562", "05478", "13397", "21316", "29235", "37154", "45073", "52992", "60911", "68830", "76749", "84668", "92587", "00503", "08422", "16341", "24260", "32179", "40098", "48017", "55936", "63855", "71774", "79693", "87612", "95531", "03447", "11366", "19285", "27204", "35123", "43042", "50961", "58880", "66799", "74718", "82637", "90556", "98475", "06391", "14310", "22229", "30148", "38067", "45986", "53905", "61824", "69743", "77662", "85581", "93500", "01416", "09335", "17254", "25173", "33092", "41011", "48930", "56849", "64768", "72687", "80606", "88525", "96444", "04360", "12279", "20198", "28117", "36036", "43955", "51874", "59793", "67712", "75631", "83550", "91469", "99388", "07304", "15223", "23142", "31061", "38980", "46899", "54818", "62737", "70656", "78575", "86494", "94413", "02329", "10248", "18167", "26086"]}', NULL, NULL, NULL, NULL, NULL, NULL, '2026-11-28 20:17:53.87076+00', 'retrying', 1, '2026-11-28 20:23:43.667801+00', 'MSG_SIZE_TOO_LARGE: larger than the topic''s max.message.bytes', '2026-11-28 20:17:54.945023+00', NULL, false, 0, false);
INSERT INTO public.outbox_progress VALUES (0, 2, '2026-11-28 20:17:00.528445+00', '12:12:', NULL, NULL, 6, 332218.028354);
INSERT INTO public.outbox_progress VALUES (1, 2, '2026-11-28 20:17:02.221923+00', '13:13:', NULL, NULL, 3, 332221.721844);
INSERT INTO public.outbox_progress VALUES (0, 2, '2026-11-28 20:17:43.506983+00', '21:21:', NULL, NULL, 3, 1.159472);
INSERT INTO public.outbox_progress VALUES (1, 2, '2026-11-28 20:17:44.105887+00', '22:22:', NULL, NULL, 1, 1.794232);

INSERT INTO public.outbox_replays VALUES ('01a223ce-6e3f-7845-9826-50749132e73e', '2026-11-28 20:17:40.926819+00', 'postgres', 'ann@example', 'a test', '{"since": "2026-11-23", "until": "2026-11-23"}', '{topic}', '[{"day": "2026-11-23", "file": "events-aba2d2cb191b6f23.parquet", "sha256": "aba2d2cb191b6f2309ef2d483f28d5db9861711e4fbd467b200a89f6edc559a0"}]', '{}', 3, 3, 3, 3, 'done', NULL, '2026-11-28 20:17:41.113438+00');
INSERT INTO public.outbox_shards VALUES (0, 2, NULL, 22911, 6, NULL, '2026-11-28 20:17:54.616142+00', '25:25:', NULL, NULL, NULL, NULL, NULL, false, NULL, false, NULL, NULL, false, NULL, 'closed', NULL, NULL, 0, NULL, 0, 7713318062147889655, 18682);
INSERT INTO public.outbox_shards VALUES (1, 2, NULL, 22960, 5, NULL, '2026-11-28 20:17:55.132582+00', '26:26:', NULL, NULL, NULL, NULL, NULL, false, NULL, false, NULL, NULL, false, NULL, 'closed', NULL, NULL, 0, NULL, 0, 7713318062147889655, 18682);
INSERT INTO public.outbox_writers VALUES ('release_writer', '{order}', 'shop');
INSERT INTO public.partition_owners VALUES ('billing', 'billing', 'release-order-events', 0, '189e0058-94c1-4f62-81b7-75988203f2ea', 1, '2026-11-28 20:17:45.099039+00');












































INSERT INTO public.processed_events_44 VALUES ('01a205b3-d5dc-709e-98ef-34b82b399b9c', '2026-11-28 20:17:44.670822+00', 44, 'billing', NULL);
INSERT INTO public.processed_events_44 VALUES ('01a205b3-d9c4-74ee-a42c-128e88a38756', '2026-11-28 20:17:44.697025+00', 44, 'billing', NULL);
INSERT INTO public.processed_events_44 VALUES ('01a205b3-d1f4-717a-b605-596179cff26e', '2026-11-28 20:17:44.732192+00', 44, 'billing', NULL);
INSERT INTO public.processed_events_45 VALUES ('01a20ada-31dc-7bc2-8c86-e71fceeb9316', '2026-11-28 20:17:44.703176+00', 45, 'billing', NULL);
INSERT INTO public.processed_events_45 VALUES ('01a20ada-35c4-736d-83a9-337ef8ff67d8', '2026-11-28 20:17:44.708509+00', 45, 'billing', NULL);
INSERT INTO public.processed_events_45 VALUES ('01a20ada-2df4-7541-b6ad-d0f84950f274', '2026-11-28 20:17:44.735525+00', 45, 'billing', NULL);
INSERT INTO public.processed_events_46 VALUES ('01a21000-8ddc-786d-816a-fee181268133', '2026-11-28 20:17:44.72735+00', 46, 'billing', NULL);
INSERT INTO public.processed_events_46 VALUES ('01a21000-91c4-72b6-9ef0-fd6fd9b1dc41', '2026-11-28 20:17:44.730486+00', 46, 'billing', NULL);
INSERT INTO public.processed_events_46 VALUES ('01a21000-89f4-7891-93bf-955c46a1709d', '2026-11-28 20:17:44.736639+00', 46, 'billing', NULL);


INSERT INTO public.processed_events_49 VALUES ('01a223ce-6e3f-76cc-9552-0b4aec51d606', '2026-11-28 20:17:44.750272+00', 49, 'billing', '01a223ce-6e3f-7845-9826-50749132e73e');
INSERT INTO public.processed_events_49 VALUES ('01a223ce-6e3f-7698-a8c6-6c1daa70b44c', '2026-11-28 20:17:44.754934+00', 49, 'billing', '01a223ce-6e3f-7845-9826-50749132e73e');
INSERT INTO public.processed_events_49 VALUES ('01a223ce-6e3f-7140-be64-3a8e2b421e83', '2026-11-28 20:17:44.774206+00', 49, 'billing', '01a223ce-6e3f-7845-9826-50749132e73e');
INSERT INTO public.processed_events_49 VALUES ('01a223ce-73c9-7c80-9137-7d9495ed14e4', '2026-11-28 20:17:44.803419+00', 49, 'billing', NULL);
INSERT INTO public.processed_events_49 VALUES ('01a223ce-73cc-7578-8c54-96be85d8f3a7', '2026-11-28 20:17:44.814917+00', 49, 'billing', NULL);
INSERT INTO public.processed_events_49 VALUES ('01a223ce-73ca-779b-99dd-176f011ad0a4', '2026-11-28 20:17:44.822725+00', 49, 'billing', NULL);
INSERT INTO public.processed_events_49 VALUES ('01a223ce-73b5-7f26-aa68-26face17229b', '2026-11-28 20:17:44.825969+00', 49, 'billing', NULL);















INSERT INTO public.subject_keys VALUES ('b5f99961-4451-4d20-a60e-45faba7f61bb', 'ann', '\x7435163ab09bcd0fbf55bef0b5db4850cb9329a32783403866b6fca8b909e0cfbc66506d236cd78cc6bfa6cd9c66e82ee1faa0c1ce05ac60e616d475', '737a3bb19f4b96b0', '2026-11-28 20:17:55.232035+00', NULL, NULL, NULL);
INSERT INTO public.subject_keys VALUES ('aa7d5bdd-d7e5-4076-a4cf-426ee1a5a1a0', 'bob', NULL, NULL, '2026-11-28 20:17:55.249912+00', '2026-11-28 20:17:55.31691+00', 'ann, role postgres', 'asked for');
SELECT pg_catalog.setval('public.events_seq_seq', 3, true);
SELECT pg_catalog.setval('public.inbox_seq_seq', 3, true);
SELECT pg_catalog.setval('public.outbox_audit_number_seq', 3, true);
SELECT pg_catalog.setval('public.outbox_has_waited', 1, true);
SELECT pg_catalog.setval('public.outbox_seq', 27, true);
ALTER TABLE ONLY public.consumer_migrations
    ADD CONSTRAINT consumer_migrations_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.inbox
    ADD CONSTRAINT inbox_pkey PRIMARY KEY (seq);
ALTER TABLE ONLY public.key_store_migrations
    ADD CONSTRAINT key_store_migrations_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.key_store
    ADD CONSTRAINT key_store_pkey PRIMARY KEY (only_one);
ALTER TABLE ONLY public.outbox
    ADD CONSTRAINT outbox_pkey PRIMARY KEY (id, created_at);
ALTER TABLE ONLY public.outbox_20261124
    ADD CONSTRAINT outbox_20261124_pkey PRIMARY KEY (id, created_at);
ALTER TABLE ONLY public.outbox_20261125
    ADD CONSTRAINT outbox_20261125_pkey PRIMARY KEY (id, created_at);
ALTER TABLE ONLY public.outbox_20261126
    ADD CONSTRAINT outbox_20261126_pkey PRIMARY KEY (id, created_at);
ALTER TABLE ONLY public.outbox_20261127
    ADD CONSTRAINT outbox_20261127_pkey PRIMARY KEY (id, created_at);
ALTER TABLE ONLY public.outbox_20261128
    ADD CONSTRAINT outbox_20261128_pkey PRIMARY KEY (id, created_at);
ALTER TABLE ONLY public.outbox_adopted
    ADD CONSTRAINT outbox_adopted_pkey PRIMARY KEY (relation);
ALTER TABLE ONLY public.outbox_archive_changes
    ADD CONSTRAINT outbox_archive_changes_pkey PRIMARY KEY (manifest_sha256);
ALTER TABLE ONLY public.outbox_audit
    ADD CONSTRAINT outbox_audit_pkey PRIMARY KEY (number);
ALTER TABLE ONLY public.outbox_days
    ADD CONSTRAINT outbox_days_pkey PRIMARY KEY (day);
ALTER TABLE ONLY public.outbox_delayed
    ADD CONSTRAINT outbox_delayed_pkey PRIMARY KEY (seq);
ALTER TABLE ONLY public.outbox_keys
    ADD CONSTRAINT outbox_keys_pkey PRIMARY KEY (key);
ALTER TABLE ONLY public.outbox_migrations
    ADD CONSTRAINT outbox_migrations_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.outbox_parked
    ADD CONSTRAINT outbox_parked_pkey PRIMARY KEY (seq);
ALTER TABLE ONLY public.outbox_progress
    ADD CONSTRAINT outbox_progress_pkey PRIMARY KEY (shard, at);
ALTER TABLE ONLY public.outbox_released
    ADD CONSTRAINT outbox_released_pkey PRIMARY KEY (seq, id);
ALTER TABLE ONLY public.outbox_replays
    ADD CONSTRAINT outbox_replays_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.outbox_shards
    ADD CONSTRAINT outbox_shards_pkey PRIMARY KEY (shard);
ALTER TABLE ONLY public.outbox_writers
    ADD CONSTRAINT outbox_writers_pkey PRIMARY KEY (writer);
ALTER TABLE ONLY public.partition_owners
    ADD CONSTRAINT partition_owners_pkey PRIMARY KEY (source, consumer_group, topic, partition);
ALTER TABLE ONLY public.processed_events
    ADD CONSTRAINT processed_events_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_00
    ADD CONSTRAINT processed_events_00_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_01
    ADD CONSTRAINT processed_events_01_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_02
    ADD CONSTRAINT processed_events_02_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_03
    ADD CONSTRAINT processed_events_03_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_04
    ADD CONSTRAINT processed_events_04_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_05
    ADD CONSTRAINT processed_events_05_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_06
    ADD CONSTRAINT processed_events_06_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_07
    ADD CONSTRAINT processed_events_07_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_08
    ADD CONSTRAINT processed_events_08_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_09
    ADD CONSTRAINT processed_events_09_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_10
    ADD CONSTRAINT processed_events_10_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_11
    ADD CONSTRAINT processed_events_11_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_12
    ADD CONSTRAINT processed_events_12_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_13
    ADD CONSTRAINT processed_events_13_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_14
    ADD CONSTRAINT processed_events_14_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_15
    ADD CONSTRAINT processed_events_15_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_16
    ADD CONSTRAINT processed_events_16_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_17
    ADD CONSTRAINT processed_events_17_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_18
    ADD CONSTRAINT processed_events_18_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_19
    ADD CONSTRAINT processed_events_19_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_20
    ADD CONSTRAINT processed_events_20_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_21
    ADD CONSTRAINT processed_events_21_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_22
    ADD CONSTRAINT processed_events_22_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_23
    ADD CONSTRAINT processed_events_23_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_24
    ADD CONSTRAINT processed_events_24_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_25
    ADD CONSTRAINT processed_events_25_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_26
    ADD CONSTRAINT processed_events_26_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_27
    ADD CONSTRAINT processed_events_27_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_28
    ADD CONSTRAINT processed_events_28_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_29
    ADD CONSTRAINT processed_events_29_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_30
    ADD CONSTRAINT processed_events_30_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_31
    ADD CONSTRAINT processed_events_31_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_32
    ADD CONSTRAINT processed_events_32_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_33
    ADD CONSTRAINT processed_events_33_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_34
    ADD CONSTRAINT processed_events_34_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_35
    ADD CONSTRAINT processed_events_35_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_36
    ADD CONSTRAINT processed_events_36_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_37
    ADD CONSTRAINT processed_events_37_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_38
    ADD CONSTRAINT processed_events_38_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_39
    ADD CONSTRAINT processed_events_39_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_40
    ADD CONSTRAINT processed_events_40_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_41
    ADD CONSTRAINT processed_events_41_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_42
    ADD CONSTRAINT processed_events_42_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_43
    ADD CONSTRAINT processed_events_43_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_44
    ADD CONSTRAINT processed_events_44_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_45
    ADD CONSTRAINT processed_events_45_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_46
    ADD CONSTRAINT processed_events_46_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_47
    ADD CONSTRAINT processed_events_47_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_48
    ADD CONSTRAINT processed_events_48_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_49
    ADD CONSTRAINT processed_events_49_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_50
    ADD CONSTRAINT processed_events_50_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_51
    ADD CONSTRAINT processed_events_51_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_52
    ADD CONSTRAINT processed_events_52_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_53
    ADD CONSTRAINT processed_events_53_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_54
    ADD CONSTRAINT processed_events_54_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_55
    ADD CONSTRAINT processed_events_55_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_56
    ADD CONSTRAINT processed_events_56_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_57
    ADD CONSTRAINT processed_events_57_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_58
    ADD CONSTRAINT processed_events_58_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_59
    ADD CONSTRAINT processed_events_59_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_60
    ADD CONSTRAINT processed_events_60_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_61
    ADD CONSTRAINT processed_events_61_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_62
    ADD CONSTRAINT processed_events_62_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_63
    ADD CONSTRAINT processed_events_63_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.processed_events_other
    ADD CONSTRAINT processed_events_other_pkey PRIMARY KEY (event_id, source, bucket);
ALTER TABLE ONLY public.subject_keys
    ADD CONSTRAINT subject_keys_pkey PRIMARY KEY (key_id);
ALTER TABLE ONLY public.subject_keys
    ADD CONSTRAINT subject_keys_subject_key UNIQUE (subject);
CREATE UNIQUE INDEX events_seq_idx ON public.events USING btree (seq) WHERE (published_at IS NULL);
CREATE INDEX inbox_age ON public.inbox USING btree (source, state, received_at) WHERE (processed_at IS NULL);
CREATE INDEX inbox_message ON public.inbox USING btree (message_id);
CREATE INDEX inbox_open ON public.inbox USING btree (source, topic, key_hash, seq) INCLUDE (state) WHERE (state = ANY (ARRAY['waiting'::text, 'failed'::text]));
CREATE INDEX inbox_paused ON public.inbox USING btree (source) WHERE ((state = 'waiting'::text) AND (paused_since IS NOT NULL));
CREATE INDEX outbox_aggregate ON ONLY public.outbox USING brin (aggregate_id text_bloom_ops) WITH (pages_per_range='32');
CREATE INDEX outbox_20261124_aggregate_id_idx ON public.outbox_20261124 USING brin (aggregate_id text_bloom_ops) WITH (pages_per_range='32');
CREATE INDEX outbox_seq_order ON ONLY public.outbox USING btree (seq, ((hashtextextended(aggregate_id, (hashtext(aggregate_type))::bigint) + 0)));
CREATE INDEX outbox_20261124_seq_expr_idx ON public.outbox_20261124 USING btree (seq, ((hashtextextended(aggregate_id, (hashtext(aggregate_type))::bigint) + 0)));
CREATE INDEX outbox_tx ON ONLY public.outbox USING btree (tx, seq, hashtextextended(aggregate_id, (hashtext(aggregate_type))::bigint));
CREATE INDEX outbox_20261124_tx_seq_hashtextextended_idx ON public.outbox_20261124 USING btree (tx, seq, hashtextextended(aggregate_id, (hashtext(aggregate_type))::bigint));
CREATE INDEX outbox_20261125_aggregate_id_idx ON public.outbox_20261125 USING brin (aggregate_id text_bloom_ops) WITH (pages_per_range='32');
CREATE INDEX outbox_20261125_seq_expr_idx ON public.outbox_20261125 USING btree (seq, ((hashtextextended(aggregate_id, (hashtext(aggregate_type))::bigint) + 0)));
CREATE INDEX outbox_20261125_tx_seq_hashtextextended_idx ON public.outbox_20261125 USING btree (tx, seq, hashtextextended(aggregate_id, (hashtext(aggregate_type))::bigint));
CREATE INDEX outbox_20261126_aggregate_id_idx ON public.outbox_20261126 USING brin (aggregate_id text_bloom_ops) WITH (pages_per_range='32');
CREATE INDEX outbox_20261126_seq_expr_idx ON public.outbox_20261126 USING btree (seq, ((hashtextextended(aggregate_id, (hashtext(aggregate_type))::bigint) + 0)));
CREATE INDEX outbox_20261126_tx_seq_hashtextextended_idx ON public.outbox_20261126 USING btree (tx, seq, hashtextextended(aggregate_id, (hashtext(aggregate_type))::bigint));
CREATE INDEX outbox_20261127_aggregate_id_idx ON public.outbox_20261127 USING brin (aggregate_id text_bloom_ops) WITH (pages_per_range='32');
CREATE INDEX outbox_20261127_seq_expr_idx ON public.outbox_20261127 USING btree (seq, ((hashtextextended(aggregate_id, (hashtext(aggregate_type))::bigint) + 0)));
CREATE INDEX outbox_20261127_tx_seq_hashtextextended_idx ON public.outbox_20261127 USING btree (tx, seq, hashtextextended(aggregate_id, (hashtext(aggregate_type))::bigint));
CREATE INDEX outbox_20261128_aggregate_id_idx ON public.outbox_20261128 USING brin (aggregate_id text_bloom_ops) WITH (pages_per_range='32');
CREATE INDEX outbox_20261128_seq_expr_idx ON public.outbox_20261128 USING btree (seq, ((hashtextextended(aggregate_id, (hashtext(aggregate_type))::bigint) + 0)));
CREATE INDEX outbox_20261128_tx_seq_hashtextextended_idx ON public.outbox_20261128 USING btree (tx, seq, hashtextextended(aggregate_id, (hashtext(aggregate_type))::bigint));
CREATE UNIQUE INDEX outbox_adopted_one ON public.outbox_adopted USING btree ((true));
CREATE INDEX outbox_delayed_due ON public.outbox_delayed USING btree (due, seq);
CREATE INDEX outbox_delayed_id ON public.outbox_delayed USING btree (id);
CREATE INDEX outbox_delayed_stuck ON public.outbox_delayed USING btree (hashtextextended(aggregate_id, (0)::bigint)) WHERE (later_events_wait AND (retry_at IS NOT NULL));
CREATE INDEX outbox_delayed_waited_for ON public.outbox_delayed USING btree (hashtextextended(aggregate_id, (0)::bigint), due) WHERE later_events_wait;
CREATE INDEX outbox_parked_commands ON public.outbox_parked USING btree (failed_at) WHERE command_due;
CREATE INDEX outbox_parked_failed ON public.outbox_parked USING btree (failed_at) WHERE (state = ANY (ARRAY['failed'::text, 'replaying'::text]));
CREATE INDEX outbox_parked_id ON public.outbox_parked USING btree (id);
CREATE INDEX outbox_parked_order ON public.outbox_parked USING btree (hashtextextended(aggregate_id, (0)::bigint), seq);
CREATE INDEX outbox_parked_suspects ON public.outbox_parked USING btree (hashtextextended(aggregate_id, (0)::bigint), seq) WHERE (state <> 'waiting'::text);
CREATE INDEX outbox_parked_trying ON public.outbox_parked USING btree (seq) WHERE trying;
CREATE INDEX subject_keys_forgotten ON public.subject_keys USING btree (forgotten_at) WHERE (wrapped IS NULL);
ALTER INDEX public.outbox_aggregate ATTACH PARTITION public.outbox_20261124_aggregate_id_idx;
ALTER INDEX public.outbox_pkey ATTACH PARTITION public.outbox_20261124_pkey;
ALTER INDEX public.outbox_seq_order ATTACH PARTITION public.outbox_20261124_seq_expr_idx;
ALTER INDEX public.outbox_tx ATTACH PARTITION public.outbox_20261124_tx_seq_hashtextextended_idx;
ALTER INDEX public.outbox_aggregate ATTACH PARTITION public.outbox_20261125_aggregate_id_idx;
ALTER INDEX public.outbox_pkey ATTACH PARTITION public.outbox_20261125_pkey;
ALTER INDEX public.outbox_seq_order ATTACH PARTITION public.outbox_20261125_seq_expr_idx;
ALTER INDEX public.outbox_tx ATTACH PARTITION public.outbox_20261125_tx_seq_hashtextextended_idx;
ALTER INDEX public.outbox_aggregate ATTACH PARTITION public.outbox_20261126_aggregate_id_idx;
ALTER INDEX public.outbox_pkey ATTACH PARTITION public.outbox_20261126_pkey;
ALTER INDEX public.outbox_seq_order ATTACH PARTITION public.outbox_20261126_seq_expr_idx;
ALTER INDEX public.outbox_tx ATTACH PARTITION public.outbox_20261126_tx_seq_hashtextextended_idx;
ALTER INDEX public.outbox_aggregate ATTACH PARTITION public.outbox_20261127_aggregate_id_idx;
ALTER INDEX public.outbox_pkey ATTACH PARTITION public.outbox_20261127_pkey;
ALTER INDEX public.outbox_seq_order ATTACH PARTITION public.outbox_20261127_seq_expr_idx;
ALTER INDEX public.outbox_tx ATTACH PARTITION public.outbox_20261127_tx_seq_hashtextextended_idx;
ALTER INDEX public.outbox_aggregate ATTACH PARTITION public.outbox_20261128_aggregate_id_idx;
ALTER INDEX public.outbox_pkey ATTACH PARTITION public.outbox_20261128_pkey;
ALTER INDEX public.outbox_seq_order ATTACH PARTITION public.outbox_20261128_seq_expr_idx;
ALTER INDEX public.outbox_tx ATTACH PARTITION public.outbox_20261128_tx_seq_hashtextextended_idx;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_00_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_01_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_02_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_03_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_04_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_05_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_06_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_07_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_08_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_09_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_10_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_11_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_12_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_13_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_14_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_15_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_16_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_17_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_18_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_19_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_20_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_21_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_22_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_23_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_24_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_25_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_26_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_27_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_28_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_29_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_30_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_31_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_32_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_33_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_34_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_35_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_36_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_37_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_38_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_39_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_40_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_41_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_42_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_43_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_44_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_45_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_46_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_47_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_48_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_49_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_50_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_51_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_52_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_53_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_54_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_55_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_56_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_57_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_58_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_59_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_60_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_61_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_62_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_63_pkey;
ALTER INDEX public.processed_events_pkey ATTACH PARTITION public.processed_events_other_pkey;
CREATE CONSTRAINT TRIGGER handled_guard AFTER UPDATE ON public.inbox DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (((new.state = 'processed'::text) AND (current_setting('outbox.handling'::text, true) = 'on'::text))) EXECUTE FUNCTION public.handled_guard();
CREATE CONSTRAINT TRIGGER handled_guard AFTER INSERT ON public.processed_events DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN ((current_setting('outbox.handling'::text, true) = 'on'::text)) EXECUTE FUNCTION public.handled_guard();
CREATE TRIGGER outbox_append_only BEFORE DELETE OR UPDATE ON public.outbox FOR EACH ROW EXECUTE FUNCTION public.outbox_refuse_change();
CREATE TRIGGER outbox_checked BEFORE INSERT ON public.outbox FOR EACH ROW EXECUTE FUNCTION public.outbox_check_row();
CREATE TRIGGER outbox_checked BEFORE INSERT ON public.outbox_delayed FOR EACH ROW EXECUTE FUNCTION public.outbox_check_row();
CREATE TRIGGER outbox_closed BEFORE INSERT ON public.outbox_20261124 FOR EACH ROW EXECUTE FUNCTION public.outbox_refuse_late_insert();

ALTER TABLE public.outbox_20261124 ENABLE ALWAYS TRIGGER outbox_closed;
CREATE TRIGGER outbox_closed BEFORE INSERT ON public.outbox_20261125 FOR EACH ROW EXECUTE FUNCTION public.outbox_refuse_late_insert();

ALTER TABLE public.outbox_20261125 ENABLE ALWAYS TRIGGER outbox_closed;
CREATE TRIGGER outbox_kept BEFORE UPDATE OF state ON public.outbox_parked FOR EACH ROW WHEN (((old.state <> new.state) AND ((old.state = ANY (ARRAY['failed'::text, 'discarded'::text])) OR (new.state = ANY (ARRAY['replaying'::text, 'discarded'::text]))))) EXECUTE FUNCTION public.outbox_refuse_action();
CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON public.outbox FOR EACH STATEMENT EXECUTE FUNCTION public.outbox_refuse_change();
CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON public.outbox_20261124 FOR EACH STATEMENT EXECUTE FUNCTION public.outbox_refuse_change();
CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON public.outbox_20261125 FOR EACH STATEMENT EXECUTE FUNCTION public.outbox_refuse_change();
CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON public.outbox_20261126 FOR EACH STATEMENT EXECUTE FUNCTION public.outbox_refuse_change();
CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON public.outbox_20261127 FOR EACH STATEMENT EXECUTE FUNCTION public.outbox_refuse_change();
CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON public.outbox_20261128 FOR EACH STATEMENT EXECUTE FUNCTION public.outbox_refuse_change();
CREATE TRIGGER outbox_unique_and_waiting BEFORE INSERT ON public.outbox FOR EACH ROW WHEN (((new.idempotency_key IS NOT NULL) OR (pg_sequence_last_value('public.outbox_has_waited'::regclass) IS NOT NULL))) EXECUTE FUNCTION public.outbox_claim_and_wait();
GRANT USAGE ON SCHEMA public TO release_writer;
GRANT USAGE ON SCHEMA public TO release_operator;
REVOKE ALL ON FUNCTION public.outbox_act(action text, seqs bigint[], reason text, filter jsonb, on_behalf_of text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.outbox_act(action text, seqs bigint[], reason text, filter jsonb, on_behalf_of text) TO release_operator;
REVOKE ALL ON FUNCTION public.outbox_cancel(id uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION public.outbox_cancel(id uuid) TO release_writer;
REVOKE ALL ON FUNCTION public.outbox_cancel_delayed(ids uuid[], reason text, on_behalf_of text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.outbox_cancel_delayed(ids uuid[], reason text, on_behalf_of text) TO release_operator;
REVOKE ALL ON FUNCTION public.outbox_change_shards(wanted integer, started boolean, on_behalf_of text, OUT step text, OUT missing text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.outbox_change_shards(wanted integer, started boolean, on_behalf_of text, OUT step text, OUT missing text) TO release_operator;
REVOKE ALL ON FUNCTION public.outbox_check_row() FROM PUBLIC;
REVOKE ALL ON FUNCTION public.outbox_claim_and_wait() FROM PUBLIC;
GRANT ALL ON FUNCTION public.outbox_covers(done pg_snapshot, target pg_snapshot, last_seq bigint, tx xid8, seq bigint) TO release_operator;
GRANT ALL ON FUNCTION public.outbox_due(deliver_after text) TO release_writer;
REVOKE ALL ON FUNCTION public.outbox_emit(aggregate_type text, aggregate_id text, event_type text, payload jsonb, headers jsonb, idempotency_key text, correlation_id text, causation_id text, traceparent text, version integer, deliver_after timestamp with time zone, later_events_wait boolean, OUT id uuid, OUT seq bigint, OUT duplicate boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION public.outbox_emit(aggregate_type text, aggregate_id text, event_type text, payload jsonb, headers jsonb, idempotency_key text, correlation_id text, causation_id text, traceparent text, version integer, deliver_after timestamp with time zone, later_events_wait boolean, OUT id uuid, OUT seq bigint, OUT duplicate boolean) TO release_writer;
REVOKE ALL ON FUNCTION public.outbox_emit_keyed_lists(aggregate_types text, aggregate_ids text, event_types text, payloads text, headers text, idempotency_keys text, correlation_ids text, causation_ids text, traceparents text, versions text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.outbox_emit_keyed_lists(aggregate_types text, aggregate_ids text, event_types text, payloads text, headers text, idempotency_keys text, correlation_ids text, causation_ids text, traceparents text, versions text) TO release_writer;
REVOKE ALL ON FUNCTION public.outbox_emit_lists(aggregate_types text, aggregate_ids text, event_types text, payloads text, headers text, correlation_ids text, causation_ids text, traceparents text, versions text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.outbox_emit_lists(aggregate_types text, aggregate_ids text, event_types text, payloads text, headers text, correlation_ids text, causation_ids text, traceparents text, versions text) TO release_writer;
REVOKE ALL ON FUNCTION public.outbox_emit_many(events jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION public.outbox_emit_many(events jsonb) TO release_writer;
REVOKE ALL ON FUNCTION public.outbox_keep_shards() FROM PUBLIC;
GRANT ALL ON FUNCTION public.outbox_keep_shards() TO release_operator;
GRANT ALL ON FUNCTION public.outbox_last_seq() TO release_operator;
GRANT ALL ON FUNCTION public.outbox_may_write(writer name, aggregate_type text) TO release_writer;
REVOKE ALL ON FUNCTION public.outbox_move_due(most integer, again boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION public.outbox_move_due(most integer, again boolean) TO release_operator;
GRANT ALL ON FUNCTION public.outbox_open_from() TO release_operator;
GRANT ALL ON FUNCTION public.outbox_owner_declared(relation oid, setting text) TO release_writer;
REVOKE ALL ON FUNCTION public.outbox_park(seqs bigint[], states text[], errors text[], start timestamp with time zone, stop timestamp with time zone, first bigint, last bigint, OUT present bigint, OUT twice bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION public.outbox_park(seqs bigint[], states text[], errors text[], start timestamp with time zone, stop timestamp with time zone, first bigint, last bigint, OUT present bigint, OUT twice bigint) TO release_operator;
REVOKE ALL ON FUNCTION public.outbox_refuse_action() FROM PUBLIC;
REVOKE ALL ON FUNCTION public.outbox_refuse_change() FROM PUBLIC;
REVOKE ALL ON FUNCTION public.outbox_refuse_late_insert() FROM PUBLIC;
GRANT ALL ON FUNCTION public.outbox_refuse_type(writer name, aggregate_type text) TO release_writer;
REVOKE ALL ON FUNCTION public.outbox_release(seqs bigint[]) FROM PUBLIC;
GRANT ALL ON FUNCTION public.outbox_release(seqs bigint[]) TO release_operator;
REVOKE ALL ON FUNCTION public.outbox_replay_advance(replay uuid, seq bigint, events bigint, state text, error text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.outbox_replay_advance(replay uuid, seq bigint, events bigint, state text, error text) TO release_operator;
REVOKE ALL ON FUNCTION public.outbox_replay_begin(selection jsonb, target text, files jsonb, events bigint, last_seq bigint, reason text, on_behalf_of text, notes text[]) FROM PUBLIC;
GRANT ALL ON FUNCTION public.outbox_replay_begin(selection jsonb, target text, files jsonb, events bigint, last_seq bigint, reason text, on_behalf_of text, notes text[]) TO release_operator;
GRANT ALL ON FUNCTION public.outbox_shard_of(aggregate_type text, aggregate_id text, shards integer) TO release_operator;
REVOKE ALL ON FUNCTION public.outbox_unrestricted() FROM PUBLIC;
GRANT ALL ON FUNCTION public.outbox_uuidv7() TO release_writer;
REVOKE ALL ON FUNCTION public.subject_keys_add(subjects text[], proposed bytea[], master text) FROM PUBLIC;
REVOKE ALL ON FUNCTION public.subject_keys_find(subjects text[]) FROM PUBLIC;
REVOKE ALL ON FUNCTION public.subject_keys_forget(forgotten text, actor text, why text) FROM PUBLIC;
REVOKE ALL ON FUNCTION public.subject_keys_grant(grantee regrole, kind text) FROM PUBLIC;
REVOKE ALL ON FUNCTION public.subject_keys_read(ids uuid[]) FROM PUBLIC;
GRANT SELECT ON TABLE public.consumer_migrations TO PUBLIC;
GRANT SELECT ON TABLE public.key_store_migrations TO PUBLIC;
GRANT USAGE ON SEQUENCE public.outbox_seq TO release_writer;
GRANT SELECT ON SEQUENCE public.outbox_seq TO release_operator;
GRANT SELECT ON TABLE public.outbox TO release_operator;
GRANT SELECT(id) ON TABLE public.outbox TO release_writer;
GRANT SELECT(seq) ON TABLE public.outbox TO release_writer;
GRANT INSERT(aggregate_type) ON TABLE public.outbox TO release_writer;
GRANT INSERT(aggregate_id) ON TABLE public.outbox TO release_writer;
GRANT INSERT(event_type) ON TABLE public.outbox TO release_writer;
GRANT INSERT(payload) ON TABLE public.outbox TO release_writer;
GRANT INSERT(headers) ON TABLE public.outbox TO release_writer;
GRANT INSERT(idempotency_key) ON TABLE public.outbox TO release_writer;
GRANT INSERT(correlation_id) ON TABLE public.outbox TO release_writer;
GRANT INSERT(causation_id) ON TABLE public.outbox TO release_writer;
GRANT INSERT(traceparent) ON TABLE public.outbox TO release_writer;
GRANT INSERT(version) ON TABLE public.outbox TO release_writer;
GRANT SELECT ON TABLE public.outbox_adopted TO PUBLIC;
GRANT SELECT ON TABLE public.outbox_archive_changes TO release_operator;
GRANT SELECT ON TABLE public.outbox_audit TO release_operator;
GRANT SELECT ON TABLE public.outbox_days TO release_operator;
GRANT SELECT ON TABLE public.outbox_delayed TO release_operator;
GRANT SELECT(id) ON TABLE public.outbox_delayed TO release_writer;
GRANT SELECT(seq) ON TABLE public.outbox_delayed TO release_writer;
GRANT SELECT ON TABLE public.outbox_parked TO release_operator;
GRANT SELECT(id) ON TABLE public.outbox_parked TO release_operator;
GRANT SELECT(seq) ON TABLE public.outbox_parked TO release_operator;
GRANT SELECT(state),UPDATE(state) ON TABLE public.outbox_parked TO release_operator;
GRANT SELECT(attempts),UPDATE(attempts) ON TABLE public.outbox_parked TO release_operator;
GRANT UPDATE(next_attempt_at) ON TABLE public.outbox_parked TO release_operator;
GRANT SELECT(last_error),UPDATE(last_error) ON TABLE public.outbox_parked TO release_operator;
GRANT UPDATE(failed_at) ON TABLE public.outbox_parked TO release_operator;
GRANT UPDATE(trying) ON TABLE public.outbox_parked TO release_operator;
GRANT UPDATE(crashes) ON TABLE public.outbox_parked TO release_operator;
GRANT UPDATE(command_due) ON TABLE public.outbox_parked TO release_operator;
GRANT SELECT,INSERT ON TABLE public.outbox_progress TO release_operator;
GRANT SELECT ON TABLE public.outbox_released TO release_operator;
GRANT SELECT(seq) ON TABLE public.outbox_released TO release_operator;
GRANT SELECT(id) ON TABLE public.outbox_released TO release_operator;
GRANT SELECT(published_at) ON TABLE public.outbox_released TO release_operator;
GRANT SELECT(attempts) ON TABLE public.outbox_released TO release_operator;
GRANT SELECT ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(owner) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(pid) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(epoch) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(owned_since) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(heartbeat) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(done) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(target) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(last_seq) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(tick_id) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(wanted) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(wanted_at) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(barrier_paused) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(barrier) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(barrier_reached) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(slot) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(slot_snapshot) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(slot_ends) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(slot_error) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(breaker) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(breaker_reason) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(top_up_error) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(crashes) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(crash_guard_seq) ON TABLE public.outbox_shards TO release_operator;
GRANT UPDATE(crash_guard_crashes) ON TABLE public.outbox_shards TO release_operator;
GRANT SELECT ON TABLE public.outbox_events TO release_operator;
GRANT SELECT ON SEQUENCE public.outbox_has_waited TO PUBLIC;
GRANT SELECT ON TABLE public.outbox_migrations TO release_operator;
GRANT SELECT ON TABLE public.outbox_replays TO release_operator;
GRANT SELECT ON TABLE public.outbox_writers TO release_operator;
