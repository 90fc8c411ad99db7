#!/usr/bin/env bash
# Checks dsx on a machine with a GPU, in under eight minutes:   bash tests/device/check.sh [WHEELS]
#
# Every kernel, by Triton and by CUDA, against the float64 reference, the engine under every layout against plain PyTorch,
# alone and on two ranks, with side streams as they are and slow ones, and kernels timed against the bandwidth that this
# GPU has, block attention against torch's. WHEELS is a folder of wheels made by wheels.sh, from which what this Python
# lacks is installed, without a network and beside the build, not into it.
# Results: $OUT/results.json, if OUT is set. Exit code: 0 all is well, 1 something is not, 77 there is no GPU here.
# PYTHON names the interpreter, python3 by default; DEVICE=cpu tries the script itself, with what kernels a CPU has.
# PATIENCE multiplies the time that each part has: on a busy machine, more than 1.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
wheels=${1:-}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -c 'import torch' || { echo "$python has no torch: PYTHON names another one"; exit 77; }
[ "$device" != cuda ] || "$python" - <<'CHECK' || exit 77
import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"no GPU here: torch {torch.__version__} sees none; nothing was checked")
CHECK

site=$work/site
export PYTHONPATH=$site PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
mkdir "$site" "$work/source"
install=("$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$site")
if [ -n "$wheels" ]; then "$python" "$root/tests/device/lacking.py" "$wheels" >"$work/lacking"; else : >"$work/lacking"; fi
[ ! -s "$work/lacking" ] || xargs "${install[@]}" <"$work/lacking"

# A copy is built: setuptools writes beside the sources, which may be read-only.
cp -r "$root"/{core,kernels,plugins,plugin_template,LICENSE,MANIFEST.in,README.md,pyproject.toml,setup.py} "$work/source"
"${install[@]}" --no-build-isolation "$work/source"

export PYTHONPATH=$site:$root/tests
cd "$work"
"$python" -m device.check --device "$device" --patience "${PATIENCE:-1}" ${OUT:+--out "$OUT"}
