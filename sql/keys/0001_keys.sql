-- Locks: none
-- The data keys of subjects, and whose were destroyed: for a database apart from the outbox. Wrapped keys alone are here,
-- never the master key. One statement, so that every client creates all of it or nothing; running it again changes nothing.
--
-- The row of a subject stays. Without a key it is a tombstone: the subject gets no other. Writers and readers ask by
-- functions: neither can list subjects, change a row, or end a key.
DO $keys$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('outbox keys migrate'));
    IF to_regclass('subject_keys') IS NOT NULL THEN
        RETURN;
    END IF;

    -- Every process with keys looks here; it names files only.
    CREATE TABLE key_store_migrations (
        name text PRIMARY KEY,
        applied_at timestamptz NOT NULL DEFAULT now(),
        needs text -- the first version that runs with this file, if versions without it must not
    );
    GRANT SELECT ON key_store_migrations TO PUBLIC;
    CREATE TABLE key_store (
        only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
        master_key text NOT NULL CHECK (master_key <> '') -- the id of the one that wraps new keys
    );
    CREATE TABLE subject_keys (
        key_id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
        subject text NOT NULL UNIQUE CHECK (octet_length(subject) BETWEEN 1 AND 500),
        wrapped bytea -- NULL: destroyed
            CONSTRAINT wrapped_key_has_32_bytes_or_more CHECK (octet_length(wrapped) >= 32),
        -- The id of the master key: who has that one, and cannot unwrap, knows that the row is damaged.
        wrapped_by text,
        created_at timestamptz NOT NULL DEFAULT now(),
        forgotten_at timestamptz,
        forgotten_by text,
        reason text,
        CONSTRAINT a_reason_is_given CHECK ((wrapped IS NULL) = (reason IS NOT NULL) AND reason ~ '\S'),
        CHECK ((wrapped IS NULL) = (forgotten_at IS NOT NULL) AND (wrapped IS NULL) = (wrapped_by IS NULL))
    -- A destroyed key leaves the table at the next autovacuum, also if who destroys it may not run VACUUM.
    ) WITH (autovacuum_vacuum_threshold = 0, autovacuum_vacuum_scale_factor = 0);
    CREATE INDEX subject_keys_forgotten ON subject_keys (forgotten_at) WHERE wrapped IS NULL;

    -- They run with the owner's rights. Their bodies are parsed here, whatever the caller's search_path is.
    EXECUTE $create$
        CREATE FUNCTION subject_keys_find(subjects text[])
        RETURNS TABLE (subject text, key_id uuid, wrapped bytea, wrapped_by text) LANGUAGE sql STABLE SECURITY DEFINER
        BEGIN ATOMIC
            SELECT k.subject, k.key_id, k.wrapped, k.wrapped_by FROM subject_keys k WHERE k.subject = ANY (subjects);
        END $create$;
    -- The key of each subject: the given one, or the one that it has. The update changes nothing: it returns the row of a
    -- concurrent insert, which a later statement of the same snapshot would not see. In order, against deadlocks.
    -- No rows: another master key is current. The lock lets `keys rewrap` change that one only when no insert is open
    -- whose key it would not see.
    EXECUTE $create$
        CREATE FUNCTION subject_keys_add(subjects text[], proposed bytea[], master text)
        RETURNS TABLE (subject text, key_id uuid, wrapped bytea, wrapped_by text) LANGUAGE sql SECURITY DEFINER
        BEGIN ATOMIC
            WITH now AS MATERIALIZED (SELECT master_key FROM key_store WHERE master_key = master FOR SHARE)
            INSERT INTO subject_keys AS k (subject, wrapped, wrapped_by)
            SELECT s, w, master_key FROM now, unnest(subjects, proposed) AS given (s, w) ORDER BY s
            ON CONFLICT (subject) DO UPDATE SET subject = excluded.subject
            RETURNING k.subject, k.key_id, k.wrapped, k.wrapped_by;
        END $create$;
    EXECUTE $create$
        CREATE FUNCTION subject_keys_read(ids uuid[])
        RETURNS TABLE (key_id uuid, wrapped bytea, wrapped_by text) LANGUAGE sql STABLE SECURITY DEFINER
        BEGIN ATOMIC
            SELECT k.key_id, k.wrapped, k.wrapped_by FROM subject_keys k WHERE k.key_id = ANY (ids);
        END $create$;
    -- No row: the subject has no key. is_new: it was not forgotten before.
    EXECUTE $create$
        CREATE FUNCTION subject_keys_forget(forgotten text, actor text, why text)
        RETURNS TABLE (key_id uuid, forgotten_at timestamptz, forgotten_by text, reason text, is_new boolean)
        LANGUAGE sql SECURITY DEFINER
        BEGIN ATOMIC
            UPDATE subject_keys k
            SET wrapped = NULL, wrapped_by = NULL, forgotten_at = coalesce(k.forgotten_at, now()),
                reason = coalesce(k.reason, why), forgotten_by = coalesce(
                    k.forgotten_by, concat_ws(', ', nullif(btrim(actor), ''), 'role ' || session_user))
            WHERE k.subject = forgotten
            RETURNING k.key_id, k.forgotten_at, k.forgotten_by, k.reason, k.forgotten_at = now();
        END $create$;
    -- Rights: a function for each kind of role, called by the owner. SELECT subject_keys_grant('app', 'writer')
    --   writer    gets the key of a subject that it names, and makes it
    --   reader    gets a key by the id that is in an event
    --   operator  forgets subjects, and lists subjects and erasures, without keys
    CREATE FUNCTION subject_keys_grant(grantee regrole, kind text) RETURNS void LANGUAGE plpgsql AS $grant$
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
    END $grant$;

    REVOKE ALL ON FUNCTION subject_keys_find, subject_keys_add, subject_keys_read, subject_keys_forget, subject_keys_grant
        FROM PUBLIC;

    INSERT INTO key_store_migrations (name) VALUES ('0001_keys');
END $keys$;
