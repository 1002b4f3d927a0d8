package main

import (
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"sort"
	"strings"

	"github.com/anishathalye/porcupine"
)

// change is one verb on one register.
type change struct {
	Key      string `json:"key"`
	Verb     string `json:"verb"`
	Value    int64  `json:"value"`
	Expected int64  `json:"expected"` // of replace-if-equals
}

// seen is a register as somebody was told of it. Without a value it is not there.
type seen struct {
	Key   string `json:"key"`
	Value *int64 `json:"value"`
}

// updateOp makes all its changes, or none.
type updateOp struct {
	span
	outcome string
	changes []change
	found   *seen // the register that was in the way: nothing was changed
}

// getOp told of registers, all as of one instant.
type getOp struct {
	span
	told []seen
}

func (h *history) addRegisterOp(written record, when span) error {
	switch written.Type {
	case "update":
		if len(written.Updates) == 0 {
			return fmt.Errorf("an update of nothing")
		}
		for _, one := range written.Updates {
			if _, known := verbs[one.Verb]; !known {
				return fmt.Errorf("verb %q is none of %s", one.Verb, strings.Join(verbNames(), ", "))
			}
		}
		if written.Found != nil && written.Outcome != "ok" {
			return fmt.Errorf("an update that found something was answered")
		}
		h.updates = append(h.updates, updateOp{when, written.Outcome, written.Updates, written.Found})
	case "get":
		if len(written.Registers) == 0 {
			return fmt.Errorf("a get of nothing")
		}
		if written.Outcome == "ok" { // else it told nothing and did nothing
			h.gets = append(h.gets, getOp{when, written.Registers})
		}
	default:
		return fmt.Errorf("type %q is none of update, get, event", written.Type)
	}
	return nil
}

// register is one that is there.
type register struct {
	key   string
	value int64
}

// registers is a state: those that are there, by key. It never changes once it is made.
type registers []register

func (r registers) at(key string) (int, bool) {
	return slices.BinarySearchFunc(r, key, func(one register, key string) int {
		return strings.Compare(one.key, key)
	})
}

// tell says what anybody is to be told of a register.
func (r registers) tell(key string) seen {
	if at, there := r.at(key); there {
		value := r[at].value
		return seen{key, &value}
	}
	return seen{Key: key}
}

func (r registers) with(key string, value int64) registers {
	at, there := r.at(key)
	made := slices.Clone(r)
	if there {
		made[at].value = value
		return made
	}
	return slices.Insert(made, at, register{key, value})
}

func (s seen) is(other seen) bool {
	if s.Key != other.Key || (s.Value == nil) != (other.Value == nil) {
		return false
	}
	return s.Value == nil || *s.Value == *other.Value
}

func (s seen) String() string {
	if s.Value == nil {
		return s.Key + " not there"
	}
	return fmt.Sprintf("%s = %d", s.Key, *s.Value)
}

// verbs say whether a change can be made of a register that is so, not there without a value.
var verbs = map[string]func(one change, now *int64) bool{
	"replace":            func(change, *int64) bool { return true },
	"replace-if-greater": func(one change, now *int64) bool { return now != nil && one.Value > *now },
	"replace-if-equals":  func(one change, now *int64) bool { return now != nil && *now == one.Expected },
	"replace-if-absent":  func(_ change, now *int64) bool { return now == nil },
	"accumulate":         func(one change, now *int64) bool { return now == nil || isSum(*now, one.Value) },
}

