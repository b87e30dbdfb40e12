// A shop in Go. It uses one table and one function of Outbox Pipelines.
//
//	outbox local run -- sh -c 'outbox migrate && cd examples/go_shop && PGSSLMODE=disable go run .'
//
// A request is one transaction. A repeated request with the same Idempotency-Key changes nothing and returns
// the same event's id.
package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"

	_ "github.com/lib/pq"
)

const table = `
CREATE TABLE IF NOT EXISTS go_orders (
    id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    total int    NOT NULL,
    state text   NOT NULL DEFAULT 'placed'
)`

// With an idempotency key: a duplicate is a result, not an error.
const emit = `
SELECT id, duplicate
FROM outbox_emit('order', $1, 'order.placed', $2, idempotency_key => $3, correlation_id => $4)`

// Without one a plain INSERT is enough. The database sets seq, tx and created_at.
const insert = `
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, correlation_id)
VALUES ('order', $1, 'order.parcel_shipped', $2, $3)`

var (
	errDuplicate = errors.New("the order of the first request is there")
	errPayment   = errors.New("the payment is refused")
	errNoOrder   = errors.New("there is no such order")
)

type shop struct{ db *sql.DB }

type placed struct {
	Event     string `json:"event"`
	Duplicate bool   `json:"duplicate"`
}

// inTransaction commits what work does, or rolls all of it back.
func (s shop) inTransaction(ctx context.Context, work func(*sql.Tx) error) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // nothing is left to do after a commit
	if err := work(tx); err != nil {
		return err
	}
	return tx.Commit()
}

func (s shop) place(w http.ResponseWriter, r *http.Request) {
	var order struct {
		Total int `json:"total"`
	}
	if err := json.NewDecoder(r.Body).Decode(&order); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if r.Header.Get("Idempotency-Key") == "" {
		http.Error(w, "give an Idempotency-Key", http.StatusBadRequest)
		return
	}
	key := "go " + r.Header.Get("Idempotency-Key")
	payload, _ := json.Marshal(order)
	w.Header().Set("Content-Type", "application/json")
	var answer placed
	err := s.inTransaction(r.Context(), func(tx *sql.Tx) error {
		var id int64
		row := tx.QueryRowContext(r.Context(), "INSERT INTO go_orders (total) VALUES ($1) RETURNING id", order.Total)
		if err := row.Scan(&id); err != nil {
			return err
		}
		row = tx.QueryRowContext(r.Context(), emit, fmt.Sprint(id), string(payload), key, requestID(r))
		if err := row.Scan(&answer.Event, &answer.Duplicate); err != nil {
			return err
		}
		if answer.Duplicate {
			return errDuplicate
		}
		if order.Total > 1000 {
			return errPayment
		}
		return nil
	})
	switch {
	case err == nil:
		w.WriteHeader(http.StatusCreated)
	case errors.Is(err, errDuplicate):
	default:
		refuse(w, err)
		return
	}
	json.NewEncoder(w).Encode(answer)
}

func (s shop) ship(w http.ResponseWriter, r *http.Request) {
	order := r.URL.Query().Get("order")
	var parcels []string
	if err := json.NewDecoder(r.Body).Decode(&parcels); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	err := s.inTransaction(r.Context(), func(tx *sql.Tx) error {
		// The row first: with its lock, the events of an order have the order of the commits.
		done, err := tx.ExecContext(r.Context(), "UPDATE go_orders SET state = 'shipped' WHERE id = $1", order)
		if err != nil {
			return err
		}
		if found, _ := done.RowsAffected(); found == 0 {
			return errNoOrder
		}
		for _, parcel := range parcels {
			payload, _ := json.Marshal(map[string]string{"parcel": parcel})
			if _, err := tx.ExecContext(r.Context(), insert, order, string(payload), requestID(r)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		refuse(w, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func refuse(w http.ResponseWriter, err error) {
	status := http.StatusInternalServerError
	switch {
	case errors.Is(err, errPayment):
		status = http.StatusPaymentRequired
	case errors.Is(err, errNoOrder):
		status = http.StatusNotFound
	}
	http.Error(w, err.Error(), status)
}

// requestID is NULL if the request has none.
func requestID(r *http.Request) sql.NullString {
	id := r.Header.Get("X-Request-Id")
	return sql.NullString{String: id, Valid: id != ""}
}

func main() {
	db, err := sql.Open("postgres", os.Getenv("OUTBOX_DSN"))
	if err != nil {
		log.Fatal(err)
	}
	if _, err := db.Exec(table); err != nil {
		log.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:"+os.Getenv("PORT"))
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("listening on http://%s", listener.Addr())
	shop := shop{db}
	http.HandleFunc("/orders", shop.place)
	http.HandleFunc("/parcels", shop.ship)
	log.Fatal(http.Serve(listener, nil))
}
