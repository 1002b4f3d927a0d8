package main

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/anishathalye/porcupine"
)

// node is a log: its last entry, behind the log before it. It never changes once it is made, since
// the checker keeps many logs that begin alike. `jump` leads far back, so that an entry is found in
// a logarithmic number of steps (a skew-binary list).
type node struct {
	last       entry
	length     int
	prev, jump *node
	digest     [sha256.Size]byte
}

var empty = func() *node {
	root := &node{last: entry{at: earliest}}
	root.jump = root
	return root
}()

func (n *node) push(one entry) *node {
	added := &node{last: one, length: n.length + 1, prev: n, jump: n}
	if n.length-n.jump.length == n.jump.length-n.jump.jump.length && n != empty {
		added.jump = n.jump.jump
	}
	text := binary.BigEndian.AppendUint64(n.digest[:], uint64(one.at.ledger))
	text = binary.BigEndian.AppendUint64(text, uint64(one.at.entry))
	added.digest = sha256.Sum256(append(text, one.value...))
	return added
}

// follows says whether an entry at `at` is dense behind the log: the next one of its ledger, or the
// first one of a later ledger.
func (n *node) follows(at position) bool {
	if n != empty && n.last.at.ledger == at.ledger {
		return at.entry == n.last.at.entry+1
	}
	return at.ledger > n.last.at.ledger && at.entry == 0
}

// until returns the log up to and without `end`.
func (n *node) until(end position) *node {
	for n != empty && !n.last.at.before(end) {
		if n.jump != empty && !n.jump.last.at.before(end) {
			n = n.jump
		} else {
			n = n.prev
		}
	}
	return n
}

// returned says whether a read tells all of the log from its start to where it would go on, which
// is right behind an entry, or at a ledger's beginning.
func (n *node) returned(read readOp) bool {
	here := n.until(read.resume)
	if read.resume != read.from && read.resume.entry != 0 && here.last.at.next() != read.resume {
		return false
	}
	for step := len(read.entries) - 1; step >= 0; step-- {
		if here == empty || here.last != read.entries[step] {
			return false
		}
		here = here.prev
	}
	return here == empty || here.last.at.before(read.from)
}

// holds says whether a told end is the end of the log.
func (n *node) holds(told boundsOp) bool {
	if n == empty {
		// A ledger that exists and is empty has a next position of its own.
		return told.next == earliest || told.next.entry == 0
	}
	return n.last.at.next() == told.next || told.next.entry == 0 && n.last.at.before(told.next)
}

// logModel is the promise: a log that grows at its end by one entry at a time.
var logModel = porcupine.Model{
	Init: func() interface{} { return empty },
	Step: func(state, input, _ interface{}) (bool, interface{}) {
		log := state.(*node)
		switch op := input.(type) {
		case appendOp:
			if !log.follows(op.at) {
				return false, log
			}
			return true, log.push(entry{op.at, op.value})
		case readOp:
			return log.returned(op), log
		case boundsOp:
			return log.holds(op), log
		}
		panic("an operation of no known kind")
	},
	Equal: func(one, other interface{}) bool { return one.(*node).digest == other.(*node).digest },
	Hash: func(state interface{}) uint64 {
		digest := state.(*node).digest
		return binary.BigEndian.Uint64(digest[:])
	},
	DescribeOperation: func(input, _ interface{}) string { return describe(input) },
	DescribeState: func(state interface{}) string {
		log := state.(*node)
		return fmt.Sprintf("%d entries, the last %s = %s", log.length, log.last.at, log.last.value)
	},
}

func describe(input interface{}) string {
	switch op := input.(type) {
	case appendOp:
		return fmt.Sprintf("append(%s) -> %s, %s", op.value, op.at, op.outcome)
	case readOp:
		if len(op.entries) == 0 {
			return fmt.Sprintf("read(%s) -> nothing before %s", op.from, op.resume)
		}
		first, last := op.entries[0], op.entries[len(op.entries)-1]
		return fmt.Sprintf("read(%s) -> %d entries, %s = %s to %s = %s",
			op.from, len(op.entries), first.at, first.value, last.at, last.value)
	case boundsOp:
		return fmt.Sprintf("end() -> %s", op.next)
	}
	panic("an operation of no known kind")
}