func verbNames() []string {
	var names []string
	for name := range verbs {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

func isSum(one, other int64) bool {
	if other > 0 {
		return one <= math.MaxInt64-other
	}
	return one >= math.MinInt64-other
}

// after returns the state after all changes, or the state as it is and what is in the way.
func (r registers) after(changes []change) (registers, *seen) {
	made := r
	for _, one := range changes {
		now := made.tell(one.Key)
		if !verbs[one.Verb](one, now.Value) {
			return r, &now
		}
		value := one.Value
		if one.Verb == "accumulate" && now.Value != nil {
			value += *now.Value
		}
		made = made.with(one.Key, value)
	}
	return made, nil
}

// registerModel is the promise: registers that are changed and read at one instant each.
//
// An update without an answer is a call that is open for ever. It may be made at any time; behind
// all else it has no effect on what anybody was told, which is as good as never.
var registerModel = porcupine.Model{
	Partition: func(operations []porcupine.Operation) [][]porcupine.Operation {
		var parts [][]porcupine.Operation
		for _, part := range together(operations) {
			parts = append(parts, part.operations)
		}
		return parts
	},
	Init: func() interface{} { return registers(nil) },
	Step: func(state, input, _ interface{}) (bool, interface{}) {
		now := state.(registers)
		switch op := input.(type) {
		case updateOp:
			made, inTheWay := now.after(op.changes)
			if op.outcome == "unknown" {
				return true, made
			}
			if op.found != nil {
				return inTheWay != nil && inTheWay.is(*op.found), now
			}
			return inTheWay == nil, made
		case getOp:
			for _, one := range op.told {
				if !now.tell(one.Key).is(one) {
					return false, now
				}
			}
			return true, now
		}
		panic("an operation of no known kind")
	},
	Equal: func(one, other interface{}) bool {
		return slices.Equal(one.(registers), other.(registers))
	},
	Hash: func(state interface{}) uint64 {
		digest := fnv.New64a()
		fmt.Fprint(digest, state.(registers))
		return digest.Sum64()
	},
	DescribeOperation: func(input, _ interface{}) string { return describeRegisterOp(input) },
	DescribeState:     func(state interface{}) string { return fmt.Sprint(state.(registers)) },
}

func describeRegisterOp(input interface{}) string {
	switch op := input.(type) {
	case updateOp:
		var parts []string
		for _, one := range op.changes {
			parts = append(parts, fmt.Sprintf("%s %s %d", one.Key, one.Verb, one.Value))
		}
		text := fmt.Sprintf("update(%s) -> %s", strings.Join(parts, ", "), op.outcome)
		if op.found != nil {
			text += fmt.Sprintf(": found %s", *op.found)
		}
		return text
	case getOp:
		return fmt.Sprintf("get() -> %v", op.told)
	}
	panic("an operation of no known kind")
}

func keysOf(input interface{}) []string {
	var keys []string
	switch op := input.(type) {
	case updateOp:
		for _, one := range op.changes {
			keys = append(keys, one.Key)
		}
	case getOp:
		for _, one := range op.told {
			keys = append(keys, one.Key)
		}
	}
	return keys
}

// group is the operations on registers of which no other operation is.
type group struct {
	keys       []string
	operations []porcupine.Operation
}

// together groups operations: registers that one operation names are judged as one.
func together(operations []porcupine.Operation) []*group {
	leader := map[string]string{}
	var lead func(string) string
	lead = func(key string) string {
		above, there := leader[key]
		if !there || above == key {
			leader[key] = key
			return key
		}
		leader[key] = lead(above)
		return leader[key]
	}
	for _, one := range operations {
		keys := keysOf(one.Input)
		for _, key := range keys {
			leader[lead(key)] = lead(keys[0])
		}
	}
	byLeader := map[string]*group{}
	var found []*group
	for _, one := range operations {
		name := lead(keysOf(one.Input)[0])
		part, there := byLeader[name]
		if !there {
			part = &group{}
			byLeader[name] = part
			found = append(found, part)
		}
		part.operations = append(part.operations, one)
	}
	for key := range leader {
		part := byLeader[lead(key)]
		part.keys = append(part.keys, key)
	}
	for _, part := range found {
		sort.Strings(part.keys)
	}
	return found
}

// registerOperations returns what porcupine judges.
func (h *history) registerOperations(told *judgement) []porcupine.Operation {
	var operations []porcupine.Operation
	put := func(when span, input interface{}) {
		operations = append(operations, porcupine.Operation{
			ClientId: when.client, Input: input, Call: when.call, Return: when.returns,
		})
	}
	for _, op := range h.updates {
		told.Entries++
		switch {
		case op.outcome == "failed":
			told.Failed++
			continue // it did nothing
		case op.outcome == "unknown":
			told.Open++
		case op.found != nil:
			told.ChecksFailed++
		default:
			told.Acknowledged++
		}
		put(op.span, op)
	}
	for _, op := range h.gets {
		put(op.span, op)
	}
	return operations
}

// ungot names what keeps a history from being judged: a register that was not read after all that
// was acknowledged of it may have lost that unseen.
func (h *history) ungot() string {
	lastGet := map[string]int64{}
	for _, op := range h.gets {
		for _, one := range op.told {
			lastGet[one.Key] = max(lastGet[one.Key], op.call)
		}
	}
	for _, op := range h.updates {
		for _, one := range op.changes {
			called, there := lastGet[one.Key]
			if op.outcome == "ok" && (!there || called < op.returns) {
				return fmt.Sprintf("no get of %s after its last update", one.Key)
			}
		}
	}
	return ""
}
