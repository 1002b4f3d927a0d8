package main

import (
	"fmt"
	"sort"
	"time"

	"github.com/anishathalye/porcupine"
)

const (
	linearizable = "linearizable"
	violated     = "violated"
	incomplete   = "incomplete" // the history does not tell enough to be judged
	timedOut     = "unknown"
)

// judgement is what is printed of a history, as one line of JSON.
type judgement struct {
	History      string   `json:"history"`
	Verdict      string   `json:"verdict"`
	Entries      int      `json:"entries"`
	Reads        int      `json:"reads"`
	Acknowledged int      `json:"acknowledged"`
	Landed       int      `json:"unknown_there"`
	Vanished     int      `json:"unknown_not_there"`
	Open         int      `json:"open"`
	Failed       int      `json:"failed"`
	ChecksFailed int      `json:"checks_failed"`
	LongestGapS  float64  `json:"longest_gap_s"`
	Seconds      float64  `json:"seconds"`
	Findings     []string `json:"findings"`
}

// judge asks porcupine whether some order of all operations, each between its call and its return,
// explains what everybody was told.
func judge(found *history, timeout time.Duration, picture string) judgement {
	began := time.Now()
	told := judgement{Reads: len(found.reads) + len(found.gets), Findings: []string{}}
	model, operations, unread := logModel, found.operations(&told), found.unread
	if found.ofRegisters {
		model, operations, unread = registerModel, found.registerOperations(&told), found.ungot
	}
	told.LongestGapS = found.longestGap().Seconds()
	if gap := unread(); gap != "" {
		told.Verdict = incomplete
		told.Findings = append(told.Findings, gap)
		return told
	}
	switch porcupine.CheckOperationsTimeout(model, operations, timeout) {
	case porcupine.Ok:
		told.Verdict = linearizable
	case porcupine.Illegal:
		told.Verdict = violated
		if found.ofRegisters {
			told.Findings = found.explainRegisters(operations, timeout)
		} else {
			told.Findings = found.explain()
		}
	case porcupine.Unknown:
		told.Verdict = timedOut
		told.Findings = append(told.Findings, fmt.Sprintf("not decided within %s", timeout))
	}
	if picture != "" {
		_, info := porcupine.CheckOperationsVerbose(model, operations, timeout)
		if err := porcupine.VisualizePath(model, info, picture); err != nil {
			told.Findings = append(told.Findings, err.Error())
		}
	}
	told.Seconds = time.Since(began).Seconds()
	return told
}

// operations returns what porcupine judges. An append without an answer counts where a read found
// it, at any time after its call. Where none did, it did not happen: the log was read to its end.
func (h *history) operations(told *judgement) []porcupine.Operation {
	places := h.places()
	var operations []porcupine.Operation
	put := func(when span, input interface{}) {
		operations = append(operations, porcupine.Operation{
			ClientId: when.client, Input: input, Call: when.call, Return: when.returns,
		})
	}
	for _, op := range h.appends {
		told.Entries++
		switch op.outcome {
		case "ok":
			told.Acknowledged++
			put(op.span, op)
		case "failed":
			told.Failed++
		case "unknown":
			if at, there := places[op.value]; there {
				told.Landed++
				op.at = at
				put(op.span, op)
			} else {
				told.Vanished++
			}
		}
	}
	for _, op := range h.reads {
		put(op.span, op)
	}
	for _, op := range h.bounds {
		put(op.span, op)
	}
	return operations
}

// places returns where reads found each value first in the log.
func (h *history) places() map[string]position {
	found := map[string]position{}
	for _, read := range h.reads {
		for _, one := range read.entries {
			if at, there := found[one.value]; !there || one.at.before(at) {
				found[one.value] = one.at
			}
		}
	}
	return found
}

// final returns the last final bounds, and whether there are any.
func (h *history) final() (boundsOp, bool) {
	var found boundsOp
	there := false
	for _, op := range h.bounds {
		if op.final && (!there || op.call > found.call) {
			found, there = op, true
		}
	}
	return found, there
}

// unread names what keeps a history from being judged: without a read of all the log after all
// else, an append without an answer may be there unseen.
func (h *history) unread() string {
	end, there := h.final()
	if !there {
		return "there are no final bounds"
	}
	for _, op := range h.appends {
		if op.outcome == "ok" && op.returns > end.call {
			return fmt.Sprintf("%s was acknowledged after the final bounds were asked", op.value)
		}
	}
	next := map[position]position{}
	for _, read := range h.reads {
		if known, there := next[read.from]; read.call >= end.call &&
			(!there || known.before(read.resume)) {
			next[read.from] = read.resume
		}
	}
	where := earliest
	for where.before(end.next) {
		resume, there := next[where]
		if !there || !where.before(resume) {
			return fmt.Sprintf("no read after the final bounds begins at %s", where)
		}
		where = resume
	}
	return ""
}

// longestGap returns the longest time in which nobody was told of an acknowledgement.
func (h *history) longestGap() time.Duration {
	var returns []int64
	for _, op := range h.appends {
		if op.outcome == "ok" {
			returns = append(returns, op.returns)
		}
	}
	for _, op := range h.updates {
		if op.outcome == "ok" {
			returns = append(returns, op.returns)
		}
	}
	sort.Slice(returns, func(i, j int) bool { return returns[i] < returns[j] })
	var gap int64
	for step := 1; step < len(returns); step++ {
		gap = max(gap, returns[step]-returns[step-1])
	}
	return time.Duration(gap)
}
