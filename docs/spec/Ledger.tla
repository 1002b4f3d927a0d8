------------------------------- MODULE Ledger -------------------------------
(***************************************************************************)
(* The life of one replicated ledger: append, ensemble change, fence,      *)
(* recover, close, and the moving of settled segments to other nodes.      *)
(*                                                                         *)
(* One writer appends; several recoverers may close the ledger under it,   *)
(* at once; workers of the auto-recovery move what no longer changes.  An  *)
(* entry stands for a run.  Steps and names are those of the code:         *)
(* tierlog.ledger.writer, .recovery, and tierlog.catalog.ledgers.          *)
(*                                                                         *)
(* What is left out, and why nothing is lost by it:                        *)
(*  - Messages.  A request, once sent, may arrive at any time or never; an *)
(*    answer, once given, may be taken at any time or never.  So a lost, a *)
(*    late and a doubled message, a crashed client and a silent node are   *)
(*    all behaviours of this model: the step that they would make does not *)
(*    happen, or happens later.  Nothing is assumed about their order.     *)
(*  - Where a client's next step may be late anyway, giving an answer and  *)
(*    taking it are one step.  Answers to the writer's adds are not: which *)
(*    of them still count changes with the ensemble.                       *)
(*  - What a node answered is durable there: entries and fences.           *)
(*  - A node knows some LAC that the writer had before; which one is not   *)
(*    said, so every one is tried as the highest that a recoverer hears.   *)
(*  - Once the ledger is closed, those who still recover it do nothing but *)
(*    try to close it: other fences and copies would break nothing.        *)
(*  - Values.  One writer gives each id once, so an id is its value.       *)
(***************************************************************************)
EXTENDS Integers, Sequences, FiniteSets, TLC

CONSTANTS
    Nodes,            \* storage nodes
    Recoverers,       \* those who may recover the ledger
    EnsembleSize,
    WriteQuorum,
    AckQuorum,
    EntryCount,       \* the writer appends entries 0 .. EntryCount - 1
    WriterChanges,    \* so many ensemble changes by the writer at most
    RecoveryChanges,  \* so many by each recoverer
    Moves,            \* so many settled segments are moved to another node
    Silent            \* nodes that never answer a recoverer (used for liveness)

ASSUME /\ 1 <= AckQuorum /\ AckQuorum <= WriteQuorum /\ WriteQuorum <= EnsembleSize
       /\ EnsembleSize <= Cardinality(Nodes)
       /\ Silent \subseteq Nodes

VARIABLES
    metadata,   \* the ledger's znode: state, segments, last entry id
    writer,     \* what the writer knows
    sent,       \* sent[e]: the nodes to which the writer sent e
    added,      \* added[n]: entries that n took from the writer, and answered
    rewritten,  \* rewritten[n]: entries that n got from recoverers or workers
    resent,     \* resent[e]: the nodes to which recoverers sent e
    fenced,     \* nodes that refuse the writer's adds
    recovery,   \* recovery[r]: what recoverer r knows
    moves       \* how many segments were moved

vars == <<metadata, writer, sent, added, rewritten, resent, fenced, recovery, moves>>

NoEntry == -1
NoChange == -1
Ids == 0 .. EntryCount - 1
Max(a, b) == IF a > b THEN a ELSE b

-----------------------------------------------------------------------------
(* Segments and write sets: tierlog.model.ledger *)

Last(segments) == segments[Len(segments)]
Range(ensemble) == {ensemble[i] : i \in 1 .. Len(ensemble)}

SegmentOf(segments, e) ==
    CHOOSE i \in 1 .. Len(segments) :
        /\ segments[i].first <= e
        /\ \A j \in i + 1 .. Len(segments) : segments[j].first > e

WriteSetIn(ensemble, e) ==
    {ensemble[((e + step) % EnsembleSize) + 1] : step \in 0 .. WriteQuorum - 1}

WriteSet(segments, e) == WriteSetIn(segments[SegmentOf(segments, e)].ensemble, e)

(* A segment that begins where the last one does takes its place. *)
Extended(segments, segment) ==
    IF Last(segments).first = segment.first
    THEN [segments EXCEPT ![Len(segments)] = segment]
    ELSE Append(segments, segment)

Replaced(segments, first, position, node) ==
    Extended(segments, [first |-> first,
                        ensemble |-> [Last(segments).ensemble EXCEPT ![position] = node]])

Stored(n) == added[n] \cup rewritten[n]
Holders(segments, e) == {n \in WriteSet(segments, e) : e \in Stored(n)}

(* So many nodes of a write set leave no ack quorum without one of them. *)
Enough == WriteQuorum - AckQuorum + 1

Ensembles == {s \in [1 .. EnsembleSize -> Nodes] : Cardinality(Range(s)) = EnsembleSize}

-----------------------------------------------------------------------------
Init ==
    /\ \E ensemble \in Ensembles :
        LET segments == <<[first |-> 0, ensemble |-> ensemble]>>
        IN  /\ metadata = [state |-> "OPEN", segments |-> segments, last |-> NoEntry]
            /\ writer = [next |-> 0, lac |-> NoEntry, acks |-> [e \in Ids |-> {}],
                         segments |-> segments, change |-> NoChange,
                         changes |-> 0, ended |-> FALSE]
            /\ recovery = [r \in Recoverers |->
                            [phase |-> "idle", base |-> segments, segments |-> segments,
                             answered |-> {}, position |-> 0, changes |-> 0]]
    /\ sent = [e \in Ids |-> {}]
    /\ added = [n \in Nodes |-> {}]
    /\ rewritten = [n \in Nodes |-> {}]
    /\ resent = [e \in Ids |-> {}]
    /\ fenced = {}
    /\ moves = 0

-----------------------------------------------------------------------------
(* The writer *)

(* Confirms what has its ack quorum, in order, and nothing while the ensemble changes. *)
Confirmable(w, e) == Cardinality(w.acks[e]) >= AckQuorum

Advanced(w) ==
    LET reached == {e \in w.lac + 1 .. w.next - 1 :
                        \A before \in w.lac + 1 .. e : Confirmable(w, before)}
    IN  IF w.change # NoChange \/ reached = {} THEN w
        ELSE LET lac == CHOOSE e \in reached : \A other \in reached : other <= e
             IN  [w EXCEPT !.lac = lac,
                           !.acks = [e \in Ids |-> IF e <= lac THEN {} ELSE w.acks[e]]]

WriterSends ==
    /\ ~writer.ended
    /\ writer.next < EntryCount
    /\ sent' = [sent EXCEPT ![writer.next] = WriteSet(writer.segments, writer.next)]
    /\ writer' = [writer EXCEPT !.next = writer.next + 1]
    /\ UNCHANGED <<metadata, added, rewritten, resent, fenced, recovery, moves>>

WriterCountsAck(n, e) ==
    /\ ~writer.ended
    /\ e > writer.lac
    /\ e \in added[n]
    /\ n \notin writer.acks[e]
    /\ n \in WriteSet(writer.segments, e)  \* a late answer of a replaced node does not count
    /\ writer' = Advanced([writer EXCEPT !.acks[e] = @ \cup {n}])
    /\ UNCHANGED <<metadata, sent, added, rewritten, resent, fenced, recovery, moves>>

WriterBeginsChange ==
    /\ ~writer.ended
    /\ writer.change = NoChange
    /\ writer.changes < WriterChanges
    /\ writer' = [writer EXCEPT !.change = writer.lac + 1]
    /\ UNCHANGED <<metadata, sent, added, rewritten, resent, fenced, recovery, moves>>

(* The compare-and-set, and what the writer does once it knows of it. *)
WriterPublishesChange(position, node) ==
    LET segments == Replaced(writer.segments, writer.change, position, node)
        unconfirmed == writer.lac + 1 .. writer.next - 1
        acks == [e \in Ids |-> IF e \in unconfirmed
                               THEN writer.acks[e] \cap WriteSet(segments, e)
                               ELSE writer.acks[e]]
        learnt == [writer EXCEPT !.segments = segments, !.acks = acks,
                                 !.change = NoChange, !.changes = @ + 1]
    IN  /\ ~writer.ended
        /\ writer.change # NoChange
        /\ node \notin Range(Last(writer.segments).ensemble)
        /\ metadata.state = "OPEN"
        /\ metadata.segments = writer.segments  \* nobody moved a segment meanwhile
        /\ metadata' = [metadata EXCEPT !.segments = segments]
        /\ writer' = Advanced(learnt)
        /\ sent' = [e \in Ids |-> IF e \in unconfirmed
                                  THEN sent[e] \cup WriteSet(segments, e)
                                  ELSE sent[e]]
        /\ UNCHANGED <<added, rewritten, resent, fenced, recovery, moves>>

(* Refused, or nobody to replace with: it goes on with what it has. *)
WriterGivesUpChange ==
    /\ writer.change # NoChange
    /\ writer' = Advanced([writer EXCEPT !.change = NoChange])
    /\ UNCHANGED <<metadata, sent, added, rewritten, resent, fenced, recovery, moves>>

(* Someone moved a settled segment: the compare-and-set failed, and the writer reads again. *)
WriterReadsAgain ==
    /\ metadata.state = "OPEN"
    /\ metadata.segments # writer.segments
    /\ writer' = [writer EXCEPT !.segments = metadata.segments]
    /\ UNCHANGED <<metadata, sent, added, rewritten, resent, fenced, recovery, moves>>

WriterCloses ==
    /\ ~writer.ended
    /\ writer.change = NoChange
    /\ writer.lac = writer.next - 1
    /\ metadata.state # "CLOSED"
    /\ metadata' = [metadata EXCEPT !.state = "CLOSED", !.last = writer.next - 1]
    /\ writer' = [writer EXCEPT !.ended = TRUE]
    /\ UNCHANGED <<sent, added, rewritten, resent, fenced, recovery, moves>>

-----------------------------------------------------------------------------
(* The storage nodes *)

(* An ordinary add is refused once fenced, also when the entry is already there. *)
NodeAdds(n, e) ==
    /\ n \in sent[e]
    /\ e \notin added[n]
    /\ n \notin fenced
    /\ added' = [added EXCEPT ![n] = @ \cup {e}]
    /\ UNCHANGED <<metadata, writer, sent, rewritten, resent, fenced, recovery, moves>>

(* A recovery add is taken at any time, also late. *)
NodeRewrites(n, e) ==
    /\ n \in resent[e]
    /\ e \notin Stored(n)
    /\ metadata.state # "CLOSED"
    /\ rewritten' = [rewritten EXCEPT ![n] = @ \cup {e}]
    /\ UNCHANGED <<metadata, writer, sent, added, resent, fenced, recovery, moves>>

(* Also a ledger that the node has never seen. *)
Fenced(n) == fenced \cup {n}

(* A recoverer asked it, and its answer was lost. *)
NodeFencesUnheard(n) ==
    /\ n \notin fenced
    /\ metadata.state # "CLOSED"
    /\ \E r \in Recoverers : /\ recovery[r].phase \in {"fence", "read", "write"}
                             /\ n \in Range(Last(recovery[r].base).ensemble)
    /\ fenced' = Fenced(n)
    /\ UNCHANGED <<metadata, writer, sent, added, rewritten, resent, recovery, moves>>

-----------------------------------------------------------------------------
(* The recoverers *)

Answers(n) == n \notin Silent

RecoveryBegins(r) ==
    /\ recovery[r].phase = "idle"
    /\ metadata.state # "CLOSED"
    /\ metadata' = [metadata EXCEPT !.state = "IN_RECOVERY"]
    /\ recovery' = [recovery EXCEPT ![r].phase = "fence",
                                    ![r].base = metadata.segments,
                                    ![r].segments = metadata.segments]
    /\ UNCHANGED <<writer, sent, added, rewritten, resent, fenced, moves>>

