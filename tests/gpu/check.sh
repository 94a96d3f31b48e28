#!/bin/sh
# The GPU check of this checkout, without installing it; see check.py.
root=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH="$root:$root/kernels:$root/integrations${PYTHONPATH:+:$PYTHONPATH}"
unset TRITON_INTERPRET
exec "${PYTHON:-python3}" "$root/tests/gpu/check.py"
