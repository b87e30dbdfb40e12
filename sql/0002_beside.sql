-- Locks: none
-- The small tables beside the outbox: positions, progress, parked and delayed events, keys, days.

-- Whether a position covers an event: (done, target, last_seq) has published everything that `done` sees
-- and, inside a tick, what `target` sees up to `last_seq`.
CREATE FUNCTION outbox_covers(done pg_snapshot, target pg_snapshot, last_seq bigint, tx xid8, seq bigint)
RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN pg_visible_in_snapshot(tx, done)
    OR coalesce(seq <= last_seq AND pg_visible_in_snapshot(tx, target), false);

-- The shard of an aggregate, for a given number of shards: a range of its lanes, so that an index finds it. A lane is the
-- number that the indexes of the outbox end with; its upper half counts.
CREATE FUNCTION outbox_shard_of(aggregate_type text, aggregate_id text, shards int)
RETURNS int LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ((((hashtextextended(aggregate_id, hashtext(aggregate_type)) >> 32) + 2147483648) * shards) >> 32)::int;

-- One row per shard: its owner and its position. Updated continuously, hence the free space for HOT updates
-- and an autovacuum that does not wait for a share of the table.
CREATE TABLE outbox_shards (
    shard             int PRIMARY KEY CHECK (shard >= 0),
    -- The number of shards; the same in all rows.
    shards            int         NOT NULL DEFAULT 1 CHECK (shards > shard),
    owner             text,
    -- The backend process in which the owner has the lock: any other process that has it is no relay.
    pid               int,
    epoch             bigint      NOT NULL DEFAULT 0,
    owned_since        timestamptz,
    heartbeat         timestamptz,
    done              pg_snapshot NOT NULL,
    target            pg_snapshot,
    last_seq          bigint,
    -- In exactly_once: the id that Kafka's own record of the progress must have to be valid.
    tick_id           uuid,
    -- A change of the number of shards: the requested number, and the last heartbeat of the request; this relay has
    -- settled all it had read and waits; the barrier where all meet; this relay has reached it.
    wanted            int         CHECK (wanted > 0),
    wanted_at         timestamptz,
    barrier_paused           boolean     NOT NULL DEFAULT false,
    barrier           pg_snapshot,
    barrier_reached          boolean     NOT NULL DEFAULT false,
    -- The slot that delivers events, and the snapshot from which on it does, unknown until the slot is made; NULL: events
    -- are read between snapshots. Whether the relay must stop reading the slot, because it is about to be dropped; why
    -- the relay could not read it.
    slot              text,
    slot_snapshot     pg_snapshot,
    slot_ends         boolean     NOT NULL DEFAULT false,
    slot_error        text,
    -- Whether this relay can reach Kafka, and the reason if not.
    breaker           text        NOT NULL DEFAULT 'closed' CHECK (breaker IN ('closed', 'open', 'half-open')),
    breaker_reason    text,
    -- Why the relay could not create the partitions of the coming days.
    top_up_error      text,
    -- How often in a row a relay of this shard crashed; the event that was sent alone because of that, and how often
    -- a relay crashed at it.
    crashes            int         NOT NULL DEFAULT 0,
    crash_guard_seq           bigint,
    crash_guard_crashes    int         NOT NULL DEFAULT 0,
    -- The database in which these transaction ids are valid.
    system_identifier bigint      NOT NULL,
    database          oid         NOT NULL,
    CONSTRAINT outbox_shards_slot CHECK (slot IS NOT NULL OR NOT slot_ends AND num_nonnulls(slot_snapshot, slot_error) = 0),
    CONSTRAINT outbox_shards_tick CHECK ((target IS NULL) = (last_seq IS NULL))
) WITH (fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

INSERT INTO outbox_shards (shard, done, system_identifier, database)
SELECT 0, pg_current_snapshot(), c.system_identifier, d.oid
FROM pg_control_system() c, pg_database d WHERE d.datname = current_database();

-- At most one row per second and shard: what had been published when. The position answers "published at"
-- for every event to a second, and the rows plot rate and latency.
CREATE TABLE outbox_progress (
    shard     int         NOT NULL,
    shards    int         NOT NULL DEFAULT 1,
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    done      pg_snapshot NOT NULL,
    target    pg_snapshot,
    last_seq  bigint,
    -- Published since the row before.
    events    bigint      NOT NULL CHECK (events > 0),
    -- Age of the last published event, in seconds.
    latency   double precision,
    PRIMARY KEY (shard, at)
);

-- Events that could not be published, and those of the same aggregate behind them, with their whole
-- content: it must outlive the partition.
--   waiting    behind another event of its aggregate
--   retrying   refused, or to be tried alone because its batch was refused
--   failed     the dead letter
--   replaying  a dead letter that an operator wants to be tried again
--   discarded  a dead letter that an operator discarded
CREATE TABLE outbox_parked (
    LIKE outbox,
    state           text        NOT NULL
                    CHECK (state IN ('waiting', 'retrying', 'failed', 'replaying', 'discarded')),
    -- How often it was refused, alone; an outage does not count.
    attempts        int         NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    next_attempt_at timestamptz,
    last_error      text,
    parked_at       timestamptz NOT NULL DEFAULT now(),
    failed_at       timestamptz,
    -- Sent to Kafka's client and not yet acknowledged; and how often the relay crashed in that state.
    trying          boolean     NOT NULL DEFAULT false,
    crashes          int         NOT NULL DEFAULT 0,
    -- A dead letter for which OUTBOX_DEAD_LETTER_COMMAND has yet to be run.
    command_due     boolean     NOT NULL DEFAULT false,
    -- Not the id: two events may have the same one, and neither may be lost.
    PRIMARY KEY (seq)
);
CREATE INDEX outbox_parked_id ON outbox_parked (id);
-- By a hash, because an index has no room for a long id.
CREATE INDEX outbox_parked_order ON outbox_parked (hashtextextended(aggregate_id, 0), seq);
CREATE INDEX outbox_parked_suspects ON outbox_parked (hashtextextended(aggregate_id, 0), seq) WHERE state <> 'waiting';
CREATE INDEX outbox_parked_failed ON outbox_parked (failed_at) WHERE state IN ('failed', 'replaying');
CREATE INDEX outbox_parked_commands ON outbox_parked (failed_at) WHERE command_due;
CREATE INDEX outbox_parked_trying ON outbox_parked (seq) WHERE trying;

-- When a parked event was published: the position had passed it before.
CREATE TABLE outbox_released (
    seq          bigint      NOT NULL,
    id           uuid        NOT NULL,
    published_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    attempts     int         NOT NULL,
    PRIMARY KEY (seq, id)
);

-- Events that are not due yet. From when they are due, `outbox_move_due` moves them into the outbox, in the order
-- (due, seq): there each is an ordinary event, with a new seq and the day of then. The columns of an event are those of
-- its emit.
CREATE TABLE outbox_delayed (
    LIKE outbox INCLUDING DEFAULTS,
    -- What its writer asked for; NULL: it only waits behind another event.
    deliver_after     timestamptz,
    -- From when on it is moved: not before the events of its aggregate that it waits for.
    due               timestamptz NOT NULL,
    -- Whether later events of the aggregate wait until it is in the outbox, or overtake it.
    later_events_wait boolean     NOT NULL,
    -- It could not be moved: why, and when that is tried again. Others do not wait for that.
    retry_at          timestamptz,
    last_error        text,
    -- Not the id, of which a writer that may choose ids can have two.
    PRIMARY KEY (seq)
);
CREATE INDEX outbox_delayed_id ON outbox_delayed (id);
CREATE INDEX outbox_delayed_due ON outbox_delayed (due, seq);
-- By a hash, because an index has no room for a long id.
CREATE INDEX outbox_delayed_waited_for ON outbox_delayed (hashtextextended(aggregate_id, 0), due)
    WHERE later_events_wait;
CREATE INDEX outbox_delayed_stuck ON outbox_delayed (hashtextextended(aggregate_id, 0))
    WHERE later_events_wait AND retry_at IS NOT NULL;
-- Whether an event for which later ones wait has ever been written: every INSERT into the outbox asks, and a sequence
-- answers sooner than a table, and before the transaction commits.
CREATE SEQUENCE outbox_has_waited AS bigint CACHE 1;
GRANT SELECT ON SEQUENCE outbox_has_waited TO PUBLIC;

-- Actions of operators: who, when, why, on which events. Only the functions below write it. The relay looks here
-- for new actions.
CREATE TABLE outbox_audit (
    number  bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The role that was logged in, as the database knows it; and the name on whose behalf it acted.
    actor   name        NOT NULL DEFAULT session_user,
    on_behalf_of text,
    action  text        NOT NULL CHECK (action IN ('replay', 'discard', 'shards', 'cancel')),
    reason  text        NOT NULL CHECK (reason <> ''),
    filter  jsonb       NOT NULL,
    -- Their seq.
    events  bigint[]    NOT NULL
);

-- Replays, which send published events again: who, when, why, which events, where to, and how far. Only functions write it.
CREATE TABLE outbox_replays (
    -- The header replay-id of its messages: of version 7, so that consumers keep their records of it by its day.
    id           uuid        PRIMARY KEY DEFAULT outbox_uuidv7(),
    started_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- As in outbox_audit.
    actor        name        NOT NULL DEFAULT session_user,
    on_behalf_of text,
    reason       text        NOT NULL CHECK (reason <> ''),
    selection    jsonb       NOT NULL,
    -- A template of the topics.
    target       text        NOT NULL,
    -- The archive files that it reads: the day, the name and the sha256 of each.
    files        jsonb       NOT NULL,
    -- What retention and redaction had changed in these files.
    notes        text[]      NOT NULL,
    -- How many events were selected at its start, and the highest seq at that time.
    events       bigint      NOT NULL,
    last_seq     bigint      NOT NULL,
    -- All selected events up to this seq are acknowledged, and how many these are.
    position     bigint      NOT NULL DEFAULT 0,
    sent         bigint      NOT NULL DEFAULT 0,
    state        text        NOT NULL DEFAULT 'running' CHECK (state IN ('running', 'stopped', 'done', 'canceled')),
    -- Why it stopped.
    error        text,
    progress_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Idempotency keys, written only by the guard and by outbox_emit. Not partitioned: a unique key over partitions
-- would apply within a day only. The key is the first 16 bytes of its sha256, after its namespace if its writer
-- has one: no text contains the separator byte.
CREATE TABLE outbox_keys (
    key        uuid PRIMARY KEY,
    event_id   uuid        NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);

-- Not IMMUTABLE: convert_to is STABLE, and PostgreSQL would call the function instead of inlining it. An INSERT with a key
-- would take 5 µs longer.
CREATE FUNCTION outbox_key(idempotency_key text, namespace text DEFAULT NULL) RETURNS uuid
LANGUAGE sql STABLE PARALLEL SAFE
RETURN encode(substring(sha256(
    coalesce(convert_to(namespace, 'UTF8') || '\x00'::bytea, ''::bytea) || convert_to(idempotency_key, 'UTF8'))
    FOR 16), 'hex')::uuid;

-- Writers that are restricted, or have separate idempotency keys: outbox_grant_writer.
CREATE TABLE outbox_writers (
    writer          name PRIMARY KEY,
    -- NULL: any.
    aggregate_types text[],
    key_namespace   text CHECK (key_namespace <> ''),
    CONSTRAINT outbox_writers_are_restricted CHECK (num_nonnulls(aggregate_types, key_namespace) > 0)
);

-- The states of a day: open -> closed -> archived -> dropped.
CREATE TABLE outbox_days (
    day             date PRIMARY KEY,
    state           text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'closed', 'archived', 'dropped')),
    -- The time from which its partition refuses every insert.
    sealed_at       timestamptz,
    closed_at       timestamptz,
    -- What was committed when the day was found published: a row that was written later, past the guards, was not.
    published       pg_snapshot,
    archived_at     timestamptz,
    -- When file and rows were last found equal.
    proven_at       timestamptz,
    dropped_at      timestamptz,
    -- The highest number of its events when it was closed: the sequence stays above it when the rows are dropped.
    last_seq        bigint,
    -- The number of its events, once it is archived.
    events          bigint,
    -- The digest of its manifest; while another one replaces it, the digests of both, with a space between them.
    manifest_sha256 text,
    -- The archive that has its file, by the identity that is stored there; the same for all days.
    archive         uuid,
    CONSTRAINT outbox_days_closed CHECK (state = 'open' OR closed_at >= sealed_at)
);

