-- Locks: outbox_parked SHARE ROW EXCLUSIVE
-- Actions of relays and operators for which no grant on a table is narrow enough. They run with the owner's rights.

-- Parks events, with their whole content, from the table: the day that contains the rows may be dropped
-- later. No other role writes into outbox_parked, so that the events published later are those that were written. Those
-- that have a state and an error come first in `seqs`; all others wait. The range of seq keeps the join off the rest of the
-- day. Returns how many of them are in the table, and a number that two events have, here or among those that are parked;
-- unless each is there, once, nothing is parked.
-- After a crash an event may be parked already. ON CONFLICT would take a fifth longer for each: only one session at a time
-- parks events of a shard.
CREATE FUNCTION outbox_park(
    seqs bigint[], states text[], errors text[], start timestamptz, stop timestamptz, first bigint, last bigint,
    OUT present bigint, OUT twice bigint
) LANGUAGE sql SECURITY DEFINER AS $$
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

-- A relay makes dead letters and does not end them: it could otherwise release one that is not published.
CREATE FUNCTION outbox_refuse_action() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF pg_has_role(current_user, (SELECT relowner FROM pg_class WHERE oid = TG_RELID), 'USAGE') THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'outbox: % may not change a dead letter from % to %', current_user, OLD.state, NEW.state
        USING ERRCODE = 'insufficient_privilege',
              HINT = 'Operators replay and discard dead letters by outbox_act, which records it.';
END $$;

CREATE TRIGGER outbox_kept BEFORE UPDATE OF state ON outbox_parked FOR EACH ROW
WHEN (OLD.state <> NEW.state AND (OLD.state IN ('failed', 'discarded') OR NEW.state IN ('replaying', 'discarded')))
EXECUTE FUNCTION outbox_refuse_action();

-- These are published. A dead letter is not published unless it is replayed.
CREATE FUNCTION outbox_release(seqs bigint[]) RETURNS void LANGUAGE sql SECURITY DEFINER AS $$
    WITH gone AS (
        DELETE FROM outbox_parked
        WHERE seq = ANY (seqs) AND state IN ('waiting', 'retrying', 'replaying')
        RETURNING seq, id, attempts
    )
    INSERT INTO outbox_released (seq, id, attempts) SELECT seq, id, attempts FROM gone
    ON CONFLICT (seq, id) DO NOTHING
$$;

-- Replays or discards dead letters, and records it in the audit. Returns how many they were.
CREATE FUNCTION outbox_act(action text, seqs bigint[], reason text, filter jsonb, on_behalf_of text)
RETURNS int LANGUAGE plpgsql SECURITY DEFINER AS $$
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

-- Moves events into the outbox as if they were written now. First the insert: the guards look for the delayed row.
CREATE FUNCTION outbox_move(seqs bigint[]) RETURNS void LANGUAGE sql AS $$
    INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers, idempotency_key,
                        correlation_id, causation_id, traceparent, version)
    SELECT id, aggregate_type, aggregate_id, event_type, payload, headers, idempotency_key,
           correlation_id, causation_id, traceparent, version
    FROM outbox_delayed WHERE seq = ANY (seqs) ORDER BY due, seq;
    DELETE FROM outbox_delayed WHERE seq = ANY (seqs);
$$;

-- Moves due events into the outbox, in order, at most `most`; returns how many it has dealt with: if fewer, nothing more
-- is due. One caller at a time; another one returns 0. It never waits for a row: one that is about to be canceled is
-- left out, and so is what waits for it. An event that cannot be moved keeps the reason and is tried again after a
-- minute, or with `again` at once; only those that wait for it wait.
CREATE FUNCTION outbox_move_due(most int DEFAULT 500, again boolean DEFAULT false) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off SET lock_timeout = '100ms' AS $$
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

-- Removes delayed events with this id. Those that waited only for it are due now.
CREATE FUNCTION outbox_take_back(wanted uuid)
RETURNS TABLE (id uuid, seq bigint, aggregate_type text, aggregate_id text, event_type text, due timestamptz)
LANGUAGE plpgsql AS $$
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

-- Cancels a delayed event, in the transaction of the application; returns whether it was still there. Its key stays used.
CREATE FUNCTION outbox_cancel(id uuid) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER AS $$
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

-- The same for operators, with the record in the audit. Returns how many they were.
CREATE FUNCTION outbox_cancel_delayed(ids uuid[], reason text, on_behalf_of text) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER AS $$
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

-- Records the start of a replay; returns its id.
CREATE FUNCTION outbox_replay_begin(
    selection jsonb, target text, files jsonb, events bigint, last_seq bigint, reason text, on_behalf_of text,
    notes text[] DEFAULT '{}'
) RETURNS uuid LANGUAGE sql SECURITY DEFINER AS $$
    INSERT INTO outbox_replays (selection, target, files, events, last_seq, reason, on_behalf_of, notes)
    VALUES (outbox_replay_begin.selection, outbox_replay_begin.target, outbox_replay_begin.files,
            outbox_replay_begin.events, outbox_replay_begin.last_seq, outbox_replay_begin.reason,
            outbox_replay_begin.on_behalf_of, outbox_replay_begin.notes)
    RETURNING id
$$;

-- Moves a replay forward, or changes its state; returns its state. One that is done does not change, and of a
-- canceled one only how much it had sent, which its process reports last.
CREATE FUNCTION outbox_replay_advance(replay uuid, seq bigint, events bigint, state text, error text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER AS $$
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

-- One step of a change of the number of shards; called repeatedly until it is done. Every relay first settles
-- all that it has read and stops; then all publish exactly up to one snapshot; then the new shards start from it.
--   wait         for what `missing` names
--   nothing      the number is already the requested one
--   busy         a change to another number is in progress: `missing`
--   given up     canceled by another command
--   done
CREATE FUNCTION outbox_change_shards(
    wanted int, started boolean, on_behalf_of text, OUT step text, OUT missing text
) LANGUAGE plpgsql SECURITY DEFINER AS $$
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

-- Cancels a change: the relays continue as before.
CREATE FUNCTION outbox_keep_shards() RETURNS void LANGUAGE sql SECURITY DEFINER AS $$
    SELECT FROM outbox_shards ORDER BY shard FOR UPDATE;
    UPDATE outbox_shards
    SET wanted = NULL, wanted_at = NULL, barrier_paused = false, barrier_reached = false, barrier = NULL
    WHERE wanted IS NOT NULL
$$;

SELECT outbox_protect_functions();

INSERT INTO outbox_migrations (name) VALUES ('0007_actions');
