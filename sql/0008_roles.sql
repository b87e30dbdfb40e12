-- Locks: none
-- Rights: a function for each kind of role. Owners call them; repeating a grant changes nothing.

-- Raises where a grant has given nothing: PostgreSQL only warns if the caller may not pass a right on, as for a schema of
-- another owner.
CREATE FUNCTION outbox_require_grants(grantee regrole, readable text[], callable text[]) RETURNS void LANGUAGE plpgsql AS $$
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

-- Everything that a writing application needs, and nothing more: SELECT outbox_grant_writer('app'). A grant with
-- other options replaces the earlier ones.
--   aggregate_types  it may write only events of these types
--   key_namespace    its idempotency keys are separate: another writer's key of the same text is another key
--   own_ids          it may choose ids. Consumers skip an event whose id they have handled: only for a writer
--                    that is trusted with the events of all others
CREATE FUNCTION outbox_grant_writer(
    writer regrole, aggregate_types text[] DEFAULT NULL, key_namespace text DEFAULT NULL, own_ids boolean DEFAULT false
) RETURNS void LANGUAGE plpgsql AS $$
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

-- The columns of a table that a role may update: all except those that are named, and those of an event. The content
-- of an event never changes.
CREATE FUNCTION outbox_columns(relation regclass, VARIADIC without text[] DEFAULT '{}') RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute
    WHERE attrelid = relation AND attnum > 0 AND NOT attisdropped AND attname <> ALL (without)
      AND attname <> ALL (SELECT attname FROM pg_attribute WHERE attrelid = 'outbox'::regclass)
$$;

-- Everything that `outbox relay` and `outbox status` need: SELECT outbox_grant_relay('relay'). A relay whose role
-- does not own the table creates no partitions: `outbox migrate` or the maintenance does.
CREATE FUNCTION outbox_grant_relay(relay regrole) RETURNS void LANGUAGE plpgsql AS $$
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

-- Everything that an operator needs: SELECT outbox_grant_operator('alice').
CREATE FUNCTION outbox_grant_operator(operator regrole) RETURNS void LANGUAGE plpgsql AS $$
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

-- Reads events and their status, also of dead letters of dropped days: SELECT outbox_grant_analyst('bob').
CREATE FUNCTION outbox_grant_analyst(analyst regrole) RETURNS void LANGUAGE plpgsql AS $$
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

SELECT outbox_protect_functions();

INSERT INTO outbox_migrations (name) VALUES ('0008_roles');
