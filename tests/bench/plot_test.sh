#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: plot_test.sh PROGRAM
# bench/plot.py on what the program writes, with the first Python that has matplotlib.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")

for python in "${PYTHON:-python3}" /usr/bin/python3; do
  if "$python" -c 'import matplotlib' 2>/dev/null; then
    exec "$python" "$here/plot_test.py" "$1"
  fi
done
echo "skipped: no Python here has matplotlib (./test --all installs python3-matplotlib)"
exit 77
