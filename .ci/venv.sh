#!/usr/bin/env bash
# Make .venv of this checkout usable. Third-party packages live in virtual environments outside the checkout, one for
# each lock file and keyed by what it says, so that a second checkout or a second run installs nothing again and a
# changed tool does not install the engine anew; .venv only points there. What nobody used for a month is removed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
locks=(requirements/engine-cpu.lock requirements/dev.lock)
unused_days=30

# The interpreter below an activated virtual environment: that may be the .venv which is removed further down.
python=$("$python" - <<'PY'
import sys
if not (3, 11) <= sys.version_info < (3, 15):  # what vLLM's CPU build supports
    sys.exit(f"kvtier needs Python 3.11 to 3.14, found {sys.version.split()[0]}: set PYTHON=/path/to/python3.11")
print(sys._base_executable)
PY
)

cache=${KVTIER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvtier}
shared=()
for lock in "${locks[@]}"; do
    key=$( { "$python" -VV; cat "$lock" .ci/venv.sh; } | sha256sum | cut -c1-16)
    shared+=("$cache/venv-$(basename "$lock" .lock)-$key")
done
# An editable install holds absolute paths and a list of packages: a checkout that was copied, moved or changed in that
# needs a new .venv, or it would run the code of another one.
stamp=".venv/kvtier-$( { echo "${shared[@]}"; pwd -P; cat pyproject.toml e2e/pyproject.toml; } | sha256sum | cut -c1-16)"
is_complete() {
    local environment
    for environment in "${shared[@]}"; do
        [ -e "$environment/.complete" ] || return 1
        touch "$environment/.complete" 2> /dev/null || true     # says when it was used last
    done
}
[ -e "$stamp" ] && is_complete && exit 0

mkdir -p "$cache"
exec 9> "$cache/.lock"          # of two runs at once, the second waits and then finds the work done
flock 9
for number in "${!locks[@]}"; do
    lock=${locks[number]} environment=${shared[number]}
    [ -e "$environment/.complete" ] && continue
    echo "installing $lock into $environment (once for this lock file; the engine's takes about 3.5 GB)"
    rm -rf "$environment"
    "$python" -m venv "$environment"
    pip=("$environment/bin/python" -m pip --quiet --disable-pip-version-check)
    # --no-deps: the locks are complete, and PyPI's torchvision and torchaudio, which vLLM's CPU build asks for, are
    # CUDA builds that break it. The CPU build of torch is on PyTorch's own index unless pip is configured to find it.
    if torch=$(grep '^torch==' "$lock"); then
        "${pip[@]}" install --no-deps "$torch" 2> /dev/null ||
            "${pip[@]}" install --no-deps "$torch" --extra-index-url https://download.pytorch.org/whl/cpu
    fi
    "${pip[@]}" install --no-deps --require-hashes --requirement=<(grep -v '^torch==' "$lock")
    touch "$environment/.complete"
done
is_complete
find "$cache" -mindepth 2 -maxdepth 2 -name .complete -mtime "+$unused_days" -printf '%h\0' | xargs -0 -r rm -rf

rm -rf .venv
"$python" -m venv --without-pip .venv
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
for environment in "${shared[@]}"; do
    packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    # addsitedir instead of a bare path: the .pth files of the cached environment count too
    echo "import site; site.addsitedir('$packages')"
done > "$site/kvtier-packages.pth"
for project in . e2e; do
    "${shared[0]}/bin/python" -m pip --quiet --disable-pip-version-check --python .venv/bin/python \
        install --no-deps --no-build-isolation --editable "$project"
done
touch "$stamp"
