// Work, and the record that its event was handled, in one transaction (PostgreSQL by database/sql). The role needs
// GRANT INSERT ON processed_events. The caller commits the offset in Kafka afterwards; after an error it ends the process
// or seeks back to the event.
package main

import (
	"context"
	"database/sql"
)

func handle(ctx context.Context, db *sql.DB, eventID string, work func(*sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // nothing is left to do after a commit
	var isNew bool
	mark := tx.QueryRowContext(ctx, "SELECT processed_mark($1, $2)", eventID, "billing")
	if err := mark.Scan(&isNew); err != nil {
		return err
	}
	if isNew {
		if err := work(tx); err != nil {
			return err
		}
	}
	return tx.Commit()
}
