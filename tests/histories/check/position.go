package main

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// A position is an entry's address. Positions of one stream are ordered by ledger, then by entry.
// The entry may be one past a ledger's end: "from there on".
type position struct {
	ledger, entry int64
}

// earliest lies before all that there is.
var earliest = position{-1, 0}

func (p position) before(other position) bool {
	return p.ledger < other.ledger || p.ledger == other.ledger && p.entry < other.entry
}

func (p position) next() position { return position{p.ledger, p.entry + 1} }

func (p position) String() string {
	if p == earliest {
		return "earliest"
	}
	return fmt.Sprintf("%d:%d", p.ledger, p.entry)
}

// UnmarshalJSON reads "LEDGER:ENTRY" or "earliest".
func (p *position) UnmarshalJSON(text []byte) error {
	var written string
	if err := json.Unmarshal(text, &written); err != nil {
		return err
	}
	if written == "earliest" {
		*p = earliest
		return nil
	}
	ledger, entry, found := strings.Cut(written, ":")
	if !found {
		return fmt.Errorf("%q is not a position", written)
	}
	var err error
	if p.ledger, err = strconv.ParseInt(ledger, 10, 64); err != nil {
		return err
	}
	p.entry, err = strconv.ParseInt(entry, 10, 64)
	return err
}
