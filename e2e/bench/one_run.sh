#!/usr/bin/env bash
# The traffic benchmark on one GPU with 139 GiB and a host with 126 GiB, in parts of less than ten minutes:
#
#   one_run.sh PART OUT      PART: ram, stock, disk, lmcache, large, agents
#
# Run them from the root of the checkout; OUT gets a folder for each.
set -u
part=$1 out=$2/$1
work=${WORK:-/tmp/bench} ram=${RAM:-/dev/shm/bench} disk=${DISK:-/tmp/disk} device=${DEVICE:-gpu} limit=${LIMIT:-560}
mkdir -p "$out" "$work" "$ram" "$disk"
export PYTHONPATH=$PWD:$PWD/connector:$PWD/operator:$PWD/e2e/netfs:${PYTHONPATH:-}
short='2048,8192,16384,32768,2048,8192,16384,32768'
[ "$device" = gpu ] || short=256,1024
sizes() { echo "{\"users\":0,\"single_repetitions\":1,\"single_tokens\":[$1],\"bursts\":${BURSTS:-400},\"agent_steps\":2}"; }
play() { python3 e2e/bench/traffic.py --device "$device" --out "$out" --work "$work" --volume "${volume:-$ram}" --variant "$part" "$@"; }
long=${LONG-,120000}

rm -rf "${ram:?}"/* "${disk:?}"/*
case $part in
ram)
  play --time-limit "$limit" --sizes "$(sizes "$short$long")" \
    none:all-in-gpu:A:C:D:E:single:bursts512,kvtier:traffic:A:C:prepare-bursts512:bursts512:prepare:D:E:single:rates ;;
stock)
  play --time-limit "$limit" --sizes "$(sizes "$short$long")" fs:traffic:A:C:prepare:D:E:single:prepare-bursts512:bursts512
  rm -rf "${ram:?}"/* ;;
disk)
  volume=$disk play --time-limit "$limit" --sizes "$(sizes "$short${DISK_LONG-}")" \
    kvtier:traffic:prepare:D:single,kvtier-whole:traffic:D:single
  rm -rf "${disk:?}"/* ;;
lmcache)
  volume=$disk play --time-limit "$limit" --sizes "$(sizes "$short")" lmcache:traffic:single,lmcache-disk:traffic:single
  rm -rf "${disk:?}"/* ;;
large)
  work=$work/large volume=$disk play --time-limit "$limit" --shape qwen3_32b --sizes "$(sizes 8192,32768,8192,32768)" \
    kvtier:large:single:prepare-single:single
  rm -rf "${disk:?}"/* ;;
agents)
  work=$work/agents play --time-limit "$limit" --shape gpt_oss_20b --sizes "$(sizes 2048,8192)" \
    none:agents:agents,kvtier:agents:agents fs:agents:agents ;;
esac