RecoveryFences(r, n) ==
    LET me == recovery[r]
    IN  /\ me.phase = "fence"
        /\ n \in Range(Last(me.base).ensemble) \ me.answered
        /\ Answers(n)
        /\ fenced' = Fenced(n)
        /\ recovery' = [recovery EXCEPT ![r].answered = @ \cup {n}]
        /\ UNCHANGED <<metadata, writer, sent, added, rewritten, resent, moves>>

(* So many of every possible write set answered that no ack quorum is left unfenced. *)
RecoveryKnowsFenced(r) ==
    LET me == recovery[r]
        ensemble == Last(me.base).ensemble
        start(lac) == Max(lac, Last(me.base).first - 1) + 1
    IN  /\ me.phase = "fence"
        /\ \A e \in 0 .. EnsembleSize - 1 :
            Cardinality(WriteSetIn(ensemble, e) \cap me.answered) >= Enough
        /\ \E lac \in NoEntry .. writer.lac :
            recovery' = [recovery EXCEPT ![r].phase = "read",
                                         ![r].position = start(lac),
                                         ![r].answered = {}]
        /\ UNCHANGED <<metadata, writer, sent, added, rewritten, resent, fenced, moves>>

(* A recovery read fences the node before it answers.  One copy is enough to go on with. *)
RecoveryFinds(r, n) ==
    LET me == recovery[r]
    IN  /\ me.phase = "read"
        /\ n \in WriteSet(me.base, me.position)  \* not those that this recovery put there
        /\ Answers(n)
        /\ me.position \in Stored(n)
        /\ fenced' = Fenced(n)
        /\ recovery' = [recovery EXCEPT ![r].phase = "write", ![r].answered = {}]
        /\ resent' = [resent EXCEPT ![me.position] = @ \cup WriteSet(me.segments, me.position)]
        /\ UNCHANGED <<metadata, writer, sent, added, rewritten, moves>>

