// Command check judges histories of appends to a log and reads of it: is there an order of the
// operations, each between its call and its return, in which a log that only grows at its end would
// have answered what everybody was told? And histories of attributes, which are to be registers,
// likewise. The search is porcupine's.
//
// Each history, as docs/reference/histories.md describes it, gives one line of JSON. The exit code
// is 0 when all are linearizable, 1 when one is not, 2 when one can't be judged, 3 when there was
// not enough time.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"time"
)

func main() {
	timeout := flag.Duration("timeout", 5*time.Minute, "how long to search, a history")
	picture := flag.String("picture", "", "write an interactive picture of the last history, as HTML")
	flag.Parse()
	if flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, "error: name at least one history\nremedy: check FILE.jsonl ...")
		os.Exit(2)
	}
	worst := 0
	for _, path := range flag.Args() {
		told, err := judgeFile(path, *timeout, *picture)
		if err != nil {
			fmt.Fprintf(os.Stderr, "error: %s: %v\nremedy: docs/reference/histories.md has the schema\n", path, err)
			os.Exit(2)
		}
		line, _ := json.Marshal(told)
		fmt.Println(string(line))
		worst = max(worst, map[string]int{linearizable: 0, incomplete: 2, timedOut: 3, violated: 4}[told.Verdict])
	}
	if worst == 4 {
		worst = 1
	}
	os.Exit(worst)
}

func judgeFile(path string, timeout time.Duration, picture string) (judgement, error) {
	file, err := os.Open(path)
	if err != nil {
		return judgement{}, err
	}
	defer file.Close()
	found, err := readHistory(file)
	if err != nil {
		return judgement{}, err
	}
	told := judge(found, timeout, picture)
	told.History = path
	return told, nil
}
