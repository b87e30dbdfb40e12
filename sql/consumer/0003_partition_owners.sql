-- Locks: none
-- Which process handles the events of a partition. A process removes its rows when it ends or releases the partition;
-- a row of another process means that it crashed, possibly because of an event: see partition_owners.py. One statement;
-- running it again changes nothing.
DO $owners$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('outbox consumer migrate'));
    IF EXISTS (SELECT FROM consumer_migrations WHERE name = '0003_partition_owners') THEN
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

    INSERT INTO consumer_migrations (name) VALUES ('0003_partition_owners');
END $owners$;
