------------------------------- MODULE Stream -------------------------------
(***************************************************************************)
(* The owners of one stream: claim, recover what is not closed, then       *)
(* ledger after ledger.  Any process may claim at any time, also while the *)
(* owner lives and knows of nothing: no session, lease or clock is in it.  *)
(*                                                                         *)
(* A ledger is here what Ledger.tla shows it to be: until it is fenced its *)
(* writer may get acknowledgements, from then on it gets none, and when it *)
(* is closed it holds every entry that was acknowledged.                   *)
(***************************************************************************)
EXTENDS Integers, Sequences, FiniteSets, TLC

CONSTANTS
    Processes,
    Claims,      \* so many claims at most
    Ledgers,     \* so many ledgers at most
    Entries      \* so many entries in each at most

VARIABLES
    stream,   \* the stream's znode: epoch, who claimed it, its list of ledgers
    ledgers,  \* ledgers[l]: fenced, closed, and how many entries are acknowledged
    process,  \* process[p]: the epoch it asked for and the one it got, whether it has seen
              \* every ledger closed since, and the ledger that it writes
    history   \* the acknowledgements, in the order in which they were given

vars == <<stream, ledgers, process, history>>

None == 0
Numbers == 1 .. Ledgers
Listed == {stream.list[i] : i \in 1 .. Len(stream.list)}
Newest == IF stream.list = <<>> THEN None ELSE stream.list[Len(stream.list)]

Init ==
    /\ stream = [epoch |-> 0, owner |-> None, list |-> <<>>]
    /\ ledgers = [l \in Numbers |-> [fenced |-> FALSE, closed |-> FALSE, acked |-> 0]]
    /\ process = [p \in Processes |-> [asked |-> 0, epoch |-> 0, ready |-> FALSE, ledger |-> None]]
    /\ history = <<>>

(* Number and claimant: a number alone may be another's. *)
IsClaim(p, number) == stream.epoch = number /\ stream.owner = p

-----------------------------------------------------------------------------
(* Asks with a compare-and-set, which may fail; the answer may be lost in both cases. *)
Asks(p) ==
    /\ stream.epoch < Claims
    /\ process' = [process EXCEPT ![p].asked = stream.epoch + 1,
                                  ![p].epoch = 0, ![p].ready = FALSE,
                                  ![p].ledger = None]
    /\ \/ stream' = [stream EXCEPT !.epoch = @ + 1, !.owner = p]
       \/ UNCHANGED stream
    /\ UNCHANGED <<ledgers, history>>

(* So it reads back. *)
KnowsClaim(p) ==
    /\ process[p].asked > 0
    /\ IsClaim(p, process[p].asked)
    /\ process' = [process EXCEPT ![p].epoch = process[p].asked, ![p].asked = 0]
    /\ UNCHANGED <<stream, ledgers, history>>

Holds(p) == process[p].epoch > 0 /\ IsClaim(p, process[p].epoch)

(* Fencing needs no claim: whoever claimed once may still do it. *)
Fences(p, l) ==
    /\ process[p].epoch > 0
    /\ l \in Listed
    /\ ~ledgers[l].fenced
    /\ ledgers' = [ledgers EXCEPT ![l].fenced = TRUE]
    /\ UNCHANGED <<stream, process, history>>

(* The closing transaction checks the claim.  Its own ledger an owner closes without a fence. *)
Closes(p, l) ==
    /\ Holds(p)
    /\ l \in Listed
    /\ ~ledgers[l].closed
    /\ ledgers[l].fenced \/ process[p].ledger = l
    /\ ledgers' = [ledgers EXCEPT ![l].closed = TRUE]
    /\ process' = [process EXCEPT ![p].ledger = IF @ = l THEN None ELSE @]
    /\ UNCHANGED <<stream, history>>

(* It read the list after its claim: only who holds the claim can make it longer. *)
Recovers(p) ==
    /\ process[p].epoch > 0
    /\ ~process[p].ready
    /\ \A l \in Listed : ledgers[l].closed
    /\ process' = [process EXCEPT ![p].ready = TRUE]
    /\ UNCHANGED <<stream, ledgers, history>>

(* One transaction: checks the claim, makes the ledger, extends the list. *)
Opens(p) ==
    /\ Holds(p)
    /\ process[p].ready
    /\ process[p].ledger = None
    /\ Len(stream.list) < Ledgers
    /\ stream' = [stream EXCEPT !.list = Append(@, Len(@) + 1)]
    /\ process' = [process EXCEPT ![p].ledger = Len(stream.list) + 1]
    /\ UNCHANGED <<ledgers, history>>

(* An owner that was deposed does not know it: nothing but the fence stops it. *)
Appends(p) ==
    LET l == process[p].ledger
    IN  /\ l # None
        /\ ~ledgers[l].fenced
        /\ ledgers[l].acked < Entries
        /\ ledgers' = [ledgers EXCEPT ![l].acked = @ + 1]
        /\ history' = Append(history, <<l, ledgers[l].acked + 1>>)
        /\ UNCHANGED <<stream, process>>

Next ==
    \E p \in Processes :
        \/ Asks(p)
        \/ KnowsClaim(p)
        \/ Recovers(p)
        \/ Opens(p)
        \/ Appends(p)
        \/ \E l \in Numbers : Fences(p, l) \/ Closes(p, l)

Spec == Init /\ [][Next]_vars

-----------------------------------------------------------------------------
(* What must hold. *)

TypeOK ==
    /\ stream.epoch \in 0 .. Claims
    /\ Len(stream.list) <= Ledgers
    /\ \A p \in Processes : process[p].ledger \in Numbers \cup {None}

Before(a, b) == a[1] < b[1] \/ (a[1] = b[1] /\ a[2] < b[2])

(* Whoever reads the list finds what was acknowledged in the order in which it was. *)
AcknowledgedInOrder ==
    \A i \in 1 .. Len(history) - 1 : Before(history[i], history[i + 1])

(* No two processes can get acknowledgements at the same time. *)
OneWriter ==
    \A p, q \in Processes :
        LET writes(x) == process[x].ledger # None /\ ~ledgers[process[x].ledger].fenced
        IN  writes(p) /\ writes(q) => p = q

(* A closed ledger gets no acknowledgement any more. *)
ClosedIsFinal ==
    [][\A l \in Numbers : ledgers[l].closed =>
        ledgers'[l].closed /\ ledgers'[l].acked = ledgers[l].acked]_vars

(* All ledgers but the newest are closed. *)
OneOpen == \A l \in Listed : l # Newest => ledgers[l].closed

Symmetry == Permutations(Processes)
=============================================================================
