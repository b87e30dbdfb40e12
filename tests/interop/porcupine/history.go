package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
)

// A history file has one JSON array a line: a kind of fact, and the fact. tests/history/record.py names the fields.
type history struct {
	delivery string
	consumer string
	appends  []appended
	messages []message
	effects  []effect
	faults   []fault
}

type appended struct {
	kind, account string
	n             int
	token         string
	at            *float64
}

type message struct {
	kind      string
	partition int
	offset    int64
	key       string
	n         int
	token, id string
	at        float64
}

type effect struct {
	kind, account string
	n             int
	token         string
}

type fault struct {
	name      string
	at, until float64
	disturbs  bool
}

func read(path string) (history, error) {
	var found history
	file, err := os.Open(path)
	if err != nil {
		return found, err
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<26)
	for number := 1; lines.Scan(); number++ {
		if err := found.add(lines.Bytes()); err != nil {
			return found, fmt.Errorf("line %d: %w", number, err)
		}
	}
	if found.delivery == "" {
		return found, fmt.Errorf("the line of the run is missing")
	}
	return found, lines.Err()
}

func (h *history) add(line []byte) error {
	var kind string
	var fact json.RawMessage
	if err := fields(line, &kind, &fact); err != nil {
		return err
	}
	switch kind {
	case "run":
		var run struct{ Delivery, Consumer string }
		err := json.Unmarshal(fact, &run)
		h.delivery, h.consumer = run.Delivery, run.Consumer
		return err
	case "committed":
		var e appended
		err := fields(fact, &e.kind, &e.account, &e.n, &e.token, &e.at)
		h.appends = append(h.appends, e)
		return err
	case "messages":
		var m message
		err := fields(fact, &m.kind, &m.partition, &m.offset, &m.key, &m.n, &m.token, &m.id, &m.at)
		h.messages = append(h.messages, m)
		return err
	case "effects":
		var e effect
		err := fields(fact, &e.kind, &e.account, &e.n, &e.token)
		h.effects = append(h.effects, e)
		return err
	case "faults":
		var f fault
		err := fields(fact, &f.name, &f.at, &f.until, &f.disturbs)
		h.faults = append(h.faults, f)
		return err
	}
	return nil
}

// fields reads a JSON array of exactly these values.
func fields(text []byte, targets ...any) error {
	var parts []json.RawMessage
	if err := json.Unmarshal(text, &parts); err != nil {
		return err
	}
	if len(parts) != len(targets) {
		return fmt.Errorf("%d fields in place of %d: %.200s", len(parts), len(targets), text)
	}
	for i, target := range targets {
		if err := json.Unmarshal(parts[i], target); err != nil {
			return err
		}
	}
	return nil
}
