package main

import (
	"fmt"
	"sort"

	"github.com/anishathalye/porcupine"
)

// What a fault has caused may show this long after it is over, in seconds.
const aftermath = 10.0

// The broker's clock has milliseconds: a message may be this much later than its time says.
const tick = 0.001

type action int

const (
	write action = iota
	begin
	deliver
	finish
	end
)

// An operation on one aggregate. The deliveries of one observer follow each other.
type operation struct {
	id        int
	action    action
	event     int    // the n-th event of the aggregate; 0: none of its events
	partition int    // of the topic
	anomaly   string // why it is none of its events
	name      string
}

// The specification: a log to which events are appended in their order, and one observer who sees each of them,
// in this order.
type state struct {
	written   int
	delivered int
	faults    int // in progress
	excused   int // events delivered before the end of a fault
	partition int
}

// A history of one aggregate as one observer saw it.
type view struct {
	name       string
	redelivers bool
	what       string // "write" or "effect", for the names of anomalies
	operations []operation
	events     []porcupine.Event
}

func step(redelivers bool) func(s, input, output any) (bool, any) {
	return func(s, input, output any) (bool, any) {
		now, op := s.(state), input.(operation)
		switch op.action {
		case write:
			ok := op.event == now.written+1
			now.written++
			return ok, now
		case begin:
			now.faults++
		case finish:
			now.faults--
			now.excused = now.delivered
		case end:
			return now.delivered == now.written, now
		case deliver:
			if op.event == 0 || now.delivered > 0 && op.partition != now.partition {
				return false, now
			}
			if op.event <= now.delivered {
				return redelivers && (now.faults > 0 || op.event <= now.excused), now
			}
			ok := op.event == now.delivered+1 && op.event <= now.written
			now.delivered, now.partition = op.event, op.partition
			return ok, now
		}
		return true, now
	}
}

type aggregate struct{ kind, account string }

// views divides a history: an aggregate of it is a log of its own.
func views(h history) []*view {
	tokens := map[string]appended{}
	appends := map[aggregate][]appended{}
	for _, event := range h.appends {
		tokens[event.token] = event
		key := aggregate{event.kind, event.account}
		appends[key] = append(appends[key], event)
	}
	messages, effects := map[aggregate][]message{}, map[aggregate][]effect{}
	for _, each := range h.messages {
		key := aggregate{each.kind, each.key}
		messages[key] = append(messages[key], each)
		appends[key] = append(appends[key], nil...)
	}
	for _, each := range h.effects {
		key := aggregate{each.kind, each.account}
		effects[key] = append(effects[key], each)
		appends[key] = append(appends[key], nil...)
	}
	var found []*view
	for key, events := range appends {
		name := key.kind + "/" + key.account
		sort.Slice(events, func(i, j int) bool { return events[i].n < events[j].n })
		resolve := func(n int, token string) (int, string) {
			event, known := tokens[token]
			if !known {
				return 0, "aborted read"
			}
			if event.kind != key.kind || event.account != key.account || event.n != n {
				return 0, "phantom"
			}
			return n, ""
		}
		found = append(found, topic(h, name, events, messages[key], resolve))
		if h.consumer != "" {
			found = append(found, handler(name, events, effects[key], resolve))
		}
	}
	sort.Slice(found, func(i, j int) bool { return found[i].name < found[j].name })
	return found
}

type moment struct {
	at        float64
	operation operation
}

func topic(
	h history, name string, events []appended, messages []message, resolve func(int, string) (int, string),
) *view {
	redelivers := h.delivery == "at_least_once"
	var moments []moment
	for _, event := range events {
		at := 0.0
		if event.at != nil {
			at = *event.at - tick
		}
		moments = append(moments, moment{at, operation{action: write, event: event.n}})
	}
	for _, each := range h.faults {
		if each.disturbs && redelivers {
			moments = append(moments,
				moment{each.at - tick, operation{action: begin}},
				moment{each.until + aftermath, operation{action: finish}})
		}
	}
	sort.SliceStable(messages, func(i, j int) bool {
		a, b := messages[i], messages[j]
		return a.partition < b.partition || a.partition == b.partition && a.offset < b.offset
	})
	ids, at := map[string]string{}, 0.0
	for _, each := range messages {
		// Its place in the partition counts, if the broker's clock was set back.
		at = max(at, each.at)
		n, anomaly := resolve(each.n, each.token)
		if first, known := ids[each.token]; known && first != each.id {
			n, anomaly = 0, "phantom"
		} else {
			ids[each.token] = each.id
		}
		about := fmt.Sprintf("%d at %d:%d", each.n, each.partition, each.offset)
		moments = append(moments, moment{at, operation{0, deliver, n, each.partition, anomaly, about}})
	}
	sort.SliceStable(moments, func(i, j int) bool {
		a, b := moments[i], moments[j]
		return a.at < b.at || a.at == b.at && a.operation.action < b.operation.action
	})
	return arrange(&view{name: name, redelivers: redelivers, what: "write"}, moments)
}

func handler(
	name string, events []appended, effects []effect, resolve func(int, string) (int, string),
) *view {
	var moments []moment
	for _, event := range events {
		moments = append(moments, moment{0, operation{action: write, event: event.n}})
	}
	for _, each := range effects {
		n, anomaly := resolve(each.n, each.token)
		if anomaly != "" {
			anomaly = "phantom"
		}
		about := fmt.Sprint(each.n)
		moments = append(moments, moment{0, operation{0, deliver, n, 0, anomaly, about}})
	}
	return arrange(&view{name: name, what: "effect"}, moments)
}

// arrange makes the calls and returns. An append is ambiguous: no writer recorded when its commit was acknowledged. It
// is open from its commit to its first delivery, or to the end. Since nothing else shows it, it need not be called
// before its predecessor was delivered: so the search stays short although thousands of events wait.
func arrange(v *view, moments []moment) *view {
	deliveries := map[int]int{} // deliveries, by event
	for _, each := range moments {
		if each.operation.action == deliver {
			deliveries[each.operation.event]++
		}
	}
	committed, seen, open, next := map[int]bool{}, map[int]bool{}, map[int]int{}, 1
	call := func(op operation) int {
		id := len(v.operations)
		op.id = id
		v.operations = append(v.operations, op)
		v.events = append(v.events, porcupine.Event{Kind: porcupine.CallEvent, Value: op, Id: id})
		return id
	}
	answer := func(id int) {
		v.events = append(v.events, porcupine.Event{Kind: porcupine.ReturnEvent, Id: id})
	}
	for _, each := range moments {
		n := each.operation.event
		switch each.operation.action {
		case write:
			committed[n] = true
		default:
			answer(call(each.operation))
			if id, called := open[n]; called && each.operation.action == deliver {
				answer(id)
				delete(open, n)
			}
			seen[n] = true
		}
		for committed[next] && (next == 1 || seen[next-1] || deliveries[next-1] == 0) {
			open[next] = call(operation{action: write, event: next})
			next++
		}
	}
	for n := 1; n < next; n++ {
		if id, isOpen := open[n]; isOpen {
			answer(id)
		}
	}
	answer(call(operation{action: end}))
	return v
}