RecoveryMisses(r, n) ==
    LET me == recovery[r]
    IN  /\ me.phase = "read"
        /\ n \in WriteSet(me.base, me.position) \ me.answered
        /\ Answers(n)
        /\ me.position \notin Stored(n)  \* NO_SUCH_ENTRY; UNKNOWN and silence are no answers
        /\ fenced' = Fenced(n)
        /\ recovery' = [recovery EXCEPT ![r].answered = @ \cup {n}]
        /\ UNCHANGED <<metadata, writer, sent, added, rewritten, resent, moves>>

(* A node fails while the entry is re-written.  Only the closing step publishes the change. *)
(* Any node may be thought to have failed; but where progress is asked for, no change of    *)
(* the few that there are here is wasted.                                                   *)
RecoveryReplaces(r, position, node) ==
    LET me == recovery[r]
        segments == Replaced(me.segments, me.position, position, node)
    IN  /\ me.phase = "write"
        /\ me.changes < RecoveryChanges
        /\ Silent # {} => ~Answers(Last(me.segments).ensemble[position]) /\ Answers(node)
        /\ node \notin Range(Last(me.segments).ensemble)
        /\ recovery' = [recovery EXCEPT ![r].segments = segments, ![r].changes = @ + 1]
        /\ resent' = [resent EXCEPT ![me.position] = @ \cup WriteSet(segments, me.position)]
        /\ UNCHANGED <<metadata, writer, sent, added, rewritten, fenced, moves>>