-- Changes of days in the archive: what was redacted, or removed by retention. The manifest of the day has the same.
CREATE TABLE outbox_archive_changes (
    -- The digest of the manifest that it led to, and of what it replaced.
    manifest_sha256        text        PRIMARY KEY,
    former_manifest_sha256 text        NOT NULL,
    former_sha256          text        NOT NULL,
    day                    date        NOT NULL,
    at                     timestamptz NOT NULL,
    changed_by             text        NOT NULL,
    reason                 text        NOT NULL CHECK (reason <> ''),
    kind                   text        NOT NULL CHECK (kind IN ('redacted', 'expired')),
    -- Paths of values, or aggregate types.
    names                  text[]      NOT NULL,
    events                 bigint      NOT NULL,
    rows_before            bigint      NOT NULL,
    rows_after             bigint      NOT NULL,
    -- NULL: the former file may still exist.
    former_deleted_at      timestamptz
);

-- The relay reads from here on: every day before is closed, or never was.
CREATE FUNCTION outbox_open_from() RETURNS date LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN bool_and(state = 'open') IS NOT false THEN '-infinity'
                ELSE least(min(day) FILTER (WHERE state = 'open'), max(day) FILTER (WHERE state <> 'open') + 1)
           END::date
    FROM outbox_days
$$;

-- The highest number that any event has had. The sequence must have reached it: see `outbox relay --rebase`.
CREATE FUNCTION outbox_last_seq() RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT greatest((SELECT max(seq) FROM outbox), (SELECT max(seq) FROM outbox_parked),
                    (SELECT max(seq) FROM outbox_released), (SELECT max(seq) FROM outbox_delayed),
                    (SELECT max(last_seq) FROM outbox_days), 0)
$$;

SELECT outbox_protect_functions();

INSERT INTO outbox_migrations (name) VALUES ('0002_beside');
