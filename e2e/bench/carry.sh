#!/usr/bin/env bash
# Gathers what a GPU machine without a package registry lacks for the parts `disk` (LMCache) and `network` of one_run.sh:
#
#   carry.sh OUT     OUT/netfs.tar.xz from this machine's Debian packages, OUT/lmcache/*.whl for Python 3.12
#
# There, as root:    tar x --skip-old-files -C / -f OUT/netfs.tar.xz; ldconfig
#                    python3 -m pip install --no-index --no-deps --target /tmp/lmcache OUT/lmcache/*.whl
#                    export PYTHONPATH=/tmp/lmcache:$PYTHONPATH
set -euo pipefail
out=$(realpath -m "${1:?usage: carry.sh OUT}")
mkdir -p "$out/lmcache"

programs=(glusterfsd glusterfs ganesha.nfsd mkfs.xfs mount.nfs mount.nfs4 umount.nfs ip nsenter unshare)
lib=/usr/lib/x86_64-linux-gnu
mapfile -t files < <(
  for program in "${programs[@]}"; do command -v "$program" || echo "$program is absent: see python -m kvtier_netfs --list" >&2; done
  find "$lib"/glusterfs/*/xlator "$lib"/glusterfs/*/rpc-transport "$lib"/glusterfs/*/auth "$lib/ganesha" /usr/lib/ganesha -name '*.so*'
)
mapfile -t libraries < <(ldd "${files[@]}" 2> /dev/null | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | grep -v /libc.so | sort -u)
# By the names that programs ask for, below /usr: an older /lib would replace a link to it.
for file in "${files[@]}" "${libraries[@]}"; do echo "$(realpath "$(dirname "$file")")/$(basename "$file")"; done |
  sort -u | tar c --dereference --absolute-names -f - --transform 's,^/,,' -T - | xz -T0 > "$out/netfs.tar.xz"

platforms=()
for name in manylinux_2_17 manylinux2014 manylinux_2_28 manylinux_2_34; do platforms+=(--platform "${name}_x86_64"); done
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
  -d "$out/lmcache" lmcache==0.5.3 aiofile==3.12.3 caio==0.12.10 redis==8.1.0 uvicorn opentelemetry-exporter-prometheus==0.66b2
du -sh "$out"/*
