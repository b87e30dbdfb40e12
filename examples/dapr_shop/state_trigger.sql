-- Events of what an application keeps in Dapr's state store (state.postgresql, version 2), written by a trigger in the
-- transaction of each save: single saves, state transactions, and deletions, also those of expired state.
--   psql "$OUTBOX_DSN" -f state_trigger.sql       # after the first start of the sidecar, which creates the table `state`
-- The table and the outbox are in one database, and the sidecar's role may write events:
-- SELECT outbox_grant_writer('role_of_the_sidecar').
CREATE OR REPLACE FUNCTION dapr_order_changed() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    -- Dapr's key is the id of the application and the key that it chose, here `shop||order-42`.
    prefix CONSTANT text := 'shop||order-';
    saved  state := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
BEGIN
    -- Other keys, such as the markers of Dapr's own outbox, are none of the consumers' business.
    IF starts_with(saved.key, prefix) THEN
        PERFORM outbox_emit(
            'order',
            substr(saved.key, length(prefix) + 1),
            CASE TG_OP WHEN 'INSERT' THEN 'order.created' WHEN 'UPDATE' THEN 'order.changed' ELSE 'order.removed' END,
            -- A value that is not JSON fails the save: choose keys whose values are.
            CASE TG_OP WHEN 'DELETE' THEN 'null' ELSE convert_from(saved.value, 'UTF8')::jsonb END);
    END IF;
    RETURN NULL;
END $$;

-- After the change: the row is locked then, so that events have the order of the commits.
CREATE OR REPLACE TRIGGER dapr_order_changed AFTER INSERT OR UPDATE OR DELETE ON state
FOR EACH ROW EXECUTE FUNCTION dapr_order_changed();
