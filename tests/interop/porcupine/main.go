// A second judge of histories, with a checker that is not ours: Porcupine looks for an order of each aggregate's
// operations that the specification of a log allows.
//
//	porcupine FILE
//
// Exit codes: 0 each aggregate has such an order; 1 one has none, or none was found in time; 2 the file cannot be
// read.
package main

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"
)

// Of one part of an aggregate's history, which ends where no operation is open after so many.
const (
	patience = time.Minute
	part     = 1000
)

func main() {
	if len(os.Args) != 2 {
		fail(fmt.Errorf("usage: porcupine FILE"))
	}
	found, err := read(os.Args[1])
	if err != nil {
		fail(fmt.Errorf("%s: %w", os.Args[1], err))
	}
	started := time.Now()
	all := views(found)
	anomalies, operations := check(all)
	fmt.Printf("porcupine: %d histories of aggregates, %d operations, %d wrong (%.1f s)\n",
		len(all), operations, len(anomalies), time.Since(started).Seconds())
	for _, line := range anomalies {
		fmt.Println(line)
	}
	if len(anomalies) > 0 {
		os.Exit(1)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(2)
}

func check(all []*view) (anomalies []string, operations int) {
	lines := make([]string, len(all))
	free := make(chan struct{}, runtime.GOMAXPROCS(0))
	var wait sync.WaitGroup
	for i, each := range all {
		operations += len(each.operations) - 1
		wait.Add(1)
		free <- struct{}{}
		go func() {
			defer wait.Done()
			lines[i] = each.check()
			<-free
		}()
	}
	wait.Wait()
	for _, line := range lines {
		if line != "" {
			anomalies = append(anomalies, line)
		}
	}
	return anomalies, operations
}

// check returns nothing if the history has an order. A part of it begins in the state in which the one before ends.
func (v *view) check() string {
	now, from, open := state{}, 0, 0
	for i, event := range v.events {
		if event.Kind == porcupine.CallEvent {
			open++
			continue
		}
		open--
		if i+1 < len(v.events) && (open > 0 || i+1-from < part) {
			continue
		}
		begins := now
		model := porcupine.Model{Init: func() any { return begins }, Step: step(v.redelivers)}
		result, info := porcupine.CheckEventsVerbose(model, v.events[from:i+1], patience)
		if result == porcupine.Unknown {
			return fmt.Sprintf("undecided: %s, within %s", v.name, patience)
		}
		placed := map[int]bool{}
		for _, op := range longest(info.PartialLinearizationsOperations()[0]) {
			_, after := step(v.redelivers)(now, op.Input, nil)
			now, placed[op.Input.(operation).id] = after.(state), true
		}
		if result == porcupine.Illegal {
			return v.explain(now, v.events[from:i+1], placed)
		}
		from = i + 1
	}
	return ""
}

func longest(orders [][]porcupine.Operation) (found []porcupine.Operation) {
	for _, order := range orders {
		if len(order) > len(found) {
			found = order
		}
	}
	return found
}

// explain names the anomaly at which the longest order that exists ends.
func (v *view) explain(last state, events []porcupine.Event, placed map[int]bool) string {
	for _, event := range events {
		op, isCall := event.Value.(operation)
		if !isCall || placed[op.id] || op.action != deliver && op.action != end {
			continue
		}
		id := op.id
		next := fmt.Sprintf("%s/%d", v.name, last.delivered+1)
		about := fmt.Sprintf("%s/%s", v.name, op.name)
		switch {
		case op.action == end:
			return v.named("lost", next)
		case op.event == 0:
			return v.named(op.anomaly, about)
		case op.event <= last.delivered && op.partition == last.partition:
			return v.named("duplicate", about)
		case last.delivered > 0 && op.partition != last.partition:
			return v.named("out of order", about+" in another partition")
		case op.event == last.delivered+1:
			return v.named("dirty read", about+" before its commit")
		case v.comes(last.delivered+1, id):
			return v.named("out of order", about+" before "+next)
		}
		return v.named("lost", next)
	}
	return v.named("no order", v.name)
}

func (v *view) comes(event, after int) bool {
	for _, op := range v.operations[after:] {
		if op.action == deliver && op.event == event {
			return true
		}
	}
	return false
}

// named uses the words of the first judge.
func (v *view) named(anomaly, about string) string {
	switch {
	case v.what == "write" && anomaly == "lost":
		anomaly = "lost write"
	case v.what == "effect" && anomaly == "out of order":
		anomaly = "effect out of order"
	case v.what == "effect":
		anomaly += " effect"
	}
	return anomaly + ": " + about
}