(* The entry has its ack quorum again: on to the next one. *)
RecoveryRewrote(r) ==
    LET me == recovery[r]
    IN  /\ me.phase = "write"
        /\ Cardinality({n \in Holders(me.segments, me.position) : Answers(n)}) >= AckQuorum
        /\ recovery' = [recovery EXCEPT ![r].phase = "read", ![r].position = @ + 1]
        /\ UNCHANGED <<metadata, writer, sent, added, rewritten, resent, fenced, moves>>

(* The entry is absent, so the ledger ends before it.  Whoever closes first decides. *)
RecoveryCloses(r) ==
    LET me == recovery[r]
    IN  /\ me.phase = "read"
        /\ Cardinality(me.answered) >= Enough
        /\ metadata.state # "CLOSED"
        /\ metadata.segments = me.base
        /\ metadata' = [state |-> "CLOSED", segments |-> me.segments,
                        last |-> me.position - 1]
        /\ recovery' = [recovery EXCEPT ![r].phase = "done", ![r].answered = {}]
        /\ UNCHANGED <<writer, sent, added, rewritten, resent, fenced, moves>>

(* Someone moved a settled segment: take that over, and keep what comes after. *)
RecoveryReadsAgain(r) ==
    LET me == recovery[r]
        settled == Len(me.base) - 1
        mine == [i \in 1 .. Len(me.segments) |->
                    IF i <= settled THEN metadata.segments[i] ELSE me.segments[i]]
    IN  /\ me.phase \in {"fence", "read", "write"}
        /\ metadata.state # "CLOSED"
        /\ metadata.segments # me.base
        /\ recovery' = [recovery EXCEPT ![r].base = metadata.segments, ![r].segments = mine]
        /\ UNCHANGED <<metadata, writer, sent, added, rewritten, resent, fenced, moves>>

