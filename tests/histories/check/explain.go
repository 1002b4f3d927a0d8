package main

import (
	"fmt"
	"sort"
)

// Findings of one kind beyond this many are counted only.
const toldMax = 5

// explain names what is wrong with a history that porcupine refused, in words: for whoever looks
// into it. The verdict does not depend on it.
func (h *history) explain() []string {
	byValue := map[string]appendOp{}
	for _, op := range h.appends {
		byValue[op.value] = op
	}
	found := []string{}
	for _, told := range [][]string{
		h.twice(), h.changed(), h.lost(), h.strangers(byValue), h.tooEarly(byValue),
		h.outOfOrder(), h.holes(), h.shortEnds(),
	} {
		if len(told) > toldMax {
			told = append(told[:toldMax], fmt.Sprintf("and %d more like it", len(told)-toldMax))
		}
		found = append(found, told...)
	}
	if len(found) == 0 {
		found = append(found, "no order of these operations explains what was told")
	}
	return found
}

// all returns each entry that anybody was told of.
func (h *history) all() []entry {
	seen := map[entry]bool{}
	for _, op := range h.appends {
		if op.outcome == "ok" {
			seen[entry{op.at, op.value}] = true
		}
	}
	for _, read := range h.reads {
		for _, one := range read.entries {
			seen[one] = true
		}
	}
	found := make([]entry, 0, len(seen))
	for one := range seen {
		found = append(found, one)
	}
	sort.Slice(found, func(i, j int) bool {
		if found[i].at == found[j].at {
			return found[i].value < found[j].value
		}
		return found[i].at.before(found[j].at)
	})
	return found
}

func (h *history) twice() []string {
	at := map[string]position{}
	var told []string
	for _, one := range h.all() {
		if first, there := at[one.value]; there {
			told = append(told, fmt.Sprintf("twice: %s is at %s and at %s", one.value, first, one.at))
		} else {
			at[one.value] = one.at
		}
	}
	return told
}

func (h *history) changed() []string {
	value := map[position]string{}
	var told []string
	for _, one := range h.all() {
		if first, there := value[one.at]; there {
			told = append(told, fmt.Sprintf("changed: %s is %s and %s", one.at, first, one.value))
		} else {
			value[one.at] = one.value
		}
	}
	return told
}

func (h *history) lost() []string {
	end, there := h.final()
	if !there {
		return nil
	}
	atEnd := map[position]bool{}
	for _, read := range h.reads {
		if read.call >= end.call {
			for _, one := range read.entries {
				atEnd[one.at] = true
			}
		}
	}
	var told []string
	for _, one := range h.all() {
		if !atEnd[one.at] {
			told = append(told, fmt.Sprintf("lost: %s at %s is gone at the end", one.value, one.at))
		}
	}
	return told
}

func (h *history) strangers(byValue map[string]appendOp) []string {
	var told []string
	for _, one := range h.all() {
		op, there := byValue[one.value]
		if !there {
			told = append(told, fmt.Sprintf("stranger: nobody appended %s at %s", one.value, one.at))
		} else if op.outcome == "failed" {
			told = append(told, fmt.Sprintf("refused, and there: %s at %s", one.value, one.at))
		}
	}
	return told
}

func (h *history) tooEarly(byValue map[string]appendOp) []string {
	var told []string
	for _, read := range h.reads {
		for _, one := range read.entries {
			if op, there := byValue[one.value]; there && read.returns < op.call {
				told = append(told, fmt.Sprintf("read before it was appended: %s at %s", one.value, one.at))
			}
		}
	}
	return told
}

// outOfOrder finds appends that lie before one that had returned before they were called.
func (h *history) outOfOrder() []string {
	places := h.places()
	var there []appendOp
	for _, op := range h.appends {
		if at, seen := places[op.value]; op.outcome == "ok" || seen && op.outcome == "unknown" {
			if op.outcome != "ok" {
				op.at = at
			}
			there = append(there, op)
		}
	}
	sort.Slice(there, func(i, j int) bool { return there[j].at.before(there[i].at) })
	var told []string
	earliestReturn := appendOp{span: span{returns: never}}
	for _, op := range there { // from the last position to the first
		if op.call > earliestReturn.returns {
			told = append(told, fmt.Sprintf("out of order: %s at %s was called after %s at %s returned",
				op.value, op.at, earliestReturn.value, earliestReturn.at))
		}
		if op.returns < earliestReturn.returns {
			earliestReturn = op
		}
	}
	return told
}

// holes finds ids that nobody was told of before ids that somebody was.
func (h *history) holes() []string {
	var told []string
	last := earliest
	for _, one := range h.all() {
		first := one.at.ledger > last.ledger && one.at.entry == 0
		if !first && one.at != last && one.at != last.next() {
			told = append(told, fmt.Sprintf("hole: after %s comes %s", last, one.at))
		}
		last = one.at
	}
	return told
}

// shortEnds names the bounds that left out what had been acknowledged before they were asked.
func (h *history) shortEnds() []string {
	var told []string
	for _, end := range h.bounds {
		for _, op := range h.appends {
			if op.outcome == "ok" && op.returns < end.call && !op.at.before(end.next) {
				told = append(told, fmt.Sprintf(
					"short end: %s was told after %s was acknowledged at %s", end.next, op.value, op.at))
				break
			}
		}
	}
	return told
}
