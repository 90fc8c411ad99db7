#!/usr/bin/env bash
# Downloads what check.sh may have to install where there is no network:   bash tests/device/wheels.sh FOLDER
#
# Pure Python only. torch, triton, cupy, numpy and safetensors must be on that machine.
set -euo pipefail
python=${PYTHON:-python3}
any=(--only-binary=:all: --python-version 3.11 --implementation py --abi none --platform any)
"$python" -m pip download --quiet --disable-pip-version-check --no-deps "${any[@]}" --dest "${1:?name a folder}" \
    "pluggy>=1.5" "entrypoints>=0.4" "attrs>=23.2" "cattrs>=23.2" typing-extensions "tomli>=2.0" "click>=8.1" \
    "rich>=13" markdown-it-py mdurl pygments "setuptools>=77"
ls -1 "$1"