-----------------------------------------------------------------------------
(* Workers of the auto-recovery, and nodes that drop what nobody looks for there *)

(* Entries of a segment that nobody writes any more: of a closed ledger, or not of its end. *)
SettledOf(i) ==
    LET segments == metadata.segments
    IN  CASE i < Len(segments) -> segments[i].first .. segments[i + 1].first - 1
          [] metadata.state = "CLOSED" -> segments[i].first .. metadata.last
          [] OTHER -> {}

(* Copies first, then one compare-and-set. *)
WorkerMoves(i, position, node) ==
    LET ensemble == [metadata.segments[i].ensemble EXCEPT ![position] = node]
        needed == {e \in SettledOf(i) : node \in WriteSetIn(ensemble, e)}
    IN  /\ moves < Moves
        /\ SettledOf(i) # {}
        /\ node \notin Range(metadata.segments[i].ensemble)
        /\ rewritten' = [rewritten EXCEPT ![node] = @ \cup (needed \ added[node])]
        /\ metadata' = [metadata EXCEPT !.segments[i].ensemble = ensemble]
        /\ moves' = moves + 1
        /\ UNCHANGED <<writer, sent, added, resent, fenced, recovery>>

(* A drained node is emptied, a lost one is gone: settled entries may go from where the *)
(* metadata does not name them.                                                         *)
NodeDrops(n) ==
    LET settled == UNION {SettledOf(i) : i \in 1 .. Len(metadata.segments)}
        gone == {e \in settled : n \notin WriteSet(metadata.segments, e)}
    IN  /\ moves > 0
        /\ Stored(n) \cap gone # {}
        /\ added' = [added EXCEPT ![n] = @ \ gone]
        /\ rewritten' = [rewritten EXCEPT ![n] = @ \ gone]
        /\ UNCHANGED <<metadata, writer, sent, resent, fenced, recovery, moves>>

-----------------------------------------------------------------------------
RecoverySteps(r) ==
    \/ RecoveryCloses(r)
    \/ /\ metadata.state # "CLOSED"
       /\ \/ RecoveryBegins(r)
          \/ RecoveryKnowsFenced(r)
          \/ RecoveryRewrote(r)
          \/ RecoveryReadsAgain(r)
          \/ \E n \in Nodes : RecoveryFences(r, n) \/ RecoveryFinds(r, n) \/ RecoveryMisses(r, n)
          \/ \E position \in 1 .. EnsembleSize, n \in Nodes : RecoveryReplaces(r, position, n)

