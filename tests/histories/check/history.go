package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"
)

const schemaVersion = 1

// never is when an operation without an answer may still take effect.
const never = math.MaxInt64

// appended is where entries of one append went within one ledger, both ends included.
type appended struct {
	Ledger int64 `json:"ledger_id"`
	First  int64 `json:"first_entry_id"`
	Last   int64 `json:"last_entry_id"`
}

// readRun is what a read returned of one ledger.
type readRun struct {
	Ledger int64    `json:"ledger_id"`
	First  int64    `json:"first_entry_id"`
	Values []string `json:"values"`
}

// record is one line; docs/reference/histories.md says what each field means.
type record struct {
	Type      string     `json:"type"`
	Version   int        `json:"version"`
	Of        string     `json:"of"`
	Client    int        `json:"client"`
	CallNs    int64      `json:"call_ns"`
	ReturnNs  *int64     `json:"return_ns"`
	Outcome   string     `json:"outcome"`
	Values    []string   `json:"values"`
	Ranges    []appended `json:"ranges"`
	From      position   `json:"from"`
	Resume    position   `json:"resume"`
	Runs      []readRun  `json:"runs"`
	Next      position   `json:"next"`
	Final     bool       `json:"final"`
	Updates   []change   `json:"updates"`
	Found     *seen      `json:"found"`
	Registers []seen     `json:"registers"`
}

// entry is a value at a position.
type entry struct {
	at    position
	value string
}

// span is when an operation was called and when it returned.
type span struct {
	client        int
	call, returns int64
}

// appendOp is the append of one value. Several values of one append are operations of their own,
// since nothing promises that they become visible at once.
type appendOp struct {
	span
	outcome string
	value   string
	at      position // where an acknowledged one went
}

// readOp returned all entries from `from` on that lie before `resume`.
type readOp struct {
	span
	from, resume position
	entries      []entry
}

// boundsOp told the position behind the last entry; a final one when nobody appended any more.
type boundsOp struct {
	span
	next  position
	final bool
}

type history struct {
	ofRegisters bool
	appends     []appendOp
	reads       []readOp
	bounds      []boundsOp
	updates     []updateOp
	gets        []getOp
}

// readHistory reads JSON lines; what it does not understand is an error, never left out.
func readHistory(source io.Reader) (*history, error) {
	lines := bufio.NewReaderSize(source, 1<<20)
	found := &history{}
	for number := 1; ; number++ {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF && len(line) == 0 {
			if number == 1 {
				return nil, fmt.Errorf("the history is empty")
			}
			return found, nil
		}
		if err != nil {
			return nil, fmt.Errorf("line %d is cut: %w", number, err)
		}
		written := record{From: earliest, Resume: earliest, Next: earliest}
		if err := json.Unmarshal(line, &written); err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		if (number == 1) != (written.Type == "history") {
			return nil, fmt.Errorf("line %d: the first line, and no other, is the header", number)
		}
		if err := found.add(written); err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
	}
}

func (h *history) add(written record) error {
	switch written.Type {
	case "history":
		if written.Version != schemaVersion {
			return fmt.Errorf("version %d is not %d", written.Version, schemaVersion)
		}
		if written.Of != "" && written.Of != "log" && written.Of != "attributes" {
			return fmt.Errorf("a history of %q, which is neither log nor attributes", written.Of)
		}
		h.ofRegisters = written.Of == "attributes"
		return nil
	case "event":
		return nil
	}
	when := span{client: written.Client, call: written.CallNs, returns: never}
	switch written.Outcome {
	case "ok", "failed":
		if written.ReturnNs == nil || *written.ReturnNs < written.CallNs {
			return fmt.Errorf("an operation with an answer returns after its call")
		}
		when.returns = *written.ReturnNs
	case "unknown":
	default:
		return fmt.Errorf("outcome %q is none of ok, failed, unknown", written.Outcome)
	}
	if h.ofRegisters {
		return h.addRegisterOp(written, when)
	}
	switch written.Type {
	case "append":
		return h.addAppend(written, when)
	case "read", "bounds":
		if written.Outcome != "ok" {
			return nil // it told nothing and did nothing
		}
		if written.Type == "bounds" {
			h.bounds = append(h.bounds, boundsOp{span: when, next: written.Next, final: written.Final})
			return nil
		}
		op := readOp{span: when, from: written.From, resume: written.Resume}
		for _, run := range written.Runs {
			for step, value := range run.Values {
				at := position{run.Ledger, run.First + int64(step)}
				op.entries = append(op.entries, entry{at, value})
			}
		}
		h.reads = append(h.reads, op)
		return nil
	}
	return fmt.Errorf("type %q is none of append, read, bounds, event", written.Type)
}

func (h *history) addAppend(written record, when span) error {
	var places []position
	for _, one := range written.Ranges {
		for id := one.First; id <= one.Last; id++ {
			places = append(places, position{one.Ledger, id})
		}
	}
	if acknowledged := written.Outcome == "ok"; acknowledged != (len(places) > 0) {
		return fmt.Errorf("an append has ranges when it was acknowledged, and only then")
	} else if acknowledged && len(places) != len(written.Values) {
		return fmt.Errorf("%d values and %d places", len(written.Values), len(places))
	}
	for step, value := range written.Values {
		op := appendOp{span: when, outcome: written.Outcome, value: value}
		if len(places) > 0 {
			op.at = places[step]
		}
		h.appends = append(h.appends, op)
	}
	return nil
}
