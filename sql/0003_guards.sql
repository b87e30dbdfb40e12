-- What keeps the outbox append-only and its order true. Each guard has a WHEN, so that an honest insert
-- pays for no function call.

-- Only the owner, and only having said so in the transaction, may do what the guards refuse.
CREATE FUNCTION outbox_owner_declared(relation oid, setting text) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT coalesce(current_setting(setting, true) = 'on', false)
       AND pg_has_role(current_user, (SELECT relowner FROM pg_class WHERE oid = relation), 'USAGE')
$$;

CREATE FUNCTION outbox_refuse_own_order() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF NEW.tx <> pg_current_xact_id() OR NEW.seq <> currval('outbox_seq') THEN
        RAISE EXCEPTION 'outbox: seq and tx are drawn by the database'
            USING ERRCODE = 'check_violation',
                  HINT = 'Leave both columns out of the INSERT: the relay finds events by them.';
    END IF;
    IF NEW.created_at > transaction_timestamp() OR NOT outbox_owner_declared(TG_RELID, 'outbox.backfill') THEN
        RAISE EXCEPTION 'outbox: created_at is the time of the transaction'
            USING ERRCODE = 'check_violation',
                  HINT = 'Leave created_at out of the INSERT. For a backfill of past days the owner of the '
                         'table says SET LOCAL outbox.backfill = on first.';
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER outbox_own_order BEFORE INSERT ON outbox FOR EACH ROW
WHEN (NEW.created_at <> transaction_timestamp() OR NEW.tx <> pg_current_xact_id()
      OR NEW.seq <> currval('outbox_seq'))
EXECUTE FUNCTION outbox_refuse_own_order();

-- Kafka takes messages of up to about 1 MB, so every column has a limit on the length of its text. A few bytes of
-- JSON can be a long text (the number 1e131071 is stored in 12 bytes), so the text itself is measured. A value of
-- up to 100 bytes that is not compressed has at most five numbers, below the limit however long they are.
CREATE FUNCTION outbox_refuse_large_event() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    size   int := octet_length(NEW.payload::text);
    column_name text;
BEGIN
    IF size > 1000000 THEN
        RAISE EXCEPTION 'outbox: the payload of % has % bytes, more than 1000000', left(NEW.event_type, 100), size
            USING ERRCODE = 'program_limit_exceeded',
                  HINT = 'Store it elsewhere (a table, object storage) and send the reference.';
    END IF;
    size := octet_length(NEW.headers::text);
    IF size > 100000 THEN
        RAISE EXCEPTION 'outbox: the headers of % have % bytes, more than 100000', left(NEW.event_type, 100), size
            USING ERRCODE = 'program_limit_exceeded',
                  HINT = 'Headers are for routing and tracing: put content into the payload.';
    END IF;
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
    RETURN NEW;
END $$;

CREATE TRIGGER outbox_size_limit BEFORE INSERT ON outbox FOR EACH ROW
WHEN ((pg_column_size(NEW.payload) > 100 OR pg_column_compression(NEW.payload) IS NOT NULL)
      AND octet_length(NEW.payload::text) > 1000000
      OR octet_length(NEW.headers::text) > 100000
      OR octet_length(NEW.aggregate_type) + octet_length(NEW.aggregate_id) + octet_length(NEW.event_type) > 10000
      OR octet_length(NEW.idempotency_key) > 10000 OR octet_length(NEW.correlation_id) > 10000
      OR octet_length(NEW.causation_id) > 10000 OR octet_length(NEW.traceparent) > 10000)
EXECUTE FUNCTION outbox_refuse_large_event();

-- A known key raises unique_violation, as a UNIQUE column would. outbox_emit has claimed the key for this
-- very event, in this transaction, before it inserts; a client that repeats id and key has not.
CREATE FUNCTION outbox_claim_key() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    wanted uuid := outbox_key(NEW.idempotency_key);
BEGIN
    PERFORM FROM outbox_keys k
    WHERE k.key = wanted AND k.event_id = NEW.id AND k.created_at = NEW.created_at;
    IF NOT FOUND THEN
        INSERT INTO outbox_keys (key, event_id) VALUES (wanted, NEW.id);
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER outbox_unique_key BEFORE INSERT ON outbox FOR EACH ROW
WHEN (NEW.idempotency_key IS NOT NULL)
EXECUTE FUNCTION outbox_claim_key();

CREATE FUNCTION outbox_refuse_change() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
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

-- Each closed day has a trigger of its own with this: what is archived stays what it was.
CREATE FUNCTION outbox_refuse_late_insert() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'outbox: % is closed, it takes no event of %', TG_TABLE_NAME, NEW.created_at
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = 'The transaction began too long ago, or the clock of the database went back. Run it again; '
                     'where the clock had been ahead, see outbox partitions reopen.';
END $$;

-- Everything that a writing application needs, and nothing more: SELECT outbox_grant_writer('app').
CREATE FUNCTION outbox_grant_writer(writer regrole) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO %s', current_schema(), writer);
    EXECUTE format('GRANT USAGE ON SEQUENCE outbox_seq TO %s', writer);
    EXECUTE format(
        'GRANT INSERT (id, aggregate_type, aggregate_id, event_type, payload, headers, idempotency_key, '
        'correlation_id, causation_id, traceparent, version), SELECT (id, seq) ON outbox TO %s', writer);
    EXECUTE format('GRANT INSERT (key, event_id), SELECT ON outbox_keys TO %s', writer);
    -- PUBLIC may call functions, but in hardened databases.
    EXECUTE format('GRANT EXECUTE ON FUNCTION outbox_uuidv7, outbox_id_after, outbox_key, outbox_owner_declared, '
                   'outbox_emit, outbox_emit_many TO %s', writer);
END $$;

-- Everything that `outbox relay` and `outbox status` need: SELECT outbox_grant_relay('relay'). As a role that
-- does not own the table the relay makes no partitions: `outbox migrate` or the maintenance does.
CREATE FUNCTION outbox_grant_relay(relay regrole) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO %s', current_schema(), relay);
    EXECUTE format('GRANT SELECT ON outbox, outbox_shards, outbox_progress, outbox_parked, outbox_days, '
                   'outbox_migrations, outbox_events TO %s', relay);
    EXECUTE format('GRANT SELECT ON outbox_audit TO %s', relay);
    EXECUTE format('GRANT UPDATE ON outbox_shards TO %s', relay);
    EXECUTE format('GRANT INSERT ON outbox_progress TO %s', relay);
    EXECUTE format('GRANT INSERT, UPDATE, DELETE ON outbox_parked TO %s', relay);
    EXECUTE format('GRANT INSERT, SELECT ON outbox_released TO %s', relay);
END $$;

-- Everything that a person needs who looks after the outbox: SELECT outbox_grant_operator('alice').
CREATE FUNCTION outbox_grant_operator(operator regrole) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO %s', current_schema(), operator);
    EXECUTE format('GRANT SELECT ON outbox, outbox_shards, outbox_progress, outbox_parked, outbox_released, '
                   'outbox_audit, outbox_days, outbox_migrations, outbox_events TO %s', operator);
    EXECUTE format('GRANT UPDATE ON outbox_parked TO %s', operator);
    EXECUTE format('GRANT INSERT, UPDATE, DELETE ON outbox_shards TO %s', operator);
    EXECUTE format('GRANT INSERT ON outbox_audit TO %s', operator);
END $$;

INSERT INTO outbox_migrations (name) VALUES ('0003_guards');