Next ==
    \/ WriterSends
    \/ WriterBeginsChange
    \/ WriterGivesUpChange
    \/ WriterReadsAgain
    \/ WriterCloses
    \/ \E n \in Nodes, e \in Ids : NodeAdds(n, e) \/ NodeRewrites(n, e) \/ WriterCountsAck(n, e)
    \/ \E n \in Nodes : NodeFencesUnheard(n) \/ NodeDrops(n)
    \/ \E position \in 1 .. EnsembleSize, n \in Nodes : WriterPublishesChange(position, n)
    \/ \E r \in Recoverers : RecoverySteps(r)
    \/ \E i \in 1 .. Len(metadata.segments), position \in 1 .. EnsembleSize, n \in Nodes :
        WorkerMoves(i, position, n)

Spec == Init /\ [][Next]_vars

-----------------------------------------------------------------------------
(* What must hold.  An entry is acknowledged when writer.lac has reached it. *)

TypeOK ==
    /\ metadata.state \in {"OPEN", "IN_RECOVERY", "CLOSED"}
    /\ metadata.last \in NoEntry .. EntryCount - 1
    /\ writer.lac \in NoEntry .. writer.next - 1
    /\ writer.next \in 0 .. EntryCount
    /\ writer.change \in {NoChange} \cup 0 .. EntryCount
    /\ \A e \in Ids : writer.acks[e] \subseteq sent[e] /\ sent[e] \subseteq Nodes
    /\ \A n \in Nodes : added[n] \subseteq Ids /\ rewritten[n] \subseteq Ids
    /\ \A r \in Recoverers :
        /\ recovery[r].phase \in {"idle", "fence", "read", "write", "done"}
        /\ recovery[r].position \in 0 .. EntryCount

(* An acknowledged entry lies on an ack quorum of the nodes that the metadata names for it: *)
(* it is lost only with that many of them.                                                  *)
AcknowledgedIsKept ==
    \A e \in 0 .. writer.lac : Cardinality(Holders(metadata.segments, e)) >= AckQuorum

(* A closed ledger ends behind everything that was, or ever will be, acknowledged. *)
ClosedHoldsAcknowledged ==
    metadata.state = "CLOSED" => writer.lac <= metadata.last

(* And it has no hole: each of its entries lies on an ack quorum, acknowledged or not. *)
ClosedIsWhole ==
    metadata.state = "CLOSED" =>
        \A e \in 0 .. metadata.last : Cardinality(Holders(metadata.segments, e)) >= AckQuorum

(* Each id lies in one segment. *)
SegmentsInOrder ==
    /\ metadata.segments[1].first = 0
    /\ \A i \in 1 .. Len(metadata.segments) - 1 :
        metadata.segments[i].first < metadata.segments[i + 1].first
    /\ \A i \in 1 .. Len(metadata.segments) :
        Cardinality(Range(metadata.segments[i].ensemble)) = EnsembleSize

(* A closed ledger is closed for ever, and ends where it ended. *)
ClosedForEver ==
    [][metadata.state = "CLOSED" =>
        metadata'.state = "CLOSED" /\ metadata'.last = metadata.last]_vars

-----------------------------------------------------------------------------
(* What comes about: a recoverer that goes on closes the ledger, though nodes are silent. *)

Fairness ==
    \A r \in Recoverers :
        /\ WF_vars(RecoveryBegins(r))
        /\ WF_vars(RecoveryKnowsFenced(r))
        /\ WF_vars(RecoveryRewrote(r))
        /\ WF_vars(RecoveryCloses(r))
        /\ WF_vars(RecoveryReadsAgain(r))
        /\ \A n \in Nodes : /\ WF_vars(RecoveryFences(r, n))
                            /\ WF_vars(RecoveryFinds(r, n))
                            /\ WF_vars(RecoveryMisses(r, n))
        /\ WF_vars(\E p \in 1 .. EnsembleSize, n \in Nodes : RecoveryReplaces(r, p, n))
        /\ \A n \in Nodes \ Silent, e \in Ids : WF_vars(NodeRewrites(n, e))

LiveSpec == Spec /\ Fairness
RecoveryEnds == <>(metadata.state = "CLOSED")

Symmetry == Permutations(Nodes) \cup Permutations(Recoverers)
=============================================================================
