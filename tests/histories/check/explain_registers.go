package main

import (
	"fmt"
	"sort"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// explainRegisters names what is wrong with a history of registers that porcupine refused, in
// words: for whoever looks into it. The verdict does not depend on it.
func (h *history) explainRegisters(operations []porcupine.Operation, timeout time.Duration) []string {
	found := []string{}
	for _, told := range [][]string{
		h.strangeValues(), h.staleValues(), h.wrongSums(), h.madeTwice(), disordered(operations, timeout),
	} {
		if len(told) > toldMax {
			told = append(told[:toldMax], fmt.Sprintf("and %d more like it", len(told)-toldMax))
		}
		found = append(found, told...)
	}
	return found
}

// disordered names the registers whose operations have no order.
func disordered(operations []porcupine.Operation, timeout time.Duration) []string {
	var told []string
	for _, part := range together(operations) {
		if porcupine.CheckOperationsTimeout(registerModel, part.operations, timeout) == porcupine.Illegal {
			told = append(told, fmt.Sprintf("no order of %d operations explains what was told of %s",
				len(part.operations), strings.Join(part.keys, ", ")))
		}
	}
	return told
}

// glance is what somebody was told of one register, by a get or by a check that failed.
type glance struct {
	span
	seen
}

// write is a change that sets a register to a value.
type write struct {
	span
	outcome string
	verb    string
	value   int64
}

// glances returns what was told of each register.
func (h *history) glances() map[string][]glance {
	found := map[string][]glance{}
	for _, op := range h.gets {
		for _, one := range op.told {
			found[one.Key] = append(found[one.Key], glance{op.span, one})
		}
	}
	for _, op := range h.updates {
		if op.found != nil && len(op.changes) == 1 { // else it may be of a moment within the update
			found[op.found.Key] = append(found[op.found.Key], glance{op.span, *op.found})
		}
	}
	return found
}

// writes returns the changes of each register that were made or may have been; those that were
// refused, too. The second map has the registers that were accumulated, and nothing else.
func (h *history) writes() (set, added map[string][]write) {
	set, added = map[string][]write{}, map[string][]write{}
	for _, op := range h.updates {
		if op.found != nil {
			continue
		}
		for _, one := range op.changes {
			into := set
			if one.Verb == "accumulate" {
				into = added
			}
			made := write{op.span, op.outcome, one.Verb, one.Value}
			into[one.Key] = append(into[one.Key], made)
		}
	}
	for key := range added {
		if _, both := set[key]; both { // of these no value tells who wrote it
			delete(set, key)
			delete(added, key)
		}
	}
	return set, added
}

// strangeValues finds values that nobody wrote, or nobody yet.
func (h *history) strangeValues() []string {
	set, _ := h.writes()
	all := h.glances()
	var told []string
	for _, key := range sortedKeys(set) {
		for _, one := range all[key] {
			if one.Value == nil {
				continue
			}
			from := writer(set[key], *one.Value)
			switch {
			case from == nil:
				told = append(told, fmt.Sprintf("stranger: %s, which nobody set", one.seen))
			case from.outcome == "failed":
				told = append(told, fmt.Sprintf("refused, and there: %s", one.seen))
			case one.returns < from.call:
				told = append(told, fmt.Sprintf("told before it was set: %s", one.seen))
			}
		}
	}
	return told
}

// staleValues finds values, or that there is none, told after another one had been acknowledged.
func (h *history) staleValues() []string {
	set, added := h.writes()
	all := h.glances()
	var told []string
	for _, key := range sortedKeys(set) {
		for _, one := range all[key] {
			var from *write
			if one.Value != nil {
				if from = writer(set[key], *one.Value); from == nil {
					continue
				}
			}
			for _, other := range set[key] {
				isAfter := from == nil || from.returns < other.call
				if other.outcome == "ok" && isAfter && other.returns < one.call {
					told = append(told, fmt.Sprintf(
						"stale: %s was told after %d had been acknowledged", one.seen, other.value))
					break
				}
			}
		}
	}
	for _, key := range sortedKeys(added) {
		for _, one := range all[key] {
			for _, other := range added[key] {
				if one.Value == nil && other.outcome == "ok" && other.returns < one.call {
					told = append(told, fmt.Sprintf("stale: %s, though it was added to", one.seen))
					break
				}
			}
		}
	}
	return told
}

// wrongSums finds sums that lack what was acknowledged before, or have more than was ever added.
// It looks at registers alone to which nothing negative was added.
func (h *history) wrongSums() []string {
	_, added := h.writes()
	all := h.glances()
	var told []string
	for _, key := range sortedKeys(added) {
		if hasNegative(added[key]) {
			continue
		}
		for _, one := range all[key] {
			if one.Value == nil {
				continue
			}
			var least, most int64
			for _, other := range added[key] {
				if other.outcome == "ok" && other.returns < one.call {
					least += other.value
				}
				if other.outcome != "failed" && other.call <= one.returns {
					most += other.value
				}
			}
			if *one.Value < least {
				told = append(told, fmt.Sprintf(
					"lost: %s, and %d had been added and acknowledged", one.seen, least))
			}
			if *one.Value > most {
				told = append(told, fmt.Sprintf(
					"too much: %s, and no more than %d had been added", one.seen, most))
			}
		}
	}
	return told
}

// madeTwice finds registers that were absent twice.
func (h *history) madeTwice() []string {
	set, _ := h.writes()
	var told []string
	for _, key := range sortedKeys(set) {
		count := 0
		for _, one := range set[key] {
			if one.verb == "replace-if-absent" && one.outcome == "ok" {
				count++
			}
		}
		if count > 1 {
			told = append(told, fmt.Sprintf("made twice: %d found %s absent, and set it", count, key))
		}
	}
	return told
}

func hasNegative(writes []write) bool {
	for _, one := range writes {
		if one.value < 0 {
			return true
		}
	}
	return false
}

// writer returns who set a value: values are given once.
func writer(writes []write, value int64) *write {
	for step := range writes {
		if writes[step].value == value {
			return &writes[step]
		}
	}
	return nil
}

func sortedKeys(of map[string][]write) []string {
	var keys []string
	for key := range of {
		keys = append(keys, key)
	}
	sort.Strings(keys)
	return keys
}
