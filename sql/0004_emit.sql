-- The call for every language: SELECT * FROM outbox_emit('order', '42', 'order.placed', '{"total": 5}').
-- One row: the event's id and seq; for a known idempotency key nothing is inserted, `duplicate` is true
-- and `id` is that of the event which had the key first.
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
    OUT id          uuid,
    OUT seq         bigint,
    OUT duplicate   boolean
) LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_variable
BEGIN
    duplicate := false;
    IF idempotency_key IS NOT NULL THEN
        INSERT INTO outbox_keys (key, event_id) VALUES (outbox_key(idempotency_key), outbox_uuidv7())
        ON CONFLICT ON CONSTRAINT outbox_keys_pkey DO NOTHING
        RETURNING event_id INTO id;
        IF id IS NULL THEN
            duplicate := true;
            SELECT k.event_id INTO id FROM outbox_keys k WHERE k.key = outbox_key(idempotency_key);
            RETURN;
        END IF;
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
    END IF;
END $$;

INSERT INTO outbox_migrations (name) VALUES ('0004_emit');
