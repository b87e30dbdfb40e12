-- Which process handles the events of a partition. A process removes its rows when it ends or releases the partition;
-- a row of another process means that it crashed, possibly because of an event: see crash_guard.py. One statement;
-- running it again changes nothing.
DO $owners$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('outbox consumer migrate'));
    IF to_regclass('partition_owners') IS NOT NULL THEN
        RETURN;
    END IF;

    CREATE TABLE partition_owners (
        source text NOT NULL,
        consumer_group text NOT NULL,
        topic text NOT NULL,
        partition int NOT NULL,
        owner uuid NOT NULL, -- one run of one process
        crashes int NOT NULL DEFAULT 0, -- of owners, since the first events of one have passed
        owned_since timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (source, consumer_group, topic, partition)
    );
END $owners$;
