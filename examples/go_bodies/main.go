// Large payloads in Go, in a directory: the object first, then the event that refers to it.
//
//	mkdir bodies
//	outbox local run -- sh -c 'outbox migrate && cd examples/go_bodies &&
//	    PGSSLMODE=disable go run . write ../../bodies 7 invoice.pdf application/pdf'
//
// prints the payload of the event, which a consumer gets as the value of the message:
//
//	go run . read ../../bodies < payload.json > invoice.pdf
package main

import (
	"crypto/rand"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"regexp"

	_ "github.com/lib/pq"
)

// The day of the transaction, whatever the clock of this machine says. The object's key begins with it, and
// `outbox bodies sweep` looks there for events that refer to the object.
const day = `SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD')`

const insert = `
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
VALUES ('order', $1, 'order.invoiced', $2)`

// A key of another form could lead out of the directory.
var key = regexp.MustCompile(`^\d{4}-\d\d-\d\d/[0-9A-Za-z][0-9A-Za-z._-]{0,199}$`)

type reference struct {
	Key         string `json:"key"`
	Size        int    `json:"size"`
	SHA256      string `json:"sha256"`
	ContentType string `json:"content-type"`
}

type payload struct {
	Body *reference `json:"outbox-body"`
}

// store writes the object, and returns the payload of its event. Everything is on the disk when it returns.
func store(directory, day string, body []byte, contentType string) ([]byte, error) {
	random := make([]byte, 16)
	if _, err := rand.Read(random); err != nil {
		return nil, err
	}
	// Never the name of another object, and never one that is written again.
	name := day + "/" + hex.EncodeToString(random)
	path := filepath.Join(directory, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o666)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	if _, err := file.Write(body); err != nil {
		return nil, err
	}
	if err := file.Sync(); err != nil {
		return nil, err
	}
	for _, each := range []string{filepath.Dir(path), directory} {
		if err := sync(each); err != nil {
			return nil, err
		}
	}
	sum := sha256.Sum256(body)
	return json.Marshal(payload{&reference{name, len(body), hex.EncodeToString(sum[:]), contentType}})
}

func sync(directory string) error {
	opened, err := os.Open(directory)
	if err != nil {
		return err
	}
	defer opened.Close()
	return opened.Sync()
}

// invoice writes the event of an order. The caller's transaction also writes the order.
func invoice(tx *sql.Tx, directory, order string, body []byte, contentType string) ([]byte, error) {
	var today string
	if err := tx.QueryRow(day).Scan(&today); err != nil {
		return nil, err
	}
	event, err := store(directory, today, body, contentType)
	if err != nil {
		return nil, err
	}
	_, err = tx.Exec(insert, order, string(event))
	return event, err
}

// load returns the body that an event refers to.
func load(directory string, value []byte) ([]byte, error) {
	var event payload
	if err := json.Unmarshal(value, &event); err != nil {
		return nil, err
	}
	if event.Body == nil || !key.MatchString(event.Body.Key) {
		return nil, fmt.Errorf("the payload is no reference: %.100s", value)
	}
	body, err := os.ReadFile(filepath.Join(directory, event.Body.Key))
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(body)
	if len(body) != event.Body.Size || hex.EncodeToString(sum[:]) != event.Body.SHA256 {
		return nil, fmt.Errorf("the body %s is not the one that was written", event.Body.Key)
	}
	return body, nil
}

func write(directory, order, file, contentType string) error {
	body, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	db, err := sql.Open("postgres", os.Getenv("OUTBOX_DSN"))
	if err != nil {
		return err
	}
	defer db.Close()
	tx, err := db.Begin()
	if err != nil {
		return err
	}
	defer tx.Rollback() // nothing is left to do after a commit
	event, err := invoice(tx, directory, order, body, contentType)
	if err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	fmt.Printf("%s\n", event)
	return nil
}

func read(directory string) error {
	value, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	body, err := load(directory, value)
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(body)
	return err
}

func main() {
	log.SetFlags(0)
	var err error
	switch arguments := os.Args[1:]; {
	case len(arguments) == 5 && arguments[0] == "write":
		err = write(arguments[1], arguments[2], arguments[3], arguments[4])
	case len(arguments) == 2 && arguments[0] == "read":
		err = read(arguments[1])
	default:
		log.Fatal("usage: bodies write DIRECTORY ORDER FILE CONTENT-TYPE | read DIRECTORY")
	}
	if err != nil {
		log.Fatal(err)
	}
}
