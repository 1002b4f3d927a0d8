-------------------------------- MODULE Drain --------------------------------
(***************************************************************************)
(* One storage node that is decommissioned, while others who chose it at   *)
(* any time before make ledgers name it, and workers move ledgers off it.  *)
(*                                                                         *)
(* A ledger is here whether its metadata names the node, and whether the   *)
(* node has freed it.  That others hold what the node gave up, Ledger.tla  *)
(* shows (WorkerMoves).  Who is held up between two steps is so for as     *)
(* long as it likes: no time is in it.  The operator may call it off, and  *)
(* begin again; a mark that is made again has the version of the first.    *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
    Ledgers,
    Choosers,    \* who opens ledgers, changes ensembles, recovers, copies
    Begins       \* so often it is begun at most

VARIABLES
    mark,        \* /tierlog/draining/<node>: what it says, and its version
    cookie,      \* the version of the node's cookie; Gone: it is removed
    named,       \* the ledgers whose metadata names the node
    freed,       \* the ledgers that the node has freed, and refuses for ever
    chooser,     \* chooser[c]: how far it is, with which ledger, and what it read
    looked,      \* the ledgers that decommission has read and found not to name the node
    node,        \* whether it saw itself retired, and which ledgers it read since
    begun        \* how often it was begun

vars == <<mark, cookie, named, freed, chooser, looked, node, begun>>

Gone == -1
Idle == [at |-> "idle"]

Init ==
    /\ mark = [is |-> "none", version |-> 0]
    /\ cookie = 0
    /\ named \in SUBSET Ledgers
    /\ freed = {}
    /\ chooser = [c \in Choosers |-> Idle]
    /\ looked = {}
    /\ node = [sees |-> FALSE, read |-> {}]
    /\ begun = 0

IsRetired == mark.is \in {"retired", "done"}

-----------------------------------------------------------------------------
(* Whoever makes a ledger name the node: reads, then one transaction. *)
ReadsCookie(c, l) ==
    /\ chooser[c] = Idle
    /\ chooser' = [chooser EXCEPT ![c] = [at |-> "cookie", ledger |-> l, cookie |-> cookie]]
    /\ UNCHANGED <<mark, cookie, named, freed, looked, node, begun>>

ReadsMark(c) ==
    /\ chooser[c].at = "cookie"
    /\ chooser' = [chooser EXCEPT ![c] =
           IF IsRetired THEN Idle
           ELSE [at |-> "mark", ledger |-> chooser[c].ledger, cookie |-> chooser[c].cookie,
                 marked |-> mark.is # "none", mark |-> mark.version]]
    /\ UNCHANGED <<mark, cookie, named, freed, looked, node, begun>>

IsAsRead(c) ==
    IF chooser[c].marked
    THEN mark.is # "none" /\ mark.version = chooser[c].mark
    ELSE cookie = chooser[c].cookie

(* Where the check fails it begins again. *)
Names(c) ==
    /\ chooser[c].at = "mark"
    /\ named' = IF IsAsRead(c) THEN named \cup {chooser[c].ledger} ELSE named
    /\ chooser' = [chooser EXCEPT ![c] = Idle]
    /\ UNCHANGED <<mark, cookie, freed, looked, node, begun>>

WorkerMoves(l) ==
    /\ l \in named
    /\ named' = named \ {l}
    /\ UNCHANGED <<mark, cookie, freed, chooser, looked, node, begun>>

-----------------------------------------------------------------------------
(* Decommission. *)
DrainBegins ==
    /\ mark.is = "none"
    /\ begun < Begins
    /\ mark' = [is |-> "draining", version |-> 0]
    /\ begun' = begun + 1
    /\ looked' = {}
    /\ UNCHANGED <<cookie, named, freed, chooser, node>>

DrainCancels ==
    /\ mark.is \in {"draining"}
    /\ mark' = [is |-> "none", version |-> 0]
    /\ UNCHANGED <<cookie, named, freed, chooser, looked, node, begun>>

(* One ledger after the other; from the first that names the node it begins again. *)
Looks(l) ==
    /\ mark.is \in {"draining", "retired"}
    /\ looked' = IF l \in named THEN {} ELSE looked \cup {l}
    /\ UNCHANGED <<mark, cookie, named, freed, chooser, node, begun>>

(* One transaction. *)
Retires ==
    /\ mark.is = "draining"
    /\ looked = Ledgers
    /\ mark' = [is |-> "retired", version |-> mark.version + 1]
    /\ cookie' = cookie + 1
    /\ looked' = {}
    /\ UNCHANGED <<named, freed, chooser, node, begun>>

DrainEnds ==
    /\ mark.is = "retired"
    /\ looked = Ledgers
    /\ mark' = [is |-> "done", version |-> mark.version + 1]
    /\ UNCHANGED <<cookie, named, freed, chooser, looked, node, begun>>

CookieGoes ==
    /\ mark.is = "done"
    /\ cookie' = Gone
    /\ UNCHANGED <<mark, named, freed, chooser, looked, node, begun>>

-----------------------------------------------------------------------------
(* The node itself. *)
NodeSees ==
    /\ IsRetired
    /\ node' = [node EXCEPT !.sees = TRUE]
    /\ UNCHANGED <<mark, cookie, named, freed, chooser, looked, begun>>

NodeReads(l) ==
    /\ node.sees
    /\ l \notin named
    /\ node' = [node EXCEPT !.read = @ \cup {l}]
    /\ UNCHANGED <<mark, cookie, named, freed, chooser, looked, begun>>

NodeFrees(l) ==
    /\ node.sees
    /\ l \in node.read
    /\ freed' = freed \cup {l}
    /\ UNCHANGED <<mark, cookie, named, chooser, looked, node, begun>>

Next ==
    \/ DrainBegins
    \/ DrainCancels
    \/ Retires
    \/ DrainEnds
    \/ CookieGoes
    \/ NodeSees
    \/ \E l \in Ledgers : WorkerMoves(l) \/ Looks(l) \/ NodeReads(l) \/ NodeFrees(l)
    \/ \E c \in Choosers : ReadsMark(c) \/ Names(c) \/ \E l \in Ledgers : ReadsCookie(c, l)

Spec == Init /\ [][Next]_vars

-----------------------------------------------------------------------------
(* What must hold. *)

(* What the node has freed, and so refuses, no ledger expects of it. *)
FreedIsNotNamed == freed \cap named = {}

(* When its identity goes nothing names the node, nor ever will. *)
GoneIsNotNamed == mark.is = "done" => named = {}

Symmetry == Permutations(Ledgers) \cup Permutations(Choosers)
=============================================================================
