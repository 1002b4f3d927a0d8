#!/bin/sh
# Proves that a deployment works: appends, seals, offloads, and reads back from tier 2.
# It needs `tierlog` and the TIERLOG_CLIENT__ addresses. Exit code 0: everything came back.
set -eu
stream="smoke-$(date +%s)-$$"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
say() { echo "smoke: $*"; }

count="${SMOKE_EVENTS:-1000}"
i=0
while [ "$i" -lt "$count" ]; do
  echo "event $i of $stream"
  i=$((i + 1))
done > "$work/sent"

say "append $count events to $stream"
tierlog append "$stream" "$work/sent" -q
say "seal it, and offload it"
tierlog stream seal "$stream"
tierlog offload run "$stream" --wait --timeout "${SMOKE_TIMEOUT_S:-120}" -q
say "read it back"
tierlog read "$stream" > "$work/got"
if ! cmp -s "$work/sent" "$work/got"; then
  say "what was read is not what was appended: $(wc -l < "$work/got") of $count lines" >&2
  exit 6
fi
tier="$(tierlog read "$stream" -n 1 -o jsonl | sed -n 's/.*"tier": *"\([a-z0-9]*\)".*/\1/p')"
if [ "$tier" != tier2 ]; then
  say "it was offloaded, and yet read from '$tier'" >&2
  exit 1
fi
tierlog stream delete "$stream" --yes > "$work/deleted"
say "ok: $count events came back from $tier"
