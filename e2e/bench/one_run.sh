#!/usr/bin/env bash
# The traffic benchmark on one GPU with 139 GiB and a host with 126 GiB, in parts of less than ten minutes:
#
#   one_run.sh PART OUT [BEFORE]      PART: ram, stock, disk, lmcache, large, agents
#
# Run them in this order from the root of the checkout; OUT gets a folder for each. BEFORE is a checkout of an earlier
# commit whose traffic.py waits for the file `go` in its `--work` (see README.md); `stock` and `disk` play it as well.
set -u
part=$1 out=$2/$1 before=${3:-}
work=${WORK:-/tmp/bench} ram=${RAM:-/dev/shm/bench} disk=${DISK:-/tmp/disk} device=${DEVICE:-gpu} limit=${LIMIT:-560}
mkdir -p "$out" "$work" "$ram" "$disk"
base=${PYTHONPATH:-}
export PYTHONPATH=$PWD:$PWD/connector:$PWD/operator:$PWD/e2e/netfs:$base
short='2048,8192,16384,32768,2048,8192,16384,32768'
[ "$device" = gpu ] || short=256,1024
sizes() { echo "{\"users\":0,\"single_repetitions\":1,\"single_tokens\":[$1],\"bursts\":${BURSTS:-400},\"agent_steps\":2}"; }
play() { python3 e2e/bench/traffic.py --device "$device" --out "$out" --work "$work" --volume "$ram" --variant "$part" "$@"; }
long=${LONG-,120000}

# Starts an engine of the earlier commit, which plays when `play_before` says so.
start_before() {
  [ -n "$before" ] || return 0
  rm -rf "$work/before"; mkdir -p "$out/before" "$work/before"
  (cd "$before" && PYTHONPATH=$PWD:$PWD/connector:$PWD/operator:$base python3 e2e/bench/traffic.py --device "$device" \
    --out "$out/before" --work "$work/before" --volume "$ram-before" --variant before --time-limit "$limit" \
    --sizes "{\"users\":0,\"single_repetitions\":1,\"single_tokens\":[$short]}" "kvtier:traffic:${BEFORE-A:C:prepare:D:E:single}") &
}
play_before() {
  [ -n "$before" ] || return 0
  touch "$work/before/go"; wait; rm -rf "$ram-before"
}

case $part in
ram)
  play --time-limit "$limit" --sizes "$(sizes "$short$long")" \
    none:all-in-gpu:A:C:D:E:single:bursts512,kvtier:traffic:A:C:prepare-bursts512:bursts512:prepare:D:E:single:rates ;;
stock)
  start_before; rm -rf "${ram:?}"/*
  play --time-limit "$limit" --sizes "$(sizes "$short$long")" fs:traffic:A:C:prepare:D:E:single:prepare-bursts512:bursts512
  rm -rf "${ram:?}"/*; play_before ;;
disk)
  start_before; rm -rf "${ram:?}"/* "${disk:?}"/*; mkdir -p "$disk/kvtier"; ln -s "$disk/kvtier" "$ram/"
  play --time-limit "$limit" --sizes "$(sizes "$short${DISK_LONG-}")" \
    kvtier:traffic:prepare:D:single,kvtier-whole:traffic:D:single
  rm -rf "${ram:?}"/* "${disk:?}"/*; play_before ;;
lmcache)
  rm -rf "${ram:?}"/* "${disk:?}"/*; mkdir -p "$disk/lmcache-disk"; ln -s "$disk/lmcache-disk" "$ram/"
  play --time-limit "$limit" --sizes "$(sizes "$short")" lmcache:traffic:single,lmcache-disk:traffic:single
  rm -rf "${ram:?}"/* "${disk:?}"/* ;;
large)
  rm -rf "${ram:?}"/* "${disk:?}"/*; mkdir -p "$disk/kvtier"; ln -s "$disk/kvtier" "$ram/"
  work=$work/large play --time-limit "$limit" --shape qwen3_32b --sizes "$(sizes 8192,32768,8192,32768)" \
    kvtier:large:single:prepare-single:single
  rm -rf "${ram:?}"/* "${disk:?}"/* ;;
agents)
  rm -rf "${ram:?}"/*
  work=$work/agents play --time-limit "$limit" --shape gpt_oss_20b --sizes "$(sizes 2048,8192)" \
    none:agents:agents,kvtier:agents:agents fs:agents:agents ;;
esac
