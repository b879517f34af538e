#!/usr/bin/env bash
# The traffic benchmark on one GPU with 139 GiB and a host with 126 GiB. All parts continue one journal, OUT/traffic.jsonl:
#
#   one_run.sh OUT PART...     PART: ram disk agents heavy router fp8 long large network stock
#
# Run it from the root of the checkout. After LIMIT seconds it ends, and what it has measured is kept; README.md has a plan.
# DEVICE=cpu rehearses all parts on vLLM's CPU build with tiny models, which takes an hour.
set -u
out=$1; shift
work=${WORK:-/tmp/bench} ram=${RAM:-/dev/shm/bench} device=${DEVICE:-gpu} limit=${LIMIT:-570}
mkdir -p "$out" "$work" "$ram" "${DISK:=/tmp/disk}"
disk=$(realpath "$DISK")    # a tier refuses a directory below a link
export PYTHONPATH=$PWD:$PWD/connector:$PWD/operator:$PWD/e2e/netfs:${PYTHONPATH:-} LMCACHE_TRACK_USAGE=false
if [ "$device" = gpu ]; then
  four=2048,8192,16384,32768 two=8192,32768 long=,120000 mib=24576 bursts=240 rates=3.125,1.25
  large=qwen3_32b hybrid=gpt_oss_8_experts small=llama_3b
  routers=("kvtier:router,none:router") fewer='"agent_steps":3,'
else
  four=256,1024 two=256,1024 long='' mib=1024 bursts=6 rates=0.1,0.05 large=gqa hybrid=gpt_oss_small
  small=llama routers=(kvtier:router none:router) fewer=''
fi
sizes() { echo "{$fewer\"single_repetitions\":1,\"bursts\":$bursts,\"single_tokens\":[$1]${2-}}"; }

# play VOLUME SIZES MORE...
play() {
  python3 e2e/bench/traffic.py --device "$device" --out "$out" --work "$work/$part" --variant "$part" \
    --time-limit $((limit - SECONDS)) --volume "$1" --sizes "$2" --engine "${ENGINE:-{\}}" "${@:3}"
}

for part; do
  [ $((limit - SECONDS)) -gt 60 ] || { echo "$part: no time left"; continue; }
  rm -rf "${ram:?}"/* "${disk:?}"/*
  case $part in
  ram) # computed and from a RAM disk, which is then slowed down
    play "$ram" "$(sizes "$four,$four$long")" \
      none:all-in-gpu:A:C:D:E:single:bursts512,kvtier:traffic:A:C:prepare-bursts512:bursts512:prepare:D:E:single:rates ;;
  disk) # four engines start at once
    play "$disk" "$(sizes "$four,${four#*,}")" \
      kvtier:traffic:A:prepare:D:E:single,kvtier-whole:disk:D:single,lmcache:disk:single,lmcache-disk:disk:single ;;
  agents)
    runs=kvtier:agents:agents:returning,none:agents:agents,fs:agents:agents:returning
    play "$ram" "$(sizes "$two")" --shape "$hybrid" "$runs"
    grep -q '"variant": "agents", "cell"' "$out/traffic.jsonl" || # no engine of that shape
      play "$ram" "$(sizes "$two" ',"agents":4')" "$runs" ;;
  heavy)
    play "$ram" "$(sizes "$two")" none:preemption,kvtier:preemption,kvtier:killed ;;
  router) # of 8-bit blocks, for the same reason as `long`
    play "$ram" "$(sizes "$two")" --engine '{"kv_cache_dtype": "fp8"}' --shape "$small" "${routers[@]}" ;;
  fp8)
    play "$ram" "$(sizes "$four")" --engine '{"kv_cache_dtype": "fp8"}' none:disk:single:D,kvtier:disk:prepare:single:D ;;
  long) # of 8-bit blocks, so that ten prompts of 120,000 tokens fit the RAM disk
    for backend in kvtier fs; do
      play "$ram" "$(sizes "$two")" --engine '{"kv_cache_dtype": "fp8"}' "$backend:long:prepare-long:long"
    done ;;
  large)
    play "$disk" "$(sizes "$two")" --shape "$large" kvtier:large:single:prepare-single:single ;;
  network) # as quick as they are, then slowed down to lines of 25 and 10 Gbit/s
    for kind in glusterfs-distribute nfs; do
      TMPDIR=$(dirname "$ram") python3 -m kvtier_netfs --disk-mib "$mib" "$kind" -- \
        env "MOUNT={a}" LIMIT=$((limit - SECONDS)) "$0" "$out" "$kind"
    done ;;
  glusterfs-distribute | nfs)
    play "$MOUNT" "$(sizes "$four" ",\"volume_rates\":[$rates]")" kvtier:disk:prepare:D:single:rates ;;
  stock)
    play "$ram" "$(sizes "$four$long")" fs:traffic:prepare:D:E:single:C:prepare-bursts512:bursts512:A ;;
  esac
done
rm -rf "${ram:?}"/* "${disk:?}"/*
